"""A pydantic-ai model that answers by a script: no network, no key.

Decides how the script's answers look to an agent: message parts, finish reasons, errors of the classes real models
raise. Which answer is next, `script.py` knows.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NoReturn, assert_never

from pydantic_ai.exceptions import (
    ModelAPIError,
    ModelAuthenticationError,
    ModelConnectionError,
    ModelContextWindowExceededError,
    ModelHTTPError,
    ModelNotFoundError,
    ModelOverloadedError,
    ModelQuotaExceededError,
    ModelRateLimitError,
    ModelRequestRejectedError,
    ModelServerError,
    ModelUnavailableError,
)
from pydantic_ai.messages import (
    FinishReason,
    InstructionPart,
    ModelMessage,
    ModelRequest,
    ModelResponse,
    ModelResponsePart,
    ModelResponseStreamEvent,
    SystemPromptPart,
    TextContent,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models import Model, ModelRequestParameters, StreamedResponse
from pydantic_ai.profiles import ModelProfile, ModelProfileSpec
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import RunContext
from pydantic_ai.usage import RequestUsage

from subagent_tasks.testing.script import (
    Beat,
    Disconnect,
    Failure,
    Finish,
    Reply,
    Script,
    SeenCall,
    SeenMessage,
    SeenRequest,
    Stall,
    Step,
    ToolCalls,
    deltas,
    usage_of,
)

_FINISH_REASONS: dict[Finish, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "content_filter": "content_filter",
    "refusal": "content_filter",
    "error": "error",
}


class ScriptedModel(Model[None]):
    """A model for tests: `on` gives it rules, `requests` and `seen` say what it was asked.

    One instance may serve any number of agents, threads and event loops at once. A refusal is what OpenAI's is to
    pydantic-ai: no parts, finish reason `content_filter`, the text in `provider_details["refusal"]`. A request that no
    rule matches raises `UnscriptedRequest`.
    """

    # There is no model here to tell about the framing of user text; the note would only show up in `seen`.
    _announces_lookalike_notes = False

    def __init__(
        self,
        script: Script | None = None,
        *,
        model_name: str = "scripted",
        settings: ModelSettings | None = None,
        profile: ModelProfileSpec | None = None,
    ) -> None:
        self.script = script if script is not None else Script()
        self._model_name = model_name
        default = ModelProfile(supports_json_schema_output=True, supports_json_object_output=True)
        super().__init__(settings=settings, profile=default if profile is None else profile)

    def on(self, contains: str, steps: Step | Sequence[Step]) -> None:
        """See `Script.on`."""
        self.script.on(contains, steps)

    @property
    def requests(self) -> int:
        """How many requests arrived, those that are held or failed among them."""
        return self.script.requests

    @property
    def seen(self) -> list[SeenRequest]:
        """The requests in the order of their arrival."""
        return self.script.seen

    @property
    def model_name(self) -> str:
        return self._model_name

    @property
    def system(self) -> str:
        return "scripted"

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        model_settings, model_request_parameters = self.prepare_request(model_settings, model_request_parameters)
        seen = self._seen(messages, model_settings, model_request_parameters)
        beat = await self._next_beat(seen)
        match beat.answer:
            case Reply() | ToolCalls() as answer:
                finish, details = _ending(answer)
                return ModelResponse(
                    parts=_parts(answer),
                    usage=_usage(answer, seen),
                    model_name=self._model_name,
                    provider_name=self.system,
                    finish_reason=finish,
                    provider_details=details,
                )
            case Failure() as failure:
                raise _http_error(failure, self._model_name)
            case Disconnect():
                raise _connection_error(self._model_name)
            case Stall():
                await _forever()
            case _ as never:
                assert_never(never)

    @asynccontextmanager
    async def request_stream(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
        run_context: RunContext[Any] | None = None,
    ) -> AsyncGenerator[StreamedResponse]:
        model_settings, model_request_parameters = self.prepare_request(model_settings, model_request_parameters)
        seen = self._seen(messages, model_settings, model_request_parameters)
        beat = await self._next_beat(seen)
        match beat.answer:
            case Failure() as failure:
                raise _http_error(failure, self._model_name)
            case Disconnect(after=None):
                raise _connection_error(self._model_name)
            case Stall(after=None):
                await _forever()
            case Reply() | ToolCalls() | Disconnect() | Stall() as answer:
                yield _ScriptedStream(
                    model_request_parameters=model_request_parameters,
                    answer=answer,
                    seen=seen,
                    name=self._model_name,
                    provider=self.system,
                )
            case _ as never:
                assert_never(never)

    async def _next_beat(self, seen: SeenRequest) -> Beat:
        beat = self.script.play(seen)
        for wait in beat.waits:
            await wait.passed()
        return beat

    def _seen(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        parameters: ModelRequestParameters,
    ) -> SeenRequest:
        instructions = parameters.instruction_parts
        newest = next((message for message in reversed(messages) if isinstance(message, ModelRequest)), None)
        return SeenRequest(
            model=self._model_name,
            messages=tuple(seen for message in messages for seen in _seen_messages(message)),
            instructions=(InstructionPart.join(instructions) or None) if instructions else None,
            tools=tuple(tool.name for tool in (*parameters.declared_function_tools, *parameters.output_tools)),
            settings=dict(model_settings or {}),
            conversation_id=newest.conversation_id if newest else None,
            raw=list(messages),
        )


@dataclass(kw_only=True)
class _ScriptedStream(StreamedResponse):
    answer: Reply | ToolCalls | Disconnect | Stall
    seen: SeenRequest
    name: str
    provider: str
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def _get_event_iterator(self) -> AsyncIterator[ModelResponseStreamEvent]:
        match self.answer:
            case Reply() | ToolCalls() as answer:
                for event in self._events(answer):
                    yield event
                    # A real stream gives other tasks a turn between its events.
                    await asyncio.sleep(0)
                self._usage = _usage(answer, self.seen)
                self.finish_reason, self.provider_details = _ending(answer)
            case Disconnect(after=after, clean=clean):
                partial = Reply(text=after or "")
                for event in self._events(partial):
                    yield event
                if not clean:
                    raise _connection_error(self.name)
                # As a stream without its last event comes out of a real adapter: nobody counted its tokens.
                self._usage = RequestUsage(unmeasured_requests=1)
            case Stall(after=after):
                for event in self._events(Reply(text=after or "")):
                    yield event
                await self.closed.wait()
            case _ as never:
                assert_never(never)

    async def close_stream(self) -> None:
        self.closed.set()

    @property
    def model_name(self) -> str:
        return self.name

    @property
    def provider_name(self) -> str:
        return self.provider

    @property
    def provider_url(self) -> None:
        return None

    @property
    def timestamp(self) -> datetime:
        return self.started_at

    def _events(self, answer: Reply | ToolCalls) -> Iterator[ModelResponseStreamEvent]:
        for index, part in enumerate(_parts(answer)):
            match part:
                case TextPart():
                    for piece in deltas(part.content):
                        yield from self._parts_manager.handle_text_delta(vendor_part_id=index, content=piece)
                case ThinkingPart():
                    for piece in deltas(part.content):
                        yield from self._parts_manager.handle_thinking_delta(vendor_part_id=index, content=piece)
                case ToolCallPart():
                    yield from self._parts_manager.handle_tool_call_delta_events(
                        vendor_part_id=index,
                        tool_name=part.tool_name,
                        args=part.args_as_json_str(),
                        tool_call_id=part.tool_call_id,
                    )
                case _:
                    raise TypeError(f"A script makes no {type(part).__name__}.")


def _parts(answer: Reply | ToolCalls) -> list[ModelResponsePart]:
    parts: list[ModelResponsePart] = []
    if isinstance(answer, ToolCalls):
        if answer.text:
            parts.append(TextPart(answer.text))
        for call in answer.calls:
            parts.append(ToolCallPart(call.name, call.arguments_json, tool_call_id=call.call_id or ""))
        return parts
    if answer.reasoning:
        parts.append(ThinkingPart(answer.reasoning))
    if answer.text and answer.finish != "refusal":
        parts.append(TextPart(answer.text))
    return parts


def _ending(answer: Reply | ToolCalls) -> tuple[FinishReason, dict[str, Any]]:
    if isinstance(answer, ToolCalls):
        return "tool_call", {"finish_reason": "tool_calls"}
    if answer.finish == "refusal":
        return "content_filter", {"refusal": answer.text}
    return _FINISH_REASONS[answer.finish], {"finish_reason": answer.finish}


def _usage(answer: Reply | ToolCalls, seen: SeenRequest) -> RequestUsage:
    input_tokens, output_tokens = usage_of(answer, seen)
    return RequestUsage(input_tokens=input_tokens, output_tokens=output_tokens)


def _http_error(failure: Failure, model_name: str) -> ModelHTTPError:
    message = failure.message or f"scripted failure {failure.status}"
    headers: dict[str, str] = {}
    if failure.retry_after is not None:
        headers["retry-after"] = str(math.ceil(failure.retry_after))
    return ModelHTTPError.for_category(
        _category(failure),
        status_code=failure.status,
        model_name=model_name,
        body={"message": message, "code": failure.error_code},
        headers=headers,
        provider_error_code=failure.error_code,
        retry_after=failure.retry_after,
    )


def _category(
    failure: Failure,
) -> (
    type[
        ModelRateLimitError
        | ModelQuotaExceededError
        | ModelUnavailableError
        | ModelServerError
        | ModelRequestRejectedError
    ]
    | None
):
    match failure.error_code:
        case "context_length_exceeded":
            return ModelContextWindowExceededError
        case "insufficient_quota":
            return ModelQuotaExceededError
        case _:
            pass
    match failure.status:
        case 400 | 422:
            return ModelRequestRejectedError
        case 401 | 403:
            return ModelAuthenticationError
        case 402:
            return ModelQuotaExceededError
        case 404:
            return ModelNotFoundError
        case 429:
            return ModelRateLimitError
        case 503:
            return ModelUnavailableError
        case 529:
            return ModelOverloadedError
        case status:
            return ModelServerError if status >= 500 else None


def _connection_error(model_name: str) -> ModelAPIError:
    return ModelConnectionError(model_name, "Connection error: the script disconnects here.", phase="read")


async def _forever() -> NoReturn:
    # Without the timer of a long sleep: only cancelling ends it.
    await asyncio.get_running_loop().create_future()
    raise AssertionError("nobody resolves that future")


def _seen_messages(message: ModelMessage) -> Iterator[SeenMessage]:
    if isinstance(message, ModelResponse):
        calls = tuple(
            SeenCall(part.tool_name, part.args_as_json_str(), part.tool_call_id)
            for part in message.parts
            if isinstance(part, ToolCallPart)
        )
        yield SeenMessage("assistant", "".join(p.content for p in message.parts if isinstance(p, TextPart)), calls)
        return
    for part in message.parts:
        match part:
            case UserPromptPart():
                yield SeenMessage("user", _user_text(part))
            case SystemPromptPart():
                yield SeenMessage("system", part.content)
            case ToolReturnPart():
                yield SeenMessage("tool", part.model_response_str(), call_id=part.tool_call_id)
            case _:
                pass


def _user_text(part: UserPromptPart) -> str:
    if isinstance(part.content, str):
        return part.content
    texts = (item.content if isinstance(item, TextContent) else item for item in part.content)
    return "\n".join(text for text in texts if isinstance(text, str))
