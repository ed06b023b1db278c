"""What is written when a run ends: one pure function for driver, sweeper and kill."""

from __future__ import annotations

import json
from typing import Any

import pytest

from subagent_tasks.protocol.endings import Ending, EndingWriter
from subagent_tasks.protocol.lifecycle import State
from subagent_tasks.protocol.models import ChildRequest, Mode, Outcome, Usage, text_block
from subagent_tasks.protocol.records import RunRecord, RunSpec

DONE_AT = "2030-01-01T00:00:00+00:00"
COMPLETED = Outcome(status="completed", stop_reason="completed", output=(text_block("the answer"),))
FAILED = Outcome(status="failed", stop_reason="error", error="worker lost", detail="worker lost")
KILLED = Outcome(status="killed", stop_reason="aborted")


def write(outcome: Outcome, *, mode: Mode = "background", label: str = "a task", inline_bytes: int = 65_536) -> Ending:
    request = ChildRequest(label=label, prompt="do it")
    run = RunRecord(
        id="run-1",
        owner="parent",
        root="parent",
        depth=1,
        mode=mode,
        state=State.DRIVEN,
        token=1,
        seq=1,
        attempt=0,
        spec=RunSpec(provider="spawn", queue="q", label=label, request=request, run_limit_seconds=60),
        created_at=1,
    )
    return EndingWriter(lambda: DONE_AT, inline_bytes).write(run, outcome, settle_id="driver:1")


def parsed(text: str) -> dict[str, Any]:
    return json.loads(text)


@pytest.mark.parametrize(
    ("outcome", "state"),
    [(COMPLETED, "SUCCESS"), (FAILED, "FAILURE"), (KILLED, "REVOKED")],
    ids=["ok", "failed", "killed"],
)
def test_celery_sees_the_same_ending(outcome: Outcome, state: str) -> None:
    """P3: `AsyncResult` agrees with `job_output`."""
    result = parsed(write(outcome).result)
    assert (result["status"], result["task_id"], result["date_done"]) == (state, "run-1", DONE_AT)


def test_celery_gets_the_canonical_value() -> None:
    """behaviour §2.4."""
    wanted = {"kind": "foreground", "runId": "run-1", "output": [text_block("the answer")]}
    assert parsed(write(COMPLETED).result)["result"] == wanted


def test_a_failure_says_why_in_celery_too() -> None:
    """facts-core §A."""
    assert parsed(write(FAILED).result)["result"]["exc_message"] == ["worker lost"]


def test_the_record_keeps_the_whole_outcome() -> None:
    """What every reader renders."""
    assert Outcome.model_validate_json(write(COMPLETED).outcome) == COMPLETED


def test_a_small_outcome_travels_with_the_announcement() -> None:
    """A waiting host needs no second trip."""
    announcement = parsed(write(COMPLETED).announcement)
    assert announcement["settled"] == "run-1"
    assert Outcome.model_validate(announcement["outcome"]) == COMPLETED


def test_a_large_outcome_is_left_to_the_record() -> None:
    """Field fault 23: a subscriber whose buffer overflows is cut off."""
    announcement = parsed(write(COMPLETED, inline_bytes=20).announcement)
    assert announcement == {"settled": "run-1", "outcome": None}


def test_the_limit_counts_bytes() -> None:
    """Sizes are bytes, not characters."""
    outcome = COMPLETED.model_copy(update={"output": (text_block("é" * 1_000),)})
    size = len(outcome.to_json().encode())
    assert parsed(write(outcome, inline_bytes=size).announcement)["outcome"] is not None
    assert parsed(write(outcome, inline_bytes=size - 1).announcement)["outcome"] is None


def test_a_job_has_a_notice() -> None:
    """behaviour §3.7."""
    notice = parsed(write(COMPLETED).notice)
    assert (notice["kind"], notice["sessionId"], notice["senderId"]) == ("job-completed", "parent", "run-1")
    assert "run-1" in notice["text"]


def test_a_notice_never_holds_the_output() -> None:
    """behaviour §3.7: read it with job_output."""
    assert "the answer" not in write(COMPLETED).notice


def test_a_notice_carries_what_was_spent() -> None:
    """behaviour §1.8."""
    outcome = COMPLETED.model_copy(update={"usage": Usage(requests=2)})
    assert parsed(write(outcome).notice)["usage"]["requests"] == 2


def test_a_foreground_ending_has_a_notice_for_whoever_comes_after_its_caller() -> None:
    """protocol §5: it is told as the call's result, unless the caller is lost; the script knows which."""
    notice = parsed(write(COMPLETED, mode="foreground").notice)
    assert notice["kind"] == "run-abandoned"
    assert "is gone" in notice["text"]


def test_the_transcript_ends_with_how_it_ended() -> None:
    """The last event of every transcript."""
    assert parsed(write(FAILED).event) == {"status": "failed", "stopReason": "error", "detail": "worker lost"}


def test_text_with_quotes_and_line_breaks_stays_json() -> None:
    """The scripts paste the notice and the announcement into other JSON."""
    ending = write(COMPLETED, label='say "hi"\n{"notice":1}')
    assert parsed(f'{{"notice":{ending.notice}}}')["notice"]["senderId"] == "run-1"
    assert parsed(ending.announcement)["settled"] == "run-1"


def test_the_expiry_names_owner_and_run() -> None:
    """So that the sweeper finds the index that must forget it."""
    assert json.loads(write(COMPLETED).expiry) == ["parent", "run-1"]
