"""The wire models: what hosts, workers and Redis exchange.

All are frozen and refuse unknown fields; Python names are snake_case, the wire and the seeds' configuration camelCase,
and both spellings load. Nothing here does I/O or reads a clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticSerializationError, to_json

JobStatus = Literal["queued", "running", "stopping", "completed", "killed", "failed"]
Mode = Literal["foreground", "background"]
Block = dict[str, JsonValue]

MAX_DIAGNOSTIC_BYTES = 4096
DIAGNOSTIC_MARKER = "\n[diagnostic truncated]"
MAX_SAFE_INTEGER = 2**53 - 1


class Wire(BaseModel):
    """Base of every wire model."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
    )

    def to_json(self) -> str:
        """Canonical JSON: camelCase, absent fields left out, what no UTF-8 store takes replaced by `?`."""
        try:
            return self.model_dump_json(exclude_none=True)
        except PydanticSerializationError:
            cleaned = without_surrogates(self.model_dump(mode="json", exclude_none=True))
            return to_json(cleaned, inf_nan_mode="null").decode()


def without_surrogates(value: JsonValue) -> JsonValue:
    """File names and broken model output carry lone surrogates, which no UTF-8 store takes."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {key.encode("utf-8", "replace").decode(): without_surrogates(item) for key, item in value.items()}
    return value


def text_block(text: str) -> Block:
    return {"type": "text", "text": text}


def text_of(blocks: Sequence[Mapping[str, Any]]) -> str:
    """The text blocks joined without a separator (behaviour §2.4)."""
    return "".join(str(block.get("text", "")) for block in blocks if block.get("type") == "text")


def bounded_diagnostic(text: str) -> str:
    """At most 4096 UTF-8 bytes, cut on a character boundary, with a marker (behaviour §1.3)."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= MAX_DIAGNOSTIC_BYTES:
        return raw.decode()
    kept = raw[: MAX_DIAGNOSTIC_BYTES - len(DIAGNOSTIC_MARKER.encode())]
    return kept.decode("utf-8", "ignore") + DIAGNOSTIC_MARKER


class Capabilities(Wire):
    """What a provider can honour. A request that names something else is refused before it starts."""

    output_schema: bool = False
    depth_limit: bool = False
    tool_filter: bool = False
    persona: bool = False
    agent_options: bool = False
    prepare_continuable: bool = False


class AgentOptions(Wire):
    """The child's model route. `model="provider:model"` is shorthand for both fields."""

    provider: str | None = Field(default=None, min_length=1)
    model: str | None = Field(default=None, min_length=1)
    reasoning_effort: str | None = Field(default=None, min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _split_shorthand(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        fields = cast("dict[str, Any]", data)
        named = fields.get("model")
        if fields.get("provider") or not isinstance(named, str):
            return fields
        provider, _, model = named.partition(":")
        return {**fields, "provider": provider, "model": model} if provider and model else fields


class ToolFilter(Wire):
    """A name passes if (`allow` is absent or holds it) and `deny` does not hold it (behaviour §5.5)."""

    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] | None = None

    def admits(self, name: str) -> bool:
        return (self.allow is None or name in self.allow) and name not in (self.deny or ())


class Usage(Wire):
    """What a run spent so far."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    tool_calls: int = 0


class ChildRequest(Wire):
    """What a provider is asked to run. Absent fields stay absent: no empty filter is ever invented."""

    label: str
    prompt: str
    agent_options: AgentOptions | None = None
    persona: str | None = None
    tool_filter: ToolFilter | None = None
    max_depth: int | None = Field(default=None, ge=0, le=MAX_SAFE_INTEGER)
    output_schema: dict[str, JsonValue] | None = None


class ChildResult(Wire):
    """How a child ended. Only `stop_reason == "completed"` is a success; any unknown value is a failure.

    `output` holds content blocks (`{"type": "text", "text": …}` and others); `diagnostic` is sanitised text of at most
    4096 UTF-8 bytes for a result that is not completed, and never part of `output` (behaviour §1.3).
    """

    stop_reason: str
    output: tuple[Block, ...] = ()
    diagnostic: str | None = None
    structured: JsonValue | None = None
    usage: Usage | None = None

    @field_validator("diagnostic")
    @classmethod
    def _bound(cls, value: str | None) -> str | None:
        return None if value is None else bounded_diagnostic(value)

    @property
    def text(self) -> str:
        return text_of(self.output)


class Outcome(Wire):
    """A settled run: what its record keeps and what every reader renders.

    `error` is the stringified infrastructure fault when the provider could not start or its result was rejected,
    `dispose_error` the one of the release. `detail` is the job tools' short account (behaviour §3.2).
    """

    status: Literal["completed", "killed", "failed"]
    stop_reason: str
    output: tuple[Block, ...] = ()
    diagnostic: str | None = None
    structured: JsonValue | None = None
    usage: Usage | None = None
    error: str | None = None
    dispose_error: str | None = None
    detail: str | None = None

    @property
    def text(self) -> str:
        return text_of(self.output)


class InboxEntry(Wire):
    """One message on its way to a session (behaviour §1.7). `source` says who speaks."""

    message_id: str
    lane: Literal["next-turn", "next-step"] = "next-turn"
    text: str
    source: str = "user"


class TranscriptEvent(Wire):
    """One entry of a session's append-only log.

    `seq` counts from 0; `at_ms` is Redis time in milliseconds. Kinds: `input` (a message taken from the inbox),
    `request` (the parts that went to the model beside the input), `response` (one model message), `tool_call`
    (announced before its effect), `tool_result`, `suspended` (it waits for runs of its own), `requeued` (all before
    it is another run's), `settled`.
    """

    seq: int
    at_ms: int = 0
    kind: str
    data: dict[str, JsonValue] = Field(default_factory=dict)


class JobSnapshot(Wire):
    """The public view of a job (behaviour §3.4). Times are Redis milliseconds."""

    id: str
    kind: str = "subagent"
    label: str
    status: JobStatus
    detail: str | None = None
    started_at: int
    finished_at: int | None = None

    @property
    def is_settled(self) -> bool:
        return self.status in ("completed", "killed", "failed")


class ToolCall(Wire):
    """One call a model made. `arguments` is a JSON object, or text that did not parse as one."""

    call_id: str | None = None
    name: str
    arguments: dict[str, Any] | str = Field(default_factory=dict)

    @model_validator(mode="after")
    def _parse(self) -> Self:
        if isinstance(self.arguments, str):
            text = self.arguments.strip()
            try:
                parsed: Any = json.loads(text) if text else {}
            except (ValueError, RecursionError):
                return self
            if isinstance(parsed, dict):
                # The only assignment to a frozen model: before anybody saw it.
                object.__setattr__(self, "arguments", parsed)
        return self


class ToolResult(Wire):
    """What a tool call came to. `text` is what the model sees, `value` the canonical JSON, `code` None on success."""

    call_id: str | None = None
    text: str
    value: JsonValue | None = None
    is_error: bool = False
    code: str | None = None


class ToolDefinition(Wire):
    """A tool as the model sees it. `parameters` is JSON Schema; the bytes depend on the configuration alone (P12)."""

    name: str
    description: str
    parameters: dict[str, JsonValue]

    def for_openai(self) -> dict[str, JsonValue]:
        """As an entry of `tools` in a Chat Completions request."""
        function: dict[str, JsonValue] = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": function}

    def for_anthropic(self) -> dict[str, JsonValue]:
        """As an entry of `tools` in a Messages request."""
        return {"name": self.name, "description": self.description, "input_schema": self.parameters}


class Notice(Wire):
    """What tells a parent of an ending. `id` is its place in the session's stream: readers resume after it."""

    id: str
    kind: str
    session_id: str
    sender_id: str
    text: str
    blocks: tuple[Block, ...] = ()
    summary: str = ""
    source: str
    usage: Usage | None = None
