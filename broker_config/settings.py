"""Every number and address the deployment decides, read once from `SUBAGENT_TASKS_*`.

The only reader of the environment. It checks what it read, and how the numbers relate, before anything starts (P13);
what the numbers make Celery do is in `celery_settings.py`, what they mean for a run in protocol §7.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final, Self, cast
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

ENV_PREFIX: Final = "SUBAGENT_TASKS_"

# Ten years: far beyond any use, far below where a server refuses an expiry.
Seconds = Annotated[float, Field(gt=0, le=10 * 365 * 86_400, allow_inf_nan=False)]
# Lua's numbers are doubles: above this they are no longer exact.
Count = Annotated[int, Field(ge=1, le=2**53 - 1)]

_MINUTE: Final = 60
_HOUR: Final = 60 * _MINUTE
_DAY: Final = 24 * _HOUR
_KIB: Final = 1024
_MIB: Final = 1024 * _KIB


class SettingsError(ValueError):
    """The settings cannot be used. The message names every variable that is wrong, its value and what would do."""


class _Environment(EnvSettingsSource):
    """The process environment, where a misspelt name is an error instead of a default that silently applies."""

    def __call__(self) -> dict[str, Any]:
        values = super().__call__()
        prefix = ENV_PREFIX.lower()
        for variable, value in self.env_vars.items():
            name = variable.removeprefix(prefix)
            if name == variable or name in self.settings_cls.model_fields or _is_service_link(name, value or ""):
                continue
            # The value is left behind: whatever it is, it belongs in no error.
            values[name] = None
        return values


class BrokerSettings(BaseSettings):
    """What the deployment decides. Frozen: the environment cannot change after it was read.

    Use `load_settings` to get one readable error instead of pydantic's. Durations are seconds, sizes bytes.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        # Compose files pass `${X:-}` for what is not set.
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    broker_url: str = Field(
        default="redis://127.0.0.1:6379/0",
        description="Celery's broker: redis://, rediss://, redis+socket://, unix://, or any URL that kombu knows.",
    )
    redis_url: str | None = Field(
        default=None,
        description="The Redis that holds all state and results: redis://, rediss://, redis+socket:// or unix://. "
        "Default: the broker.",
    )
    namespace: str = Field(
        default="subagent-tasks",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Prefix of every key and queue; hosts and workers that share it form one fleet.",
    )
    lease_seconds: Seconds = Field(
        default=6,
        description="Seconds without a heartbeat after which a worker counts as dead; it beats three times as often.",
    )
    loop_stall_seconds: Seconds = Field(
        default=30,
        description="Seconds a worker's event loop may stand still before the worker stops beating and exits.",
    )
    shutdown_grace_seconds: Seconds = Field(
        default=10,
        description="Seconds a worker that is asked to end may take to hand its runs back; its supervisor must wait "
        "longer before it kills.",
    )
    max_attempts: Count = Field(
        default=3,
        description="Number of times a run is started, counting takings from dead workers, before it ends `failed`.",
    )
    run_limit_seconds: Seconds = Field(
        default=_HOUR,
        description="Seconds one run may take; the default and the upper bound of a tool's own timeout.",
    )
    model_request_timeout_seconds: Seconds = Field(
        default=10 * _MINUTE,
        description="Seconds one request to a model may take from start to end.",
    )
    first_event_timeout_seconds: Seconds = Field(
        default=2 * _MINUTE,
        description="Seconds a model may take to send the first event of its answer.",
    )
    visibility_timeout_seconds: Seconds = Field(
        default=2 * _HOUR,
        description="Seconds after which Celery delivers an unacknowledged message again: a backstop, "
        "never a test of life.",
    )
    retention_seconds: Seconds = Field(
        default=7 * _DAY,
        description="Seconds that records, transcripts, results and notices outlive their settlement.",
    )
    max_active_jobs: Count = Field(
        default=10,
        description="Number of unsettled background jobs one session may own.",
    )
    wait_timeout_seconds: Seconds = Field(
        default=30,
        description="Seconds a waiting read waits when the caller names no time.",
    )
    max_wait_timeout_seconds: Seconds = Field(
        default=10 * _MINUTE,
        description="Seconds a caller may ask a waiting read to wait.",
    )
    max_prompt_bytes: Count = Field(
        default=_MIB,
        description="Bytes (UTF-8) of the longest prompt or message that is accepted.",
    )
    max_output_bytes: Count = Field(
        default=16 * _MIB,
        description="Bytes of a run's output over which it fails, its partial text kept.",
    )
    max_inline_bytes: Count = Field(
        default=64 * _KIB,
        description="Bytes of an outcome over which hosts read it from its record instead of hearing it with its "
        "announcement.",
    )
    max_pending_notices: Count = Field(
        default=10_000,
        description="Number of unacknowledged notices a session keeps; over it the oldest collapse into one.",
    )
    redis_timeout_seconds: Seconds = Field(
        default=5,
        description="Seconds one command may wait for the Redis server, connecting included.",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments win over the environment; nothing else is read."""
        return init_settings, _Environment(settings_cls)

    @field_validator("broker_url")
    @classmethod
    def _check_broker(cls, url: str) -> str:
        scheme = _scheme(url)
        if not scheme:
            raise ValueError("not a URL; expected something like redis://127.0.0.1:6379/0")
        if scheme in _REDIS_SCHEMES or "cluster" in scheme:
            _RedisServer.parse(url)
        return url

    @field_validator("redis_url")
    @classmethod
    def _check_state(cls, url: str | None) -> str | None:
        if url is not None:
            _RedisServer.parse(url)
        return url

    @model_validator(mode="after")
    def _check_relations(self) -> Self:
        if problems := list(self._broken_relations()):
            raise ValueError("\n".join(problems))
        return self

    @property
    def state_url(self) -> str:
        """Where the state lives, as it was configured."""
        return self.broker_url if self.redis_url is None else self.redis_url

    @property
    def redis_py_url(self) -> str:
        """Where the state lives, in the form redis-py reads (`unix://` for a socket)."""
        return _RedisServer.parse(self.state_url).for_redis_py()

    @property
    def celery_result_url(self) -> str:
        """Where the state lives, in the form Celery's result backend reads (`redis+socket://` for a socket)."""
        return _RedisServer.parse(self.state_url).for_celery()

    @property
    def celery_broker_url(self) -> str:
        """The broker, in the form kombu reads."""
        return _RedisServer.parse(self.broker_url).for_celery() if self.broker_is_redis else self.broker_url

    @property
    def broker_is_redis(self) -> bool:
        """Whether the broker is one Redis server, rather than Sentinel or another kind of broker."""
        return _scheme(self.broker_url) in _REDIS_SCHEMES

    @property
    def broker_holds_state(self) -> bool:
        """Whether broker and state are one server and one database, so that a script can push the Celery message.

        Names are compared as written, not resolved: `localhost` and `127.0.0.1` count as two. Taking two servers for
        one would lose messages; taking one for two only costs a round trip.
        """
        return self.broker_is_redis and (
            _RedisServer.parse(self.broker_url).place == _RedisServer.parse(self.state_url).place
        )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, safe_url(value) if name in _URL_FIELDS and isinstance(value, str) else value

    def _broken_relations(self) -> Iterator[str]:
        """Why each relation: the message says what would go wrong (field fault 2)."""
        if self.redis_url is None and not self.broker_is_redis:
            yield (
                f"{_env('redis_url')} is not set and {_env('broker_url')}={safe_url(self.broker_url)} cannot hold the "
                f"state: set {_env('redis_url')} to a redis:// URL"
            )
        below = [
            (
                "run_limit_seconds",
                "visibility_timeout_seconds",
                True,
                "Celery would deliver a run again while it still runs",
            ),
            ("visibility_timeout_seconds", "retention_seconds", False, "a late delivery would find no record"),
            ("wait_timeout_seconds", "max_wait_timeout_seconds", False, "the default wait would be refused"),
            (
                "first_event_timeout_seconds",
                "model_request_timeout_seconds",
                False,
                "the request would always end first",
            ),
            ("model_request_timeout_seconds", "run_limit_seconds", False, "the run would always end first"),
            ("max_inline_bytes", "max_prompt_bytes", False, "an announcement is to stay small"),
        ]
        for low, high, strictly, else_what in below:
            small, large = cast("float", getattr(self, low)), cast("float", getattr(self, high))
            if small > large or (strictly and small == large):
                yield (
                    f"{_env(low)}={_number(small)} must be {'below' if strictly else 'at most'} "
                    f"{_env(high)}={_number(large)}: {else_what}"
                )


def load_settings(**overrides: object) -> BrokerSettings:
    """Read the settings: `overrides` (field names) win over the environment, defaults fill the rest.

    Raises `SettingsError`, whose message names every variable that is wrong, with passwords masked (P13, P14).
    """
    try:
        return BrokerSettings(**cast("dict[str, Any]", overrides))
    except ValidationError as error:
        problems = [line for problem in error.errors(include_url=False) for line in _explain(cast("Any", problem))]
    # Raised outside the handler: pydantic's own report holds the values as they were given.
    if len(problems) == 1:
        raise SettingsError(problems[0])
    raise SettingsError("\n  - ".join([f"{len(problems)} settings cannot be used:", *problems]))


def safe_url(url: str) -> str:
    """The URL without anything that may be a credential: for logs, errors and `repr` (P14)."""
    scheme, found, rest = url.partition("://")
    if not found or not _SCHEME.fullmatch(scheme):
        return _MASK
    # Up to the last `@`: a password that was not escaped may hold any character, `/` and `?` among them.
    credentials, _, address = rest.rpartition("@")
    address, _, query = address.partition("#")[0].partition("?")
    try:
        # A password without its `@` looks like a port that is no number.
        _ = urlsplit(f"//{address}").port
    except ValueError:
        return f"{scheme}://{_MASK}"
    shown = [
        f"{name}={value if name in _HARMLESS_OPTIONS else _MASK}" for name, value in parse_qsl(query, max_num_fields=50)
    ]
    return f"{scheme}://{_MASK + '@' if credentials else ''}{address}{'?' if shown else ''}{'&'.join(shown)}"


_MASK: Final = "***"
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_URL_FIELDS: Final = ("broker_url", "redis_url")
_SOCKET_SCHEMES: Final = ("unix", "redis+socket")
_REDIS_SCHEMES: Final = ("redis", "rediss", *_SOCKET_SCHEMES)
_TLS_OPTIONS: Final = ("ssl_ca_certs", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_keyfile")
_HARMLESS_OPTIONS: Final = ("db", "virtual_host", *_TLS_OPTIONS)
_DEFAULT_PORT: Final = 6379


@dataclass(frozen=True, slots=True, repr=False)
class _RedisServer:
    """One Redis database and how to log in, read from any of the spellings that kombu, Celery and redis-py have."""

    place: tuple[str, str, int, int]
    """What makes it one database: kind (`tcp`, `tls`, `socket`), host or path, port (0 for a socket), db."""
    username: str
    password: str
    options: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, url: str) -> _RedisServer:
        """Raises ValueError; the message holds no part of the URL that may be a credential."""
        scheme = _scheme(url)
        shown = safe_url(url)
        if "cluster" in scheme:
            raise ValueError(f"{shown} names a Redis Cluster, which Celery cannot use: name one primary, redis://host")
        if scheme not in _REDIS_SCHEMES:
            expected = ", ".join(f"{name}://" for name in _REDIS_SCHEMES)
            raise ValueError(f"{shown} is not a Redis URL; expected one of {expected}")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port or _DEFAULT_PORT
        except ValueError:
            raise ValueError(
                f"{shown} cannot be read; name one server, and write @ : / ? # in a password as %40 %3A %2F %3F %23"
            ) from None
        if "," in parts.netloc.rpartition("@")[2]:
            raise ValueError(f"{shown} lists several servers: name one primary (Redis Cluster is not supported)")
        if parts.fragment:
            raise ValueError(f"{shown} has a part after #; write # in a password as %23")

        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        is_socket, is_tls = scheme in _SOCKET_SCHEMES, scheme == "rediss"
        # redis-py also takes the credentials of a socket as options.
        username = unquote(parts.username or "") or (options.pop("username", "") if is_socket else "")
        password = unquote(parts.password or "") or (options.pop("password", "") if is_socket else "")
        database = options.pop("virtual_host", "") or options.pop("db", "")
        options.pop("db", None)
        if not is_socket:
            database = database or parts.path.strip("/")
        if unknown := sorted(set(options) - (set(_TLS_OPTIONS) if is_tls else set())):
            raise ValueError(f"{shown} has the option {unknown[0]!r}, which is not understood; remove it")
        if not re.fullmatch(r"[0-9]{0,6}", database):
            raise ValueError(f"{shown} names a database that is no number; expected something like redis://host:6379/0")
        if is_socket and not parts.path.strip("/"):
            raise ValueError(f"{shown} names no socket; expected {scheme}:///path/to/redis.sock")
        if is_socket and host:
            raise ValueError(f"{shown} names a host; a socket is written with three slashes, {scheme}:///path")
        if is_tls:
            # Without it kombu does not verify the server, and Celery's result backend refuses to start.
            reqs = options.get("ssl_cert_reqs", "required").lower().removeprefix("cert_")
            if reqs not in ("required", "optional", "none"):
                raise ValueError(f"{shown}: ssl_cert_reqs must be required, optional or none")
            options["ssl_cert_reqs"] = reqs
        db = int(database or 0)
        place = (
            ("socket", unquote(parts.path), 0, db)
            if is_socket
            else ("tls" if is_tls else "tcp", unquote(host) or "127.0.0.1", port, db)
        )
        return cls(place=place, username=username, password=password, options=tuple(sorted(options.items())))

    def for_redis_py(self) -> str:
        return self._render(socket_scheme="unix", socket_database="db")

    def for_celery(self) -> str:
        return self._render(socket_scheme="redis+socket", socket_database="virtual_host")

    def _render(self, *, socket_scheme: str, socket_database: str) -> str:
        kind, where, port, db = self.place
        login = ""
        if self.username or self.password:
            login = f"{quote(self.username, safe='')}:{quote(self.password, safe='')}@"
        if kind == "socket":
            return f"{socket_scheme}://{login}{quote(where)}?{socket_database}={db}"
        host = f"[{where}]" if ":" in where else where
        query = f"?{urlencode(self.options)}" if self.options else ""
        return f"{'rediss' if kind == 'tls' else 'redis'}://{login}{host}:{port}/{db}{query}"


def _scheme(url: str) -> str:
    """The scheme in lower case, empty if there is none."""
    scheme, found, _ = url.partition("://")
    return scheme.lower() if found and _SCHEME.fullmatch(scheme) else ""


def _is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes put it there for a Service whose name begins like our prefix: nobody's typing error."""
    return (
        re.search(r"(^|_)service_(host|port)(_|$)|(^|_)port_[0-9]+_(tcp|udp|sctp)(_|$)", name) is not None
        or re.match(r"(tcp|udp|sctp)://", value) is not None
    )


def _explain(problem: dict[str, Any]) -> list[str]:
    """One of pydantic's problems as lines an operator can act on."""
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not problem["loc"]:
        return message.split("\n")
    name = str(problem["loc"][0])
    if problem["type"] == "extra_forbidden":
        similar = difflib.get_close_matches(name.lower(), BrokerSettings.model_fields, n=1, cutoff=0.5)
        hint = f"did you mean {_env(similar[0])}?" if similar else "remove it, or see the list of settings"
        return [f"{_env(name)} is not a setting; {hint}"]
    value: object = problem["input"]
    shown = safe_url(str(value)) if name in _URL_FIELDS else repr(value)[:80]
    return [f"{_env(name)}={shown}: {message}"]


def _env(name: str) -> str:
    return f"{ENV_PREFIX}{name.upper()}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)
