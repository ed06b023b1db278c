"""The bytes of three model APIs: OpenAI Chat Completions and Responses, Anthropic Messages.

Decides how a scripted answer looks on the wire: bodies, stream events, endings and errors as the vendor sends them, and
how a request reads. Serving them over HTTP is `stub_llm`'s.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from subagent_tasks.testing.script import (
    Failure,
    Finish,
    Reply,
    ScriptedCall,
    SeenCall,
    SeenMessage,
    SeenRequest,
    ToolCalls,
    deltas,
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and what its answer is named after."""

    number: int
    created: int
    body: dict[str, Any]

    @property
    def model(self) -> str:
        return str(self.body.get("model", "stub-1"))


@dataclass(frozen=True, slots=True)
class Content:
    """What an answer consists of, before it takes the shape of an API's. `is_cut`: nothing follows the text."""

    text: str
    finish: Finish = "stop"
    reasoning: str | None = None
    calls: tuple[ScriptedCall, ...] = ()
    input_tokens: int = 1
    output_tokens: int = 1
    is_cut: bool = False

    @classmethod
    def of(cls, answer: Reply | ToolCalls, usage: tuple[int, int]) -> Content:
        if isinstance(answer, ToolCalls):
            return cls(answer.text or "", calls=answer.calls, input_tokens=usage[0], output_tokens=usage[1])
        return cls(answer.text, answer.finish, answer.reasoning, (), usage[0], usage[1])

    @classmethod
    def partial(cls, text: str) -> Content:
        return cls(text, is_cut=True)

    @property
    def refusal(self) -> str | None:
        return self.text if self.finish == "refusal" else None

    @property
    def total_tokens(self) -> int:
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event. OpenAI's chat events have no name."""

    data: Mapping[str, Any] | str
    name: str | None = None

    def encoded(self) -> bytes:
        data = self.data if isinstance(self.data, str) else json.dumps(self.data)
        return (f"event: {self.name}\n" if self.name else "").encode() + f"data: {data}\n\n".encode()


class Dialect(ABC):
    """One model API. Stateless."""

    @abstractmethod
    def seen(self, body: dict[str, Any]) -> SeenRequest:
        """What a request carries."""

    @abstractmethod
    def whole(self, exchange: Exchange, content: Content) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def events(self, exchange: Exchange, content: Content) -> Iterator[Event]:
        """The events of one that is."""

    @abstractmethod
    def error(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        """The body of an HTTP error."""

    def error_instead_of_body(self) -> tuple[int, dict[str, Any]] | None:
        """What a failure on the model's side is without streaming, where the API has no body for it."""
        return 500, self.error(500, _BROKEN, None)


_BROKEN = "the model broke off: the script says so"


class OpenAIChat(Dialect):
    def seen(self, body: dict[str, Any]) -> SeenRequest:
        messages: list[SeenMessage] = []
        instructions: list[str] = []
        for item in _objects(body.get("messages")):
            text = _text(item.get("content"))
            match item.get("role"):
                case "system" | "developer":
                    messages.append(SeenMessage("system", text))
                    instructions.append(text)
                case "assistant":
                    calls = tuple(
                        _seen_call(_object(call.get("function")), "arguments", call.get("id"))
                        for call in _objects(item.get("tool_calls"))
                    )
                    messages.append(SeenMessage("assistant", text, calls))
                case "tool":
                    messages.append(SeenMessage("tool", text, call_id=str(item.get("tool_call_id"))))
                case _:
                    messages.append(SeenMessage("user", text))
        tools = tuple(str(tool.get("function", tool).get("name")) for tool in _objects(body.get("tools")))
        return _seen_request(body, messages, "\n\n".join(instructions), tools)

    def whole(self, exchange: Exchange, content: Content) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if content.refusal is not None or (content.calls and not content.text) else content.text,
            "refusal": content.refusal,
            "annotations": [],
        }
        if content.reasoning:
            message["reasoning_content"] = content.reasoning
        if content.calls:
            message["tool_calls"] = [self._call(call) for call in content.calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self._finish(content)}
        return {
            **self._head(exchange, "chat.completion"),
            "choices": [choice],
            "usage": self._usage(content),
        }

    def events(self, exchange: Exchange, content: Content) -> Iterator[Event]:
        wants_usage = bool(_object(exchange.body.get("stream_options")).get("include_usage"))
        head = self._head(exchange, "chat.completion.chunk")

        def chunk(delta: dict[str, Any], finish: str | None = None) -> Event:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
            return Event({**head, "choices": [choice], **({"usage": None} if wants_usage else {})})

        yield chunk({"role": "assistant", "content": None if content.calls else "", "refusal": None})
        for piece in deltas(content.reasoning or ""):
            yield chunk({"reasoning_content": piece})
        for piece in deltas(content.text):
            yield chunk({"refusal" if content.refusal is not None else "content": piece})
        if content.is_cut:
            return
        for index, call in enumerate(content.calls):
            opened = self._call(call)
            yield chunk({"tool_calls": [{"index": index, **opened, "function": {"name": call.name, "arguments": ""}}]})
            for piece in deltas(call.arguments_json):
                yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        if content.finish == "error":
            yield Event(self.error(500, _BROKEN, "server_error"))
            return
        yield chunk({}, self._finish(content))
        if wants_usage:
            yield Event({**head, "choices": [], "usage": self._usage(content)})
        yield Event("[DONE]")

    def error(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        kind, usual_code = _OPENAI_ERRORS.get(status, ("server_error" if status >= 500 else _REJECTED, None))
        return {"error": {"message": message, "type": code or kind, "param": None, "code": code or usual_code}}

    def _head(self, exchange: Exchange, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{exchange.number}",
            "object": kind,
            "created": exchange.created,
            "model": exchange.model,
            "service_tier": "default",
            "system_fingerprint": "fp_stub",
        }

    def _call(self, call: ScriptedCall) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments_json}
        return {"id": call.call_id, "type": "function", "function": function}

    def _finish(self, content: Content) -> str:
        if content.calls:
            return "tool_calls"
        return content.finish if content.finish in ("length", "content_filter") else "stop"

    def _usage(self, content: Content) -> dict[str, Any]:
        return {
            "prompt_tokens": content.input_tokens,
            "completion_tokens": content.output_tokens,
            "total_tokens": content.total_tokens,
            "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
        }


class OpenAIResponses(Dialect):
    def seen(self, body: dict[str, Any]) -> SeenRequest:
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else _objects(given)
        messages: list[SeenMessage] = []
        for item in items:
            role = item.get("role")
            match item.get("type", "message"):
                case "function_call":
                    _add_to_assistant(messages, "", (_seen_call(item, "arguments", item.get("call_id")),))
                case "reasoning":
                    _add_to_assistant(messages, "", ())
                case "function_call_output":
                    messages.append(SeenMessage("tool", _text(item.get("output")), call_id=str(item.get("call_id"))))
                case "message" if role == "assistant":
                    _add_to_assistant(messages, _text(item.get("content")), ())
                case "message" if role in ("system", "developer"):
                    messages.append(SeenMessage("system", _text(item.get("content"))))
                case "message":
                    messages.append(SeenMessage("user", _text(item.get("content"))))
                case _:
                    pass
        tools = tuple(str(tool.get("name") or tool.get("type")) for tool in _objects(body.get("tools")))
        return _seen_request(body, messages, str(body.get("instructions") or ""), tools)

    def whole(self, exchange: Exchange, content: Content) -> dict[str, Any]:
        return self._response(exchange, content, [item for item, _, _ in self._items(exchange, content)])

    def events(self, exchange: Exchange, content: Content) -> Iterator[Event]:
        number = 0

        def event(name: str, /, **data: Any) -> Event:
            nonlocal number
            number += 1
            return Event({"type": name, "sequence_number": number - 1, **data}, name)

        opening = {**self._response(exchange, content, []), "status": "in_progress", "usage": None}
        opening |= {"error": None, "incomplete_details": None}
        yield event("response.created", response=opening)
        yield event("response.in_progress", response=opening)
        done: list[dict[str, Any]] = []
        for index, (item, started, text) in enumerate(self._items(exchange, content)):
            where = {"item_id": item["id"], "output_index": index}
            yield event("response.output_item.added", output_index=index, item={**item, **started})
            match item["type"]:
                case "reasoning":
                    yield from self._part_events(event, item["summary"][0], {**where, "summary_index": 0}, text)
                case "message":
                    part = item["content"][0]
                    yield from self._part_events(event, part, {**where, "content_index": 0}, text, content.is_cut)
                case _:
                    for piece in deltas(text):
                        yield event("response.function_call_arguments.delta", **where, delta=piece)
                    yield event("response.function_call_arguments.done", **where, arguments=text, name=item["name"])
            if content.is_cut:
                return
            yield event("response.output_item.done", output_index=index, item=item)
            done.append(item)
        final = self._response(exchange, content, done)
        yield event(f"response.{final['status']}", response=final)

    def error(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        return OpenAIChat().error(status, message, code)

    def error_instead_of_body(self) -> None:
        return None

    def _part_events(
        self,
        event: Callable[..., Event],
        part: dict[str, Any],
        where: dict[str, Any],
        text: str,
        is_cut: bool = False,
    ) -> Iterator[Event]:
        stem, key, container = {
            "output_text": ("output_text", "text", "content"),
            "refusal": ("refusal", "refusal", "content"),
            "summary_text": ("reasoning_summary_text", "text", "reasoning_summary"),
        }[part["type"]]
        extra: dict[str, Any] = {"logprobs": []} if stem == "output_text" else {}
        yield event(f"response.{container}_part.added", **where, part={**part, key: ""})
        for piece in deltas(text):
            yield event(f"response.{stem}.delta", **where, **extra, delta=piece)
        if not is_cut:
            yield event(f"response.{stem}.done", **where, **extra, **{key: text})
            yield event(f"response.{container}_part.done", **where, part=part)

    def _items(self, exchange: Exchange, content: Content) -> Iterator[tuple[dict[str, Any], dict[str, Any], str]]:
        """The output items: each whole, what differs in it when it starts, and the text streamed in between."""
        if content.reasoning:
            summary = [{"type": "summary_text", "text": content.reasoning}]
            item: dict[str, Any] = {"id": f"rs_{exchange.number}", "type": "reasoning", "summary": summary}
            yield item, {"summary": []}, content.reasoning
        if content.text or not content.calls:
            part: dict[str, Any] = {"type": "output_text", "text": content.text, "annotations": [], "logprobs": []}
            if content.refusal is not None:
                part = {"type": "refusal", "refusal": content.refusal}
            status = "incomplete" if content.finish in ("length", "content_filter", "error") else "completed"
            item = {"id": f"msg_{exchange.number}", "type": "message", "role": "assistant"}
            item |= {"status": status, "content": [part]}
            yield item, {"status": "in_progress", "content": []}, content.text
        for index, call in enumerate(content.calls):
            item = {"id": f"fc_{exchange.number}_{index}", "type": "function_call", "status": "completed"}
            item |= {"call_id": call.call_id, "name": call.name, "arguments": call.arguments_json}
            yield item, {"status": "in_progress", "arguments": ""}, call.arguments_json

    def _response(self, exchange: Exchange, content: Content, output: list[dict[str, Any]]) -> dict[str, Any]:
        status, reason, error = "completed", None, None
        match content.finish:
            case "length":
                status, reason = "incomplete", {"reason": "max_output_tokens"}
            case "content_filter":
                status, reason = "incomplete", {"reason": "content_filter"}
            case "error":
                status, error = "failed", {"code": "server_error", "message": _BROKEN}
            case _:
                pass
        body = exchange.body
        return {
            "id": f"resp_{exchange.number}",
            "object": "response",
            "created_at": exchange.created,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": reason,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "model": exchange.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": body.get("store", True),
            "temperature": 1.0,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": body.get("tools") or [],
            "top_p": 1.0,
            "truncation": "disabled",
            "usage": {
                "input_tokens": content.input_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": content.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": content.total_tokens,
            },
            "user": None,
            "metadata": {},
        }


class AnthropicMessages(Dialect):
    def seen(self, body: dict[str, Any]) -> SeenRequest:
        messages: list[SeenMessage] = []
        for item in _objects(body.get("messages")):
            content = item.get("content")
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else _objects(content)
            if item.get("role") == "assistant":
                calls = tuple(
                    _seen_call(block, "input", block.get("id")) for block in blocks if block.get("type") == "tool_use"
                )
                messages.append(SeenMessage("assistant", _text(blocks), calls))
                continue
            role = "system" if item.get("role") == "system" else "user"
            for block in blocks:
                if block.get("type") == "tool_result":
                    text = _text(block.get("content"))
                    messages.append(SeenMessage("tool", text, call_id=str(block.get("tool_use_id"))))
                elif block.get("type") == "text":
                    messages.append(SeenMessage(role, str(block.get("text", ""))))
        tools = tuple(str(tool.get("name")) for tool in _objects(body.get("tools")))
        return _seen_request(body, messages, _text(body.get("system")), tools)

    def whole(self, exchange: Exchange, content: Content) -> dict[str, Any]:
        return {
            **self._head(exchange),
            "content": [block for block, _ in self._blocks(exchange, content)],
            **self._ending(content),
            "usage": self._usage(content, content.output_tokens),
        }

    def events(self, exchange: Exchange, content: Content) -> Iterator[Event]:
        def event(name: str, /, **data: Any) -> Event:
            return Event({"type": name, **data}, name)

        opening: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(content, 1),
        }
        yield event("message_start", message={**self._head(exchange), **opening})
        for index, (block, pieces) in enumerate(self._blocks(exchange, content)):
            empty = _ANTHROPIC_EMPTY[block["type"]]
            yield event("content_block_start", index=index, content_block={**block, **empty})
            if index == 0:
                yield event("ping")
            for delta in pieces:
                yield event("content_block_delta", index=index, delta=delta)
            if content.is_cut:
                return
            yield event("content_block_stop", index=index)
        if content.finish == "error":
            yield event("error", error={"type": "api_error", "message": _BROKEN})
            return
        yield event("message_delta", delta=self._ending(content), usage={"output_tokens": content.output_tokens})
        yield event("message_stop")

    def error(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        kind = code or _ANTHROPIC_ERRORS.get(status, "api_error" if status >= 500 else _REJECTED)
        if code == "context_length_exceeded":
            # Anthropic has no code for it: clients tell it by its words.
            kind, message = _REJECTED, f"prompt is too long: {message}"
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_stub"}

    def _head(self, exchange: Exchange) -> dict[str, Any]:
        return {"id": f"msg_{exchange.number}", "type": "message", "role": "assistant", "model": exchange.model}

    def _blocks(self, exchange: Exchange, content: Content) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """The content blocks, each with the deltas it is streamed in."""
        if content.reasoning:
            pieces: list[dict[str, Any]] = [
                {"type": "thinking_delta", "thinking": piece} for piece in deltas(content.reasoning)
            ]
            signature = f"sig_{exchange.number}"
            pieces.append({"type": "signature_delta", "signature": signature})
            yield {"type": "thinking", "thinking": content.reasoning, "signature": signature}, pieces
        if content.text and content.refusal is None:
            yield (
                {"type": "text", "text": content.text, "citations": None},
                [{"type": "text_delta", "text": piece} for piece in deltas(content.text)],
            )
        for call in content.calls:
            yield (
                {"type": "tool_use", "id": call.call_id, "name": call.name, "input": _object_or_raw(call.arguments)},
                [{"type": "input_json_delta", "partial_json": piece} for piece in deltas(call.arguments_json)],
            )

    def _ending(self, content: Content) -> dict[str, Any]:
        reason = "tool_use" if content.calls else _ANTHROPIC_STOPS.get(content.finish, "end_turn")
        ending: dict[str, Any] = {"stop_reason": reason, "stop_sequence": None}
        if content.refusal is not None:
            ending["stop_details"] = {"type": "refusal", "category": None, "explanation": content.refusal}
        return ending

    def _usage(self, content: Content, output_tokens: int) -> dict[str, Any]:
        return {
            "input_tokens": content.input_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": output_tokens,
            "service_tier": "standard",
        }


DIALECTS: tuple[tuple[str, Dialect], ...] = (
    ("/chat/completions", OpenAIChat()),
    ("/responses", OpenAIResponses()),
    ("/messages", AnthropicMessages()),
)
_REJECTED = "invalid_request_error"
_OPENAI_ERRORS: dict[int, tuple[str, str | None]] = {
    401: (_REJECTED, "invalid_api_key"),
    404: (_REJECTED, "model_not_found"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    500: ("server_error", "server_error"),
    503: ("service_unavailable_error", "service_unavailable"),
    529: ("server_error", "overloaded"),
}
_ANTHROPIC_ERRORS: dict[int, str] = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_ANTHROPIC_EMPTY: dict[str, dict[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}
# Its one content filter reports a refusal too.
_ANTHROPIC_STOPS: dict[Finish, str] = {"length": "max_tokens", "content_filter": "refusal", "refusal": "refusal"}
_NOT_SETTINGS = frozenset({"input", "instructions", "messages", "model", "stream", "stream_options", "system", "tools"})


def _seen_request(
    body: dict[str, Any], messages: Sequence[SeenMessage], instructions: str, tools: tuple[str, ...]
) -> SeenRequest:
    return SeenRequest(
        model=str(body.get("model", "")),
        messages=tuple(messages),
        instructions=instructions or None,
        tools=tools,
        settings={name: value for name, value in body.items() if name not in _NOT_SETTINGS},
        raw=body,
    )


def _seen_call(call: dict[str, Any], key: str, call_id: object) -> SeenCall:
    arguments = call.get(key)
    return SeenCall(
        str(call.get("name")), arguments if isinstance(arguments, str) else json.dumps(arguments or {}), str(call_id)
    )


def _add_to_assistant(messages: list[SeenMessage], text: str, calls: tuple[SeenCall, ...]) -> None:
    """One answer of the Responses API comes back as several items in a row."""
    if messages and messages[-1].role == "assistant":
        last = messages.pop()
        text, calls = last.text + text, last.calls + calls
    messages.append(SeenMessage("assistant", text, calls))


def model_list(names: Sequence[str], *, anthropic: bool) -> dict[str, Any]:
    if anthropic:
        data = [
            {"type": "model", "id": name, "display_name": name, "created_at": "2025-01-01T00:00:00Z"} for name in names
        ]
        return {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}
    data = [{"id": name, "object": "model", "created": 1735689600, "owned_by": "stub"} for name in names]
    return {"object": "list", "data": data}


def retry_headers(failure: Failure) -> dict[str, str]:
    if failure.retry_after is None:
        return {}
    headers = {"retry-after": str(math.ceil(failure.retry_after))}
    if failure.retry_after != int(failure.retry_after):
        headers["retry-after-ms"] = str(int(failure.retry_after * 1000))
    return headers


def _text(content: object) -> str:
    """The text of a message's content: a string, or a list of parts that may hold text."""
    if isinstance(content, str):
        return content
    return "\n".join(str(part["text"]) for part in _objects(content) if isinstance(part.get("text"), str))


def _object(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _objects(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        return []
    return [cast("dict[str, Any]", item) for item in cast("list[object]", value) if isinstance(item, dict)]


def _object_or_raw(arguments: Mapping[str, Any] | str) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return {}
