"""Transcript events <-> pydantic-ai messages: what is written down, and what a resumed child makes of it.

Pure. A conversation is folded from its events; nothing else is stored (protocol §3). `tool_call` says that a call was
about to run, `tool_result` what came of it: a call with the first and without the second has an unknown effect (P7).
Events of kinds this module does not know are skipped. The events' data:

    input        message_id, text, source, lane                   (written by `Drive.take_input`)
    request      parts: what else went to the model (feedback of the agent loop), without input and tool results
    response     message: the whole model message
    tool_call    tool_call_id, tool_name
    tool_result  the tool return part, flat; beside it `user_content` if the tool added any, `effect: "unknown"`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pydantic_core
from pydantic import ConfigDict, JsonValue, TypeAdapter
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelRequestPart,
    ModelResponse,
    ToolCallPart,
    ToolReturnPart,
    UserContent,
    UserPromptPart,
)
from pydantic_ai.usage import RunUsage

from subagent_tasks.protocol.interfaces import NewEvent
from subagent_tasks.protocol.models import TranscriptEvent, without_surrogates

UNKNOWN_EFFECT = (
    "This call was started, but the process that ran it stopped before its result was recorded. It may have had its "
    "full effect, part of it, or none, and it was not run again. Check the actual state before you repeat it."
)
NEVER_RAN = "This call was not run."

# As pydantic-ai's own message adapter has it: bytes need not be text. pydantic takes a configuration for unions only.
_BYTES = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
_MESSAGE: TypeAdapter[ModelMessage] = TypeAdapter(ModelMessage, config=_BYTES)
_REQUEST_PART: TypeAdapter[ModelRequestPart] = TypeAdapter(ModelRequestPart, config=_BYTES)
_USER_CONTENT: TypeAdapter[str | Sequence[UserContent]] = TypeAdapter(str | Sequence[UserContent], config=_BYTES)
_RESULT_EXTRAS = frozenset({"user_content", "effect"})


@dataclass(slots=True)
class Tail:
    """What followed the last model message (or, before the first one, everything)."""

    announced: set[str] = field(default_factory=set[str])
    results: dict[str, ToolReturnPart] = field(default_factory=dict[str, ToolReturnPart])
    contents: dict[str, UserPromptPart] = field(default_factory=dict[str, UserPromptPart])
    inputs: list[UserPromptPart] = field(default_factory=list[UserPromptPart])
    others: list[ModelRequestPart] = field(default_factory=list[ModelRequestPart])

    def request_parts(self, calls: Sequence[ToolCallPart]) -> list[ModelRequestPart]:
        """The parts that answer `calls`, in the order pydantic-ai builds them: results, what tools added, the rest."""
        ids = [call.tool_call_id for call in calls if call.tool_call_id in self.results]
        return [
            *(self.results[call_id] for call_id in ids),
            *(self.contents[call_id] for call_id in ids if call_id in self.contents),
            *self.others,
            *self.inputs,
        ]


@dataclass(slots=True)
class Conversation:
    """A folded transcript: the closed messages, up to the last model message, and the open tail behind it.

    `completing_tool` names the tool whose first successful call ends the conversation; most have none.
    """

    completing_tool: str | None = None
    messages: list[ModelMessage] = field(default_factory=list[ModelMessage])
    responses: list[ModelResponse] = field(default_factory=list[ModelResponse])
    tail: Tail = field(default_factory=Tail)
    successful_calls: int = 0

    @property
    def open_calls(self) -> list[ToolCallPart]:
        """Calls of the last model message that have no result yet, in its order."""
        return [call for call in self._last_calls if call.tool_call_id not in self.tail.results]

    @property
    def calls_of_unknown_effect(self) -> list[ToolCallPart]:
        return [call for call in self.open_calls if call.tool_call_id in self.tail.announced]

    @property
    def calls_never_started(self) -> list[ToolCallPart]:
        return [call for call in self.open_calls if call.tool_call_id not in self.tail.announced]

    @property
    def completing_call(self) -> ToolCallPart | None:
        """The call whose success, as it is recorded, ended the conversation.

        Looked for in the last model message alone: a call id that is used again later names another call.
        """
        return next((call for call in self._last_calls if self._completes(call)), None)

    @property
    def calls_behind_completion(self) -> frozenset[str]:
        """The ids of the calls that stand behind the completing one in its message."""
        calls = self._last_calls
        ends = [index for index, call in enumerate(calls) if self._completes(call)]
        return frozenset(call.tool_call_id for call in calls[ends[0] + 1 :]) if ends else frozenset()

    @property
    def is_finished(self) -> bool:
        """It was completed, or the last word is a model message that asks for nothing more."""
        if self.completing_call is not None:
            return True
        return bool(self.responses) and not self._last_calls and not self.tail.request_parts(())

    @property
    def usage(self) -> RunUsage:
        """What the conversation has spent, so that a resumed one counts on."""
        usage = RunUsage(requests=len(self.responses), tool_calls=self.successful_calls)
        for response in self.responses:
            usage.incr(response.usage)
        return usage

    def history(self) -> list[ModelMessage]:
        """The messages to go on with: the closed ones and, when the tail holds anything, one request of it."""
        parts = self.tail.request_parts(self._last_calls)
        return [*self.messages, ModelRequest(parts=parts)] if parts else list(self.messages)

    def add_response(self, response: ModelResponse) -> None:
        calls = self._last_calls
        for call in self.open_calls:
            # Model APIs refuse a history in which any call, however old, has no result.
            unknown = call.tool_call_id in self.tail.announced
            self.tail.results[call.tool_call_id] = _failed_return(call, UNKNOWN_EFFECT if unknown else NEVER_RAN)
        if parts := self.tail.request_parts(calls):
            self.messages.append(ModelRequest(parts=parts))
        self.messages.append(response)
        self.responses.append(response)
        self.tail = Tail()

    def add_result(self, data: Mapping[str, JsonValue]) -> ToolReturnPart:
        # What a tool returned may be nothing, and what is None is not written.
        flat = {"content": None, **{key: value for key, value in data.items() if key not in _RESULT_EXTRAS}}
        part = cast("ToolReturnPart", _REQUEST_PART.validate_python(flat))
        self.tail.results[part.tool_call_id] = part
        self.successful_calls += part.outcome == "success"
        if (content := data.get("user_content")) is not None:
            self.tail.contents[part.tool_call_id] = UserPromptPart(_USER_CONTENT.validate_python(content))
        return part

    def _completes(self, call: ToolCallPart) -> bool:
        result = self.tail.results.get(call.tool_call_id)
        return (
            call.tool_name == self.completing_tool
            and result is not None
            and (result.tool_name, result.outcome) == (call.tool_name, "success")
        )

    @property
    def _last_calls(self) -> list[ToolCallPart]:
        return list(self.responses[-1].tool_calls) if self.responses else []


def fold(events: Sequence[TranscriptEvent], *, prompt: str, completing_tool: str | None = None) -> Conversation:
    """The conversation the events tell. `prompt` stands in for the first input where none was taken."""
    conversation = Conversation(completing_tool)
    for event in events:
        match event.kind:
            case "input":
                conversation.tail.inputs.append(UserPromptPart(str(event.data["text"])))
            case "request":
                parts = cast("list[Any]", event.data["parts"])
                conversation.tail.others.extend(_REQUEST_PART.validate_python(part) for part in parts)
            case "response":
                _open_with(conversation, prompt)
                conversation.add_response(cast("ModelResponse", _MESSAGE.validate_python(event.data["message"])))
            case "tool_call":
                conversation.tail.announced.add(str(event.data["tool_call_id"]))
            case "tool_result":
                conversation.add_result(event.data)
            case _:
                pass
    _open_with(conversation, prompt)
    return conversation


def response_event(response: ModelResponse) -> NewEvent:
    return NewEvent("response", {"message": _to_json(_MESSAGE, response)})


def request_event(parts: Sequence[ModelRequestPart]) -> NewEvent:
    return NewEvent("request", {"parts": [_to_json(_REQUEST_PART, part) for part in parts]})


def tool_call_event(call: ToolCallPart, *, is_interruptible: bool = True) -> NewEvent:
    data: dict[str, JsonValue] = {"tool_call_id": call.tool_call_id, "tool_name": call.tool_name}
    return NewEvent("tool_call", data if is_interruptible else {**data, "interruptible": False})


def tool_result_event(part: ToolReturnPart, *, user_content: str | Sequence[UserContent] | None = None) -> NewEvent:
    """The result of a call. Raises when its content has no JSON form (`PydanticSerializationError`, `ValueError`)."""
    data = cast("dict[str, JsonValue]", _to_json(_REQUEST_PART, part))
    if user_content:
        data["user_content"] = _to_json(_USER_CONTENT, user_content)
    return NewEvent("tool_result", data)


def unknown_result_event(call: ToolCallPart) -> NewEvent:
    """The durable result of a call that was announced and never reported back (P7)."""
    event = tool_result_event(_failed_return(call, UNKNOWN_EFFECT))
    return NewEvent(event.kind, {**event.data, "effect": "unknown"})


def _failed_return(call: ToolCallPart, content: str) -> ToolReturnPart:
    return ToolReturnPart(call.tool_name, content, call.tool_call_id, outcome="failed")


def _open_with(conversation: Conversation, prompt: str) -> None:
    """A conversation without any input begins with the request's own prompt."""
    if not conversation.messages and not conversation.tail.inputs:
        conversation.tail.inputs.append(UserPromptPart(prompt))


def _to_json(adapter: TypeAdapter[Any], value: object) -> JsonValue:
    # `exclude_defaults` would drop the tags that tell the parts apart; `exclude_none` does not.
    try:
        return pydantic_core.from_json(adapter.dump_json(value, exclude_none=True))
    except (pydantic_core.PydanticSerializationError, UnicodeEncodeError):
        cleaned = without_surrogates(adapter.dump_python(value, mode="json", exclude_none=True))
        return pydantic_core.from_json(pydantic_core.to_json(cleaned, inf_nan_mode="null"))
