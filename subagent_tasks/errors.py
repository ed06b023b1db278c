"""Every error the package raises, in families by who can act on it: caller, model, operator, programmer.

`code` is the machine-readable name (behaviour §4.14); the message says what failed, which value, and what to do next.
Foreign errors are translated once, at the edge that met them, and chained.
"""

from __future__ import annotations


class SubagentError(Exception):
    """The root of everything this package raises on purpose."""

    code: str = "ERROR"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class CallerError(SubagentError):
    """The calling code passed something that cannot be accepted; nothing was started."""

    code = "INVALID_ARGS"


class Conflict(CallerError):
    """The `call_id` was used before with other arguments; the earlier run is untouched."""

    code = "CONFLICT"


class Unauthorized(CallerError):
    """The session may not act on that id."""

    code = "UNAUTHORIZED"


class UnknownJob(CallerError):
    """No job with that id is known to the session."""

    code = "UNKNOWN_JOB"


class ToolError(SubagentError):
    """A tool call the model made cannot be carried out; rendered to the model as `Error: <message>`."""

    code = "TOOL_ERROR"


class InvalidArguments(ToolError):
    """The arguments of a tool call do not fit its schema."""

    code = "INVALID_ARGS"


class LimitReached(ToolError):
    """A cap (active jobs, depth) refuses the call; nothing was started."""

    code = "LIMIT_REACHED"


class ChildFailed(ToolError):
    """A foreground child ended other than `completed`; the message is its rendering (behaviour §2.9)."""

    code = "CHILD_FAILED"


class OperatorError(SubagentError):
    """Something about the deployment is wrong: the broker, a setting, a worker."""

    code = "OPERATOR"


class BrokerUnavailable(OperatorError):
    """Redis did not answer within the stated wait."""

    code = "BROKER_UNAVAILABLE"


class UnsupportedVersion(OperatorError):
    """A record was written by a newer version of this package."""

    code = "UNSUPPORTED_VERSION"


class UnreadableRecord(OperatorError):
    """What the server holds of a run or session is incomplete or broken; nothing was changed."""

    code = "UNREADABLE_RECORD"


class ConfigurationError(SubagentError):
    """A declaration (app, provider, tool configuration) is wrong; raised where it is declared."""

    code = "CONFIGURATION"


class DuplicateProvider(ConfigurationError):
    """Two providers of one name."""

    code = "DUPLICATE_PROVIDER"


class NoProvider(ConfigurationError):
    """No provider of that name is declared."""

    code = "NO_PROVIDER"


class UnsupportedCapability(ConfigurationError):
    """A request names something its provider does not support."""

    code = "UNSUPPORTED_CAPABILITY"


class SubagentFailed(Exception):
    """What `AsyncResult(job_id).get()` raises for a failed run, where this module is imported.

    Celery rebuilds it from `exc_message`, so it takes whatever positional arguments were stored.
    """


class DriveStopped(BaseException):
    """Raised inside a drive when it must start no further effect.

    A `BaseException`, so that an agent loop's error handling cannot swallow it. `reason` is `kill` (it was killed),
    `stale` (another process drives it now) or `release` (this worker is shutting down and hands the run back).
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
