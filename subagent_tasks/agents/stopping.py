"""How a child ended: stop reasons, the choice of its output, and diagnostics that are safe to show.

Pure. The rules are behaviour §1.3, §2.9 and §5.7. A diagnostic is made of facts we know to be harmless (class of the
error, HTTP status, model, waiting time), never of an error's own text: model errors quote request and response bodies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic_ai.exceptions import (
    ContentFilterError,
    ModelAPIError,
    ModelContextWindowExceededError,
    ModelHTTPError,
    ModelRequestTimeout,
    OutputTokenLimitExceeded,
    RunCancelled,
    UsageLimitExceeded,
)
from pydantic_ai.messages import ModelResponse, TextPart, ThinkingPart, ToolCallPart

from subagent_tasks.protocol.models import Block, text_block

StopReason = Literal["completed", "aborted", "error", "max-tokens", "refusal"]

MAX_NAME_CHARACTERS = 120
MAX_GROUPED_ERRORS = 5


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a child stopped, and one line of safe facts about it when it did not complete."""

    reason: StopReason
    diagnostic: str | None = None


def stop_of_responses(responses: Sequence[ModelResponse], *, model: str) -> Stop:
    """How a conversation ended that came to its end without an error.

    pydantic-ai returns a cut or filtered answer as a normal result; here neither is a success. A length cut counts
    for the whole turn, in whichever step it happened (behaviour §1.5).
    """
    if not responses:
        return Stop("error", _line("the child ended without a model response", model=model))
    last = responses[-1]
    if last.finish_reason == "content_filter":
        return Stop("refusal", _line("the model declined or its answer was filtered", model=model))
    if last.finish_reason == "error":
        return Stop("error", _line("the model reported an error", model=model))
    if any(response.finish_reason == "length" for response in responses):
        return Stop("max-tokens", _line("an answer was cut at the token limit", model=model))
    if last.state != "complete":
        # A connection that closed early leaves a text that reads like an answer.
        return Stop("error", _line("the answer is incomplete: its stream was cut short", model=model))
    return Stop("completed")


def stop_of_error(error: BaseException, *, model: str, max_requests: int) -> Stop:
    """How a conversation ended that an error ended. `model` is the route we asked for, never what the error says."""
    match error:
        case ModelRequestTimeout():
            return Stop("error", f"model request timed out after {error.timeout:g} s")
        case OutputTokenLimitExceeded():
            return Stop("max-tokens", _line("an answer was cut at the token limit", error, model=model))
        case ModelContextWindowExceededError():
            return Stop("max-tokens", _line("the conversation outgrew the context window", error, model=model))
        case ContentFilterError():
            return Stop("refusal", _line("the model declined or its answer was filtered", error, model=model))
        case UsageLimitExceeded():
            return Stop("error", f"stopped after {max_requests} model requests (max_requests)")
        case RunCancelled():
            return Stop("aborted")
        case BaseExceptionGroup():
            return Stop("error", _group_line(error, model=model))
        case ModelAPIError():
            return Stop("error", _line("model request failed", error, model=model))
        case _:
            return Stop("error", _line("the child failed", error, model=model))


def output_of_responses(responses: Sequence[ModelResponse], *, deltas: Sequence[str] = ()) -> tuple[Block, ...]:
    """The blocks a child hands back, whatever its stop reason (behaviour §1.3).

    The last message with any content counts, reasoning or tool calls alone included; failing that the streamed text
    so far; failing that nothing.
    """
    for response in reversed(responses):
        if blocks := blocks_of_response(response):
            return blocks
    streamed = "".join(deltas)
    return (text_block(streamed),) if streamed else ()


def blocks_of_response(response: ModelResponse) -> tuple[Block, ...]:
    """One assistant message as content blocks. Empty parts are left out; parts without a block form too."""
    blocks: list[Block] = []
    for part in response.parts:
        match part:
            case TextPart(content=text) if text:
                blocks.append(text_block(text))
            case ThinkingPart(content=text) if text:
                blocks.append({"type": "reasoning", "text": text})
            case ToolCallPart():
                arguments = part.args_as_dict() if part.args else {}
                blocks.append(
                    {
                        "type": "tool-call",
                        "toolCallId": part.tool_call_id,
                        "toolName": part.tool_name,
                        "input": arguments,
                    }
                )
            case _:
                pass
    return tuple(blocks)


def _line(what: str, error: BaseException | None = None, *, model: str) -> str:
    facts: list[str] = []
    if error is not None:
        facts.append(f"error: {type(error).__name__}")
    if isinstance(error, ModelHTTPError):
        facts.append(f"HTTP status: {error.status_code}")
    facts.append(f"model: {_one_line(model)}")
    if isinstance(error, ModelAPIError) and error.retry_after is not None:
        facts.append(f"retry after: {error.retry_after:g} s")
    return f"{what} ({'; '.join(facts)})"


def _group_line(group: BaseExceptionGroup[BaseException], *, model: str) -> str:
    names = [
        f"{type(error).__name__} {error.status_code}" if isinstance(error, ModelHTTPError) else type(error).__name__
        for error in group.exceptions[:MAX_GROUPED_ERRORS]
    ]
    return f"the child failed (errors: {', '.join(names)}; model: {_one_line(model)})"


def _one_line(name: str) -> str:
    return " ".join(name.split())[:MAX_NAME_CHARACTERS]
