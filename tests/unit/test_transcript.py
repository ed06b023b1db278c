"""Folding events into a conversation, and messages into events, without a model."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic_ai.messages import (
    BinaryContent,
    ModelRequest,
    ModelResponse,
    RetryFeedbackPart,
    RetryInfo,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.usage import RequestUsage

from subagent_tasks.agents.transcript import (
    NEVER_RAN,
    UNKNOWN_EFFECT,
    Conversation,
    fold,
    request_event,
    response_event,
    tool_call_event,
    tool_result_event,
    unknown_result_event,
)
from subagent_tasks.protocol.interfaces import NewEvent
from subagent_tasks.protocol.models import TranscriptEvent

CALL_A = ToolCallPart("read", {"path": "a"}, "c1")
CALL_B = ToolCallPart("read", {"path": "b"}, "c2")
CALLS = response_event(ModelResponse(parts=[CALL_A, CALL_B], usage=RequestUsage(input_tokens=5)))
FINAL = response_event(ModelResponse(parts=[TextPart("done")], usage=RequestUsage(input_tokens=7)))
INPUT = NewEvent("input", {"message_id": "m1", "text": "go", "source": "user", "lane": "next-turn"})


def result(call: ToolCallPart, content: object = "ok") -> NewEvent:
    return tool_result_event(ToolReturnPart(call.tool_name, content, call.tool_call_id))


def folded(*events: NewEvent) -> Conversation:
    log = [TranscriptEvent(seq=seq, kind=event.kind, data=dict(event.data)) for seq, event in enumerate(events)]
    return fold([TranscriptEvent.model_validate_json(event.to_json()) for event in log], prompt="the prompt")


def contents(conversation: Conversation) -> list[list[object]]:
    def shown(parts: Sequence[object]) -> list[object]:
        return [getattr(part, "content", getattr(part, "tool_call_id", None)) for part in parts]

    return [shown(message.parts) for message in conversation.history()]


def test_an_empty_transcript_begins_with_the_requests_prompt() -> None:
    """design §3: a run's prompt is its first input."""
    assert contents(folded()) == [["the prompt"]]


def test_a_taken_input_stands_for_the_prompt() -> None:
    """protocol §1, `take`: the transcript alone says what was taken."""
    assert contents(folded(INPUT)) == [["go"]]


def test_results_follow_the_order_of_their_calls() -> None:
    """P12: parallel tools end in any order; the history a model sees does not depend on it."""
    conversation = folded(INPUT, CALLS, result(CALL_B, "b"), result(CALL_A, "a"), FINAL)
    assert contents(conversation) == [["go"], ["c1", "c2"], ["a", "b"], ["done"]]


def test_calls_are_told_apart_by_what_is_known_of_them() -> None:
    """P7: announced without a result is unknown, never announced never ran."""
    conversation = folded(INPUT, CALLS, tool_call_event(CALL_A))
    assert [call.tool_call_id for call in conversation.calls_of_unknown_effect] == ["c1"]
    assert [call.tool_call_id for call in conversation.calls_never_started] == ["c2"]


def test_the_same_call_id_in_a_later_message_is_another_call() -> None:
    """field fault 22: many model servers number the calls of each message anew."""
    conversation = folded(INPUT, CALLS, tool_call_event(CALL_A), result(CALL_A), result(CALL_B), CALLS)
    assert len(conversation.calls_never_started) == 2


def test_an_old_call_without_a_result_is_closed() -> None:
    """field fault 22: the whole history is looked at, not its end alone."""
    conversation = folded(INPUT, CALLS, tool_call_event(CALL_A), FINAL)
    assert contents(conversation) == [["go"], ["c1", "c2"], [UNKNOWN_EFFECT, NEVER_RAN], ["done"]]


def test_a_final_answer_finishes_a_conversation_and_new_input_opens_it() -> None:
    """protocol §3: a continuable child's next turn begins behind its last answer."""
    assert folded(INPUT, FINAL).is_finished
    assert not folded(INPUT, FINAL, INPUT).is_finished
    assert not folded(INPUT, CALLS).is_finished


def test_usage_is_the_sum_of_what_the_log_tells() -> None:
    """facts-core §D trap 7."""
    usage = folded(INPUT, CALLS, result(CALL_A), unknown_result_event(CALL_B), FINAL).usage
    assert (usage.requests, usage.input_tokens, usage.tool_calls) == (2, 12, 1)


def test_unknown_kinds_are_skipped() -> None:
    """A transcript may hold events of other parts of the system, and of newer versions."""
    assert contents(folded(INPUT, NewEvent("resumed", {}), NewEvent("of-the-future", {"x": 1}))) == [["go"]]


def test_feedback_of_the_loop_is_kept_behind_the_results() -> None:
    """facts-core §D: what went to the model goes to it again."""
    feedback = request_event([RetryFeedbackPart(content="try again", retry=RetryInfo(cause="no_output"))])
    conversation = folded(INPUT, CALLS, result(CALL_A), result(CALL_B), feedback)
    last = conversation.history()[-1]
    assert isinstance(last, ModelRequest)
    assert [type(part) for part in last.parts] == [ToolReturnPart, ToolReturnPart, RetryFeedbackPart]


def test_pictures_and_added_content_survive_the_log() -> None:
    """P7: a finished call's result is kept whole."""
    picture = BinaryContent(b"\x89PNG", media_type="image/png")
    part = ToolReturnPart("look", [picture, "text"], "c1")
    conversation = folded(
        INPUT,
        response_event(ModelResponse(parts=[CALL_A])),
        tool_result_event(part, user_content=["seen:", picture]),
    )
    returned, added = conversation.history()[-1].parts
    assert isinstance(returned, ToolReturnPart)
    assert isinstance(added, UserPromptPart)
    assert [getattr(file, "data", None) for file in returned.files] == [picture.data]
    assert [getattr(item, "data", item) for item in added.content] == ["seen:", picture.data]


def test_lone_surrogates_do_not_break_the_log() -> None:
    """field fault 23: file names and broken model output carry them; no UTF-8 store takes them."""
    conversation = folded(INPUT, response_event(ModelResponse(parts=[TextPart("a\ud800b")])))
    assert contents(conversation)[-1] == ["a?b"]
