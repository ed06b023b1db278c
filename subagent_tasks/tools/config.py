"""What a deployer may configure on the delegation tool and on the job tools, and the checks that need no I/O.

Decides which keys and values load (behaviour §2.1, §2.6, §3.5, §3.7) and whether a provider can honour them. What the
model sees is made in `definitions`, what it may pass in `arguments`. Every refusal is a `ConfigurationError`, however
the model was built; where the contract fixes a text, the message is that text and the offending value is in its note.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel, to_snake

from subagent_tasks.errors import ConfigurationError, UnsupportedCapability
from subagent_tasks.protocol.models import MAX_SAFE_INTEGER, AgentOptions, Capabilities, ToolFilter, Wire

PROVIDER_MANAGED = "provider-managed"
DEFAULT_MAX_DEPTH = 3

MAX_SHOWN_CHARACTERS = 40


class DeclaredConfig(Wire):
    """A configuration whose every misuse raises `ConfigurationError` with one line naming key, value and fix."""

    model_config = ConfigDict(hide_input_in_errors=True)

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        _refuse_both_spellings(cls, data)
        try:
            return handler(data)
        except ValidationError as error:
            raise ConfigurationError(f"{_source(cls)}: {_explained(cls, data, error)}") from error

    @model_validator(mode="after")
    def _storable_text(self) -> Self:
        for path, text in _texts(self.model_dump(by_alias=False), ""):
            flaw = text_flaw(text)
            if flaw is not None:
                raise ConfigurationError(f"{_source(type(self))}: {path}: {flaw}")
        return self


class DelegationToolConfig(DeclaredConfig):
    """One delegation tool: the seed's keys in snake_case; the seed's camelCase names load as well (behaviour §2.1).

    `agent_options`, `persona` and `tool_filter` stay absent unless configured. `recovery` overrides what becomes of a
    run whose worker died (None: as the provider declares), `run_limit_seconds` the longest a run may take (None: the
    broker setting).
    """

    provider: StrictStr = Field(min_length=1)
    # The charset and length every model API accepts for a function name.
    tool_name: StrictStr = Field(default="subagent", pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    enable_model_selection: StrictBool = False
    model_selection_settings: StrictBool = False
    enable_run_in_background: StrictBool = True
    background_mode: Literal["one-shot", "continuable"] = "one-shot"
    agent_options: AgentOptions | None = None
    persona: StrictStr | None = None
    tool_filter: ToolFilter | None = None
    max_depth: int | Literal["provider-managed"] = DEFAULT_MAX_DEPTH
    recovery: Literal["resume", "fail"] | None = None
    run_limit_seconds: StrictFloat | None = Field(default=None, gt=0, allow_inf_nan=False)

    @field_validator("max_depth", mode="before")
    @classmethod
    def _whole_depth(cls, value: object) -> object:
        if value == PROVIDER_MANAGED or (type(value) is int and 0 <= value <= MAX_SAFE_INTEGER):
            return value
        error = ConfigurationError("subagent maxDepth must be a non-negative safe integer")
        error.add_note(f"max_depth was {display_value(value)}; give 0 to {MAX_SAFE_INTEGER}, or 'provider-managed'")
        raise error

    @field_validator("agent_options", mode="before")
    @classmethod
    def _strict_options(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        for key, given in cast("Mapping[object, object]", value).items():
            name = to_snake(str(key))
            expected, words = (int, "a whole number") if name == "max_tokens" else (str, "a string")
            # Exact types: True counts as 1 and a list's text could pass for a model name otherwise.
            if given is not None and name in AgentOptions.model_fields and type(given) is not expected:
                raise ConfigurationError(
                    f"tool-subagent: agent_options.{key}: expected {words}, got {display_value(given)}"
                )
        return cast("object", value)

    @field_validator("tool_filter")
    @classmethod
    def _filters_something(cls, value: ToolFilter | None) -> ToolFilter | None:
        if value is not None and value.allow is None and value.deny is None:
            raise ConfigurationError(
                "tool-subagent: `toolFilter` is configured but names neither `allow` nor `deny`"
                " — remove the key or fill the filter"
            )
        return value

    @model_validator(mode="after")
    def _one_selection_switch(self) -> Self:
        if self.enable_model_selection and self.model_selection_settings:
            raise ConfigurationError(
                "tool-subagent: `enableModelSelection` and `modelSelectionSettings` are mutually exclusive;"
                " set enable_model_selection or model_selection_settings, not both"
            )
        return self

    @property
    def depth_cap(self) -> int | None:
        """What a request carries as `max_depth`: a number, or None for `provider-managed` (behaviour §2.7)."""
        return self.max_depth if isinstance(self.max_depth, int) else None

    def selects_model(self, *, session_selects_model: bool = False) -> bool:
        """Whether the selection fields are open: by the switch, or by the session's own decision (behaviour §6.1)."""
        return self.enable_model_selection or (self.model_selection_settings and session_selects_model)

    def runs_in_background_by_default(self) -> bool:
        """What an absent `run_in_background` means (behaviour §2.7 step 9)."""
        return self.enable_run_in_background and self.background_mode == "continuable"


class JobToolsConfig(DeclaredConfig):
    """`job_output`, `job_list`, `job_kill` and completion notices. Waits are in milliseconds (behaviour §3.5, §3.7)."""

    wait_timeout_ms: StrictInt = Field(default=30_000, gt=0)
    max_wait_timeout_ms: StrictInt = Field(default=600_000, gt=0)
    completion_delivery: Literal["wakeup", "quiet"] = "wakeup"
    max_consecutive_wakes: int = 3

    @field_validator("max_consecutive_wakes", mode="before")
    @classmethod
    def _whole_wakes(cls, value: object) -> object:
        if type(value) is int and 0 <= value <= MAX_SAFE_INTEGER:
            return value
        shown = value[:MAX_SHOWN_CHARACTERS] if isinstance(value, str) else display_value(value)
        raise ConfigurationError(f"tool-jobs: maxConsecutiveWakes ({shown}) must be a whole number of turns")

    @model_validator(mode="after")
    def _default_within_cap(self) -> Self:
        if self.wait_timeout_ms > self.max_wait_timeout_ms:
            raise ConfigurationError(
                f"tool-jobs: waitTimeoutMs ({self.wait_timeout_ms})"
                f" exceeds maxWaitTimeoutMs ({self.max_wait_timeout_ms})"
            )
        return self


def load_delegation_config(**values: Any) -> DelegationToolConfig:
    """Check a declaration, in either spelling. Raises `ConfigurationError`."""
    return DelegationToolConfig.model_validate(values)


def load_job_tools_config(**values: Any) -> JobToolsConfig:
    """Check a declaration, in either spelling. Raises `ConfigurationError`."""
    return JobToolsConfig.model_validate(values)


def check_provider(config: DelegationToolConfig, *, provider_name: str, capabilities: Capabilities) -> None:
    """Refuse a tool whose provider cannot honour its configuration (behaviour §2.6, in that order).

    Persona and filter are checked here too rather than at the first call, with the text of behaviour §2.7 step 11.
    Raises `ConfigurationError`.
    """
    named = f'tool-subagent: provider "{provider_name}"'
    if config.depth_cap is not None and not capabilities.depth_limit:
        raise ConfigurationError(
            f"{named} cannot enforce maxDepth (no depthLimit capability)"
            " — set maxDepth: 'provider-managed' to leave the recursion budget to the provider"
        )
    if config.agent_options is not None and not capabilities.agent_options:
        raise ConfigurationError(f"{named} does not support child agentOptions")
    if (config.enable_model_selection or config.model_selection_settings) and not capabilities.agent_options:
        raise ConfigurationError(f"{named} does not support child model selection")
    if config.background_mode == "continuable" and not capabilities.prepare_continuable:
        raise ConfigurationError(f"{named} does not support `backgroundMode: continuable`")
    if config.tool_filter is not None and not capabilities.tool_filter:
        raise _unsupported(provider_name, "toolFilter")
    if config.persona is not None and not capabilities.persona:
        raise _unsupported(provider_name, "persona")


def display_value(value: object, *, hide_text: bool = False) -> str:
    """A value for an error message: one line, short, typed as JSON. `hide_text` shows only how long a text is (P14)."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int():
            # str() of an enormous int raises, and nobody reads it.
            return str(value) if value.bit_length() <= 64 else f"an integer of {value.bit_length()} bits"
        case float():
            return _float_text(value)
        case str():
            return f"text of {len(value)} characters" if hide_text else _quoted(value)
        case Mapping():
            return "an object"
        case list() | tuple():
            return f"a list of {len(cast('list[object]', value))}"
        case _:
            return f"a value of type {type(value).__name__}"


def text_flaw(text: str) -> str | None:
    """What keeps a text from being sent to a model, with its position in characters; None when it is clean.

    Redis would store both kinds, but no model API takes a NUL, and UTF-8 cannot encode half of a surrogate pair.
    """
    found = _UNCLEAN.search(text)
    if found is None:
        return None
    what = "a NUL character" if found.group() == "\x00" else "half of a surrogate pair"
    return f"contains {what} at position {found.start()}; remove it"


_UNCLEAN = re.compile("[\x00\ud800-\udfff]")


def _float_text(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e21 else repr(value)


def _quoted(text: str) -> str:
    short = text if len(text) <= MAX_SHOWN_CHARACTERS else text[: MAX_SHOWN_CHARACTERS - 1] + "…"
    quoted = json.dumps(short, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
    # JSON escapes the line breaks of ASCII alone.
    return re.sub("[\x85\u2028\u2029]", lambda found: f"\\u{ord(found.group()):04x}", quoted)


def _unsupported(provider_name: str, capability: str) -> UnsupportedCapability:
    return UnsupportedCapability(f'subagent provider "{provider_name}" does not support the "{capability}" capability')


def _source(model: type[BaseModel]) -> str:
    return "tool-jobs" if issubclass(model, JobToolsConfig) else "tool-subagent"


def _refuse_both_spellings(model: type[BaseModel], data: object) -> None:
    if not isinstance(data, Mapping):
        return
    for name in model.model_fields:
        if to_camel(name) != name and name in data and to_camel(name) in data:
            raise ConfigurationError(f"{_source(model)}: {name} is also given as {to_camel(name)}; keep one of them")


def _texts(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Every text of a dumped configuration with its path; the models bound the depth."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in cast("dict[str, object]", value).items():
            yield from _texts(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, tuple):
        for inner in cast("tuple[object, ...]", value):
            yield from _texts(inner, path)


def _explained(model: type[BaseModel], data: object, error: ValidationError) -> str:
    lines: list[str] = []
    for found in error.errors(include_url=False, include_context=False):
        path = _path_as_written(found["loc"], data)
        if found["type"] == "extra_forbidden":
            *owner, key = (str(part) for part in found["loc"])
            lines.append(f"{path}: unknown key; {_suggestion(_NESTED[to_snake(owner[0])] if owner else model, key)}")
        elif found["type"] == "missing":
            lines.append(f"{path}: required, but not given")
        else:
            # "tuple" is our spelling; a configuration file has lists.
            message = found["msg"].replace("a valid tuple", "a list")
            shown = display_value(found["input"], hide_text=path == "persona")
            lines.append(f"{path}: {message[:1].lower()}{message[1:]}, got {shown}")
    return "; ".join(lines)


_NESTED: dict[str, type[BaseModel]] = {"agent_options": AgentOptions, "tool_filter": ToolFilter}


def _path_as_written(location: tuple[int | str, ...], data: object) -> str:
    """pydantic reports aliases; the reader looks for the key as it stands in the declaration, else for ours."""
    written: list[str] = []
    for part in location:
        known = isinstance(data, Mapping) and part in data
        written.append(str(part) if known or isinstance(part, int) else to_snake(part))
        data = cast("Mapping[object, object]", data).get(written[-1]) if isinstance(data, Mapping) else None
    return ".".join(written)


def _suggestion(model: type[BaseModel], key: str) -> str:
    names = list(model.model_fields)
    close = difflib.get_close_matches(to_snake(key), names, n=1)
    return f"did you mean {close[0]}?" if close else f"known keys: {', '.join(names)}"
