"""A run told to somebody who was not there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import JsonValue

from subagent_tasks.commands.transcript_view import Story
from subagent_tasks.protocol.lifecycle import State
from subagent_tasks.protocol.models import ChildRequest, Outcome, TranscriptEvent, Usage, text_block
from subagent_tasks.protocol.records import RunRecord, RunSpec

START_MS = 1_800_000_000_000


def record(**changes: Any) -> RunRecord:
    """A job of session `s1` that a worker took after 400 ms and drives."""
    spec = RunSpec(
        provider="spawn",
        tool="subagent",
        queue="shop.subagents.spawn",
        label="greet",
        call_id="c1",
        request=ChildRequest(label="greet", prompt=""),
        run_limit_seconds=60,
    )
    plain = RunRecord(
        id="r1", owner="s1", root="s1", depth=1, mode="background", state=State.DRIVEN, token=1, seq=1, attempt=0,
        spec=spec, created_at=START_MS, started_at=START_MS + 400, worker="worker-12-abc",
    )  # fmt: skip
    return replace(plain, **changes)


def settled(outcome: Outcome, **changes: Any) -> RunRecord:
    return record(state=State.SETTLED, outcome=outcome, finished_at=START_MS + 3500, worker="", **changes)


def event(kind: str, data: dict[str, JsonValue], *, seq: int = 1, at_seconds: float = 1) -> TranscriptEvent:
    return TranscriptEvent(seq=seq, at_ms=START_MS + int(at_seconds * 1000), kind=kind, data=data)


def response(*parts: JsonValue, at_seconds: float = 1, finish_reason: str = "stop") -> TranscriptEvent:
    message: JsonValue = {
        "parts": list(parts),
        "usage": {"input_tokens": 12, "output_tokens": 3},
        "model_name": "gpt-x",
        "finish_reason": finish_reason,
    }
    return event("response", {"message": message}, at_seconds=at_seconds)


def text_part(text: str) -> JsonValue:
    return {"part_kind": "text", "content": text}


def call_event(at_seconds: float, call_id: str = "t1") -> TranscriptEvent:
    return event("tool_call", {"tool_call_id": call_id, "tool_name": "look"}, at_seconds=at_seconds)


def result_event(at_seconds: float, call_id: str = "t1", **data: JsonValue) -> TranscriptEvent:
    plain: dict[str, JsonValue] = {"tool_call_id": call_id, "tool_name": "look", "content": "seen", **data}
    return event("tool_result", plain, at_seconds=at_seconds)


def told(*events: TranscriptEvent, full: bool = False) -> str:
    """The steps, without the columns they are set in."""
    story = Story(record(), full=full)
    return "\n".join(line.strip() for one in events for line in story.lines(one))


def test_the_opening_says_who_asked_whom_for_what() -> None:
    """Label, provider, parent, tool and call."""
    opening = "\n".join(Story(record()).opening())
    assert "run r1: greet\n" in opening
    assert "session s1, with the tool subagent, call c1" in opening
    assert "a background job of the provider spawn; depth 1; at most 1 min" in opening
    assert "2027-01-15 08:00:00 UTC" in opening


def test_a_run_that_a_child_started_names_both_its_parents() -> None:
    """The run that asked, and the session at the root."""
    opening = "\n".join(Story(record(owner="r0", root="s1", depth=2)).opening())
    assert "asked by  run r0, with the tool subagent, call c1, in the tree of session s1" in opening


def test_the_prompt_is_told_with_when_it_was_taken() -> None:
    """Time counts from acceptance; line breaks stay."""
    lines = Story(record()).lines(event("input", {"text": "say\nhello"}, seq=0, at_seconds=0.4))
    assert [line.strip() for line in lines] == ["400 ms  takes its prompt:", "| say", "| hello"]


def test_a_later_message_names_who_speaks() -> None:
    """design §6: a reader can always tell a runtime account from an agent's words."""
    one = event("input", {"text": "hurry", "source": "coordinator", "lane": "next-step"}, seq=4)
    assert told(one).startswith("1.0 s  takes a message from coordinator (next-step):\n| hurry")


def test_a_model_step_tells_its_time_words_and_calls() -> None:
    """How long it took counts from the step before."""
    call: JsonValue = {"part_kind": "tool-call", "tool_name": "look", "args": '{"path": "a"}'}
    steps = told(
        event("input", {"text": "x"}, seq=0, at_seconds=0.5), response(text_part("I look."), call, at_seconds=3)
    )
    assert "3.0 s  the model gpt-x answers after 2.5 s (12 tokens in, 3 out)\n| I look.\n" in steps
    assert steps.endswith('calls look with\n| {"path": "a"}')


def test_an_answer_that_was_cut_off_says_so() -> None:
    """A token limit is easily overlooked."""
    assert "; cut off at its token limit" in told(response(text_part("half"), finish_reason="length"))


def test_tools_that_run_side_by_side_are_timed_each() -> None:
    """From its announcement to its result."""
    steps = told(call_event(1), call_event(1.5, "t2"), result_event(2, "t2"), result_event(4))
    assert "2.0 s  the tool look returned after 500 ms:\n| seen" in steps
    assert "4.0 s  the tool look returned after 3.0 s:" in steps


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([call_event(1), result_event(2, outcome="failed")], "the tool look failed after 1.0 s:"),
        ([call_event(1), result_event(2, outcome="denied")], "the tool look ended (denied) after 1.0 s:"),
        ([call_event(1), result_event(2, outcome="failed", effect="unknown")], "the tool look may have had an effect:"),
        ([result_event(2, outcome="failed")], "the tool look was not run:"),
        ([result_event(2, content={"a": [1]})], '| {"a": [1]}'),
    ],
)
def test_each_outcome_of_a_tool_is_told_apart(events: list[TranscriptEvent], said: str) -> None:
    """P7: an unknown effect is neither a success nor a failure."""
    assert said in told(*events)


def test_a_long_text_is_shortened_and_says_how_to_see_it() -> None:
    """How much is left out, and the option that shows it."""
    long = event("input", {"text": "a" * 2000}, seq=0)
    assert told(long).endswith("… 500 of 2000 characters left out: --full shows them")
    assert "a" * 2000 in told(long, full=True)
    assert "left out" not in told(long, full=True)


def test_what_a_child_wrote_cannot_drive_the_terminal() -> None:
    """An escape sequence is shown as text."""
    steps = told(response(text_part("a\x1b[2Jb\tc")))
    assert "\x1b" not in steps
    assert "| a\N{REPLACEMENT CHARACTER}[2Jb" in steps


def test_a_step_of_a_newer_version_is_mentioned() -> None:
    """A gap in a story should be seen."""
    assert "dreamed: a step this version cannot tell; --json shows it" in told(event("dreamed", {"of": "sheep"}))


def ending(record_: RunRecord, *events: TranscriptEvent) -> str:
    story = Story(record())
    for one in events:
        story.lines(one)
    return "\n".join(story.ending(record_))


def test_a_completed_run_tells_its_spans_and_what_it_spent() -> None:
    """The whole, the wait for a worker, and the work."""
    usage = Usage(requests=2, tool_calls=1, input_tokens=315, output_tokens=8)
    outcome = Outcome(status="completed", stop_reason="completed", output=(text_block("hi there"),), usage=usage)
    said = ending(settled(outcome), response(text_part("hi there")))
    assert "completed after 3.5 s: it waited 400 ms for a worker and ran 3.1 s" in said
    assert "model requests 2, tool calls 1, tokens in 315, tokens out 8" in said
    assert "that last answer is what came back" in said


def test_an_answer_that_is_not_the_last_words_is_told() -> None:
    """What its parent got is never left to be guessed."""
    outcome = Outcome(
        status="completed",
        stop_reason="completed",
        output=(text_block("other"), {"type": "image"}),
        structured={"n": 1},
    )
    said = ending(settled(outcome), response(text_part("hi")))
    assert [line.strip() for line in said.splitlines()][2:] == [
        "what came back:", "| other", "beside it came back: image", "structured output:", '| {"n": 1}'
    ]  # fmt: skip


def test_a_failed_run_says_why() -> None:
    """Error, diagnostic and failed release, as the record has them."""
    outcome = Outcome(
        status="failed", stop_reason="error", error="Error: no route", diagnostic="429", dispose_error="Error: stuck"
    )
    lines = [line.strip() for line in ending(settled(outcome)).splitlines()]
    assert lines[1].startswith("failed (error) after 3.5 s")
    assert lines[2:] == [
        "error:", "| Error: no route", "diagnostic:", "| 429", "release failed:", "| Error: stuck", "no text came back"
    ]  # fmt: skip


def test_a_run_that_was_killed_in_its_queue_was_never_taken() -> None:
    """P5; with the reason that was given."""
    outcome = Outcome(status="killed", stop_reason="aborted")
    said = ending(settled(outcome, started_at=None, kill="k1", kill_reason="no longer wanted"))
    assert "killed (aborted) after 3.5 s: no worker had taken it" in said
    assert "| no longer wanted" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"state": State.QUEUED, "worker": ""}, "queued: it waits for a worker. --follow goes on"),
        ({"state": State.SUSPENDED, "worker": ""}, "running: it waits for runs of its own."),
        ({"kill": "k1"}, "stopping: its worker was asked to end it."),
        ({}, "running: driven by worker-12-abc."),
        ({"token": 3, "attempt": 2}, "driven more than once"),
        ({"attempt": 2}, "workers it lost since its last step: 2"),
    ],
)
def test_a_run_that_goes_on_says_where_it_stands(changes: dict[str, Any], said: str) -> None:
    """States and attempts."""
    assert said in ending(record(**changes))
