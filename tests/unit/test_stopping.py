"""Stop reasons, the choice of output, and diagnostics, without a model."""

from __future__ import annotations

import pytest
from pydantic_ai.exceptions import (
    IncompleteToolCall,
    ModelHTTPError,
    ModelRequestTimeout,
    RunCancelled,
    UnexpectedModelBehavior,
    UsageLimitExceeded,
)
from pydantic_ai.messages import FinishReason, ModelResponse, ModelResponsePart, TextPart, ThinkingPart, ToolCallPart

from subagent_tasks.agents.stopping import Stop, output_of_responses, stop_of_error, stop_of_responses

SECRET = "sk-planted-secret-1234"


def response(*parts: ModelResponsePart, finish: FinishReason | None = "stop") -> ModelResponse:
    return ModelResponse(parts=list(parts), finish_reason=finish)


def stop_of(error: BaseException) -> Stop:
    return stop_of_error(error, model="openai:gpt-5-mini", max_requests=200)


def test_a_finished_answer_completes_without_a_diagnostic() -> None:
    """behaviour §1.3: diagnostics are for results that are not completed."""
    assert stop_of_responses([response(TextPart("hi"))], model="m") == Stop("completed")


def test_a_conversation_without_an_answer_is_an_error() -> None:
    """behaviour §5.7: no turn → error."""
    assert stop_of_responses([], model="m").reason == "error"


def test_a_filtered_last_answer_outranks_an_earlier_cut() -> None:
    """behaviour §5.7: the last message says how the turn ended; a cut is only remembered if it ended well."""
    cut, filtered = response(TextPart("a"), finish="length"), response(TextPart("b"), finish="content_filter")
    assert stop_of_responses([cut, filtered], model="m").reason == "refusal"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ModelRequestTimeout("m", 600), Stop("error", "model request timed out after 600 s")),
        (
            ModelRequestTimeout("m", 1.5, setting="first_event_timeout"),
            Stop("error", "model request timed out after 1.5 s"),
        ),
        (UsageLimitExceeded("x"), Stop("error", "stopped after 200 model requests (max_requests)")),
        (RunCancelled("x"), Stop("aborted")),
        (
            IncompleteToolCall(SECRET),
            Stop(
                "max-tokens",
                "an answer was cut at the token limit (error: IncompleteToolCall; model: openai:gpt-5-mini)",
            ),
        ),
        (
            ModelHTTPError(503, SECRET, SECRET),
            Stop(
                "error",
                "model request failed (error: ModelHTTPError; HTTP status: 503; model: openai:gpt-5-mini)",
            ),
        ),
        (
            UnexpectedModelBehavior(SECRET, SECRET),
            Stop("error", "the child failed (error: UnexpectedModelBehavior; model: openai:gpt-5-mini)"),
        ),
        (
            ExceptionGroup(SECRET, [ModelHTTPError(500, SECRET, SECRET), ValueError(SECRET)]),
            Stop("error", "the child failed (errors: ModelHTTPError 500, ValueError; model: openai:gpt-5-mini)"),
        ),
    ],
)
def test_errors_become_stops_with_safe_facts(error: BaseException, expected: Stop) -> None:
    """behaviour §2.9, P14: the exact line, and nothing of the error's own text in it."""
    assert stop_of(error) == expected


def test_a_diagnostic_is_one_bounded_line() -> None:
    """behaviour §1.3: whatever a model is called."""
    stop = stop_of_error(ValueError("x"), model="a\nb" * 10_000, max_requests=1)
    assert stop.diagnostic is not None
    assert "\n" not in stop.diagnostic
    assert len(stop.diagnostic) < 300


def test_the_last_message_with_content_is_the_output() -> None:
    """behaviour §1.3: an empty last message does not count."""
    assert output_of_responses([response(TextPart("kept")), response()]) == ({"type": "text", "text": "kept"},)


def test_a_message_of_calls_alone_is_an_output() -> None:
    """behaviour §1.3: a tool-call-only message counts and hides an earlier text."""
    responses = [response(TextPart("old")), response(ToolCallPart("read", '{"a": 1}', "c1"))]
    assert output_of_responses(responses) == (
        {"type": "tool-call", "toolCallId": "c1", "toolName": "read", "input": {"a": 1}},
    )


def test_blocks_keep_the_order_of_the_message() -> None:
    """behaviour §1.3: reasoning and text as they came."""
    assert output_of_responses([response(ThinkingPart("hm"), TextPart("so"))]) == (
        {"type": "reasoning", "text": "hm"},
        {"type": "text", "text": "so"},
    )


def test_streamed_text_stands_in_for_a_missing_message() -> None:
    """behaviour §1.3: failing a message, all deltas in one block."""
    assert output_of_responses([response()], deltas=["he", "llo"]) == ({"type": "text", "text": "hello"},)


def test_without_any_content_the_output_is_empty() -> None:
    """behaviour §1.3."""
    assert output_of_responses([response(TextPart(""))]) == ()
