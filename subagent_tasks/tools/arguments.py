"""What a model may pass to the delegation and job tools: strict types, clean text, bounded sizes.

Decides whether the arguments of one call are acceptable and which route the call takes; starts nothing. Undeclared
keys are accepted and ignored (behaviour §2.2), so a hidden feature is refused here again. One refusal names every
violation: the field, what is wrong, the value (never prompt text, P14) and the fix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from subagent_tasks.errors import InvalidArguments, ToolError
from subagent_tasks.tools.config import DelegationToolConfig, JobToolsConfig, display_value, text_flaw

MAX_NESTING = 64
# Labels, ids and reasons are repeated in listings, notices and errors.
MAX_SHORT_TEXT_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class DelegationArguments:
    """One delegation. None means the field was not given."""

    description: str
    prompt: str
    provider: str | None = None
    model: str | None = None
    reasoning_effort: str | None = None
    run_in_background: bool | None = None

    @property
    def selects_model(self) -> bool:
        """Whether the model chose anything of the child's route (behaviour §6)."""
        return any(field is not None for field in (self.provider, self.model, self.reasoning_effort))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutputArguments:
    """`timeout_ms` is positive and finite when `wait` is set; without it, it means nothing and is not looked at."""

    job_id: str
    wait: bool = False
    timeout_ms: int | float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKillArguments:
    job_id: str
    reason: str | None = None


def parse_delegation(arguments: dict[str, Any] | str, *, max_prompt_bytes: int | None = None) -> DelegationArguments:
    """Read the arguments of a delegation tool. Raises `InvalidArguments` naming every violation (behaviour §2.7).

    A prompt without any visible text is refused: the child would have nothing to do and model APIs reject empty text.
    An empty `description` is fine here; a one-shot background job needs one (`check_job_label`).
    """
    fields = _Fields(arguments)
    description = fields.text("description", hide_text=True)
    prompt = fields.text("prompt", hide_text=True, max_bytes=max_prompt_bytes)
    if fields.is_sound("prompt") and not prompt.strip():
        fields.refuse("prompt", "empty; say what the agent is to do")
    parsed = DelegationArguments(
        description=description,
        prompt=prompt,
        provider=fields.optional_text("provider"),
        model=fields.optional_text("model"),
        reasoning_effort=fields.optional_text("reasoning_effort"),
        run_in_background=fields.flag("run_in_background"),
    )
    fields.close()
    return parsed


def parse_job_output(arguments: dict[str, Any] | str) -> JobOutputArguments:
    """Read the arguments of `job_output`. Raises `InvalidArguments` (behaviour §3.5)."""
    fields = _Fields(arguments)
    parsed = JobOutputArguments(
        job_id=fields.text("job_id"), wait=fields.flag("wait") or False, timeout_ms=fields.number("timeout_ms")
    )
    fields.close()
    _check_job_id(parsed.job_id)
    timeout_ms = parsed.timeout_ms
    # Models fill unused fields with 0, so a timeout without a wait is not worth an error.
    if parsed.wait and timeout_ms is not None and not 0 < timeout_ms < math.inf:
        raise InvalidArguments(
            f"invalid wait timeout: expected a positive number of milliseconds, got {display_value(timeout_ms)}"
        )
    return parsed


def parse_job_kill(arguments: dict[str, Any] | str) -> JobKillArguments:
    """Read the arguments of `job_kill`. Raises `InvalidArguments` (behaviour §3.5)."""
    fields = _Fields(arguments)
    parsed = JobKillArguments(job_id=fields.text("job_id"), reason=fields.optional_text("reason", hide_text=True))
    fields.close()
    _check_job_id(parsed.job_id)
    return parsed


def parse_job_list(arguments: dict[str, Any] | str) -> None:
    """`job_list` takes nothing; anything but an object is still refused. Raises `InvalidArguments`."""
    _Fields(arguments).close()


def foreground_or_background(
    arguments: DelegationArguments, config: DelegationToolConfig, *, session_selects_model: bool = False
) -> Literal["foreground", "background"]:
    """The route of a call (behaviour §2.7 steps 5, 8, 9), refusing what the tool instance does not offer.

    Raises `ToolError` for a selection field while selection is off (behaviour §6.1), and for a forced background call
    while background is off.
    """
    if arguments.selects_model and not config.selects_model(session_selects_model=session_selects_model):
        raise ToolError("child model selection is disabled for this tool instance")
    if arguments.run_in_background and not config.enable_run_in_background:
        raise ToolError("run_in_background is disabled for this tool instance (enableRunInBackground: false)")
    if arguments.run_in_background is None:
        return "background" if config.runs_in_background_by_default() else "foreground"
    return "background" if arguments.run_in_background else "foreground"


def check_job_label(label: str) -> None:
    """A one-shot background job needs a label to be listed by. Raises `InvalidArguments` (behaviour §3.3)."""
    if not label.strip():
        raise InvalidArguments("invalid job label: expected a non-empty string")


def wait_ms(arguments: JobOutputArguments, config: JobToolsConfig) -> int:
    """How long a waiting `job_output` waits, in milliseconds: what was asked or the default, under the cap."""
    # Without a wait it was not looked at, and may be no number at all.
    asked = arguments.timeout_ms if arguments.wait else None
    asked = config.wait_timeout_ms if asked is None else asked
    return math.ceil(min(asked, config.max_wait_timeout_ms))


def _check_job_id(job_id: str) -> None:
    if not job_id:
        raise InvalidArguments('invalid job_id: expected a non-empty string, got ""')


class _Fields:
    """Reads declared fields one by one and collects what is wrong, so that one answer names every violation.

    After a violation a reader returns a harmless value; `close` raises before anybody sees it.
    """

    def __init__(self, arguments: Mapping[str, Any] | str) -> None:
        self._violations: dict[str, str] = {}
        self._values: Mapping[str, Any] = {}
        if not isinstance(arguments, Mapping):
            shown = display_value(arguments, hide_text=True)
            raise _invalid([f"arguments: expected a JSON object, got {shown}; send one object with the named fields"])
        if _nests_too_deep(arguments):
            raise _invalid([f"arguments: nested deeper than {MAX_NESTING} levels; send only the declared fields"])
        self._values = arguments

    def text(self, name: str, *, max_bytes: int | None = MAX_SHORT_TEXT_BYTES, hide_text: bool = False) -> str:
        if name not in self._values:
            self.refuse(name, "required, but missing; give a string")
            return ""
        value = self._values[name]
        if not isinstance(value, str):
            self.refuse(name, f"expected a string, got {display_value(value, hide_text=hide_text)}")
            return ""
        flaw = text_flaw(value)
        if flaw is not None:
            self.refuse(name, flaw)
            return ""
        size = len(value.encode())
        if max_bytes is not None and size > max_bytes:
            self.refuse(name, f"{size} bytes of UTF-8 exceed the limit of {max_bytes}; shorten it")
            return ""
        return value

    def optional_text(self, name: str, *, hide_text: bool = False) -> str | None:
        return self.text(name, hide_text=hide_text) if name in self._values else None

    def flag(self, name: str) -> bool | None:
        value = self._values.get(name)
        if name in self._values and not isinstance(value, bool):
            self.refuse(name, f"expected true or false, got {display_value(value)}; give a boolean or leave it out")
        return value if isinstance(value, bool) else None

    def number(self, name: str) -> int | float | None:
        value = self._values.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name in self._values and not is_number:
            self.refuse(name, f"expected a number, got {display_value(value)}; give a number or leave it out")
        return value if is_number else None

    def is_sound(self, name: str) -> bool:
        return name not in self._violations

    def refuse(self, name: str, violation: str) -> None:
        self._violations[name] = f"{name}: {violation}"

    def close(self) -> None:
        if self._violations:
            raise _invalid(list(self._violations.values()))


def _invalid(violations: list[str]) -> InvalidArguments:
    return InvalidArguments(f"invalid arguments: {'; '.join(violations)}")


def _nests_too_deep(arguments: Mapping[str, Any]) -> bool:
    """Level by level instead of recursively; by identity, so that an object met twice in a level is walked once."""
    level: dict[int, object] = {id(arguments): arguments}
    for _ in range(MAX_NESTING):
        inner: dict[int, object] = {}
        for container in level.values():
            children = cast("Mapping[str, object]", container).values() if isinstance(container, Mapping) else container
            for child in cast("Iterable[object]", children):
                if isinstance(child, Mapping | list | tuple):
                    inner[id(cast("object", child))] = cast("object", child)
        if not inner:
            return False
        level = inner
    return True
