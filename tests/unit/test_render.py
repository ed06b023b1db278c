"""The texts and values a model gets back, row by row of the contract's tables."""

from __future__ import annotations

import pytest

from subagent_tasks.errors import ToolError
from subagent_tasks.protocol import outcomes
from subagent_tasks.protocol.models import (
    Block,
    ChildResult,
    JobSnapshot,
    JobStatus,
    Outcome,
    Usage,
    bounded_diagnostic,
    text_block,
)
from subagent_tasks.tools import render

PARTIAL = "Partial output before the run ended:"


def result(stop_reason: str, text: str = "", *, diagnostic: str | None = None) -> ChildResult:
    return ChildResult(stop_reason=stop_reason, output=(text_block(text),) if text else (), diagnostic=diagnostic)


def ended(
    child: ChildResult | None = None,
    *,
    error: str | None = None,
    dispose_error: str | None = None,
    kill_reason: str | None = None,
    started: bool = False,
) -> Outcome:
    return outcomes.outcome_of(
        child, error=error, dispose_error=dispose_error, kill_reason=kill_reason, started=started
    )


def job(status: JobStatus = "completed", *, label: str = "greet", detail: str | None = None) -> JobSnapshot:
    return JobSnapshot(id="subagent-1", label=label, status=status, detail=detail, started_at=5)


# --- outcome mapping (behaviour §3.2) ---------------------------------------------------------------------


def test_a_rejected_start_of_a_killed_run_is_killed_without_detail() -> None:
    """behaviour §3.2, scenario 44"""
    outcome = ended(error="Error: aborted", kill_reason="no longer needed")
    assert (outcome.status, outcome.stop_reason, outcome.detail, outcome.error) == ("killed", "aborted", None, None)


def test_a_killed_run_that_never_started_is_killed() -> None:
    """behaviour §3.2"""
    assert ended(kill_reason="").status == "killed"


def test_a_rejected_start_is_failed_with_the_error() -> None:
    """behaviour §3.2, scenario 43"""
    outcome = ended(error="Error: no such model")
    assert (outcome.status, outcome.stop_reason, outcome.detail) == ("failed", "error", "Error: no such model")


def test_a_killed_start_whose_clean_up_failed_is_failed() -> None:
    """behaviour §3.2, scenario 45"""
    outcome = ended(error="Error: aborted", dispose_error="Error: leak", kill_reason="k")
    assert (outcome.status, outcome.detail) == ("failed", "dispose failed: Error: leak")


def test_a_completed_result_is_completed_with_its_output() -> None:
    """behaviour §3.2"""
    outcome = ended(result("completed", "hi"))
    assert (outcome.status, outcome.detail, outcome.text) == ("completed", None, "hi")


def test_a_completion_beats_the_kill_that_came_too_late() -> None:
    """behaviour §3.5: first outcome wins."""
    assert ended(result("completed", "hi"), kill_reason="k").status == "completed"


def test_an_aborted_result_is_killed() -> None:
    """behaviour §3.2"""
    outcome = ended(result("aborted", "half"))
    assert (outcome.status, outcome.detail) == ("killed", None)


def test_another_reason_is_failed_with_the_reason() -> None:
    """behaviour §3.2"""
    outcome = ended(result("refusal"))
    assert (outcome.status, outcome.stop_reason, outcome.detail) == ("failed", "refusal", "refusal")


def test_another_reason_with_a_diagnostic_is_failed_with_both() -> None:
    """behaviour §3.2, scenario 47"""
    outcome = ended(result("max-tokens", diagnostic="limit 100"))
    assert (outcome.status, outcome.detail) == ("failed", "max-tokens; diagnostic: limit 100")


@pytest.mark.parametrize("stop_reason", ["error", "max-tokens", "refusal"])
def test_a_killed_run_that_did_not_complete_is_killed(stop_reason: str) -> None:
    """behaviour §5.7: cancelled and not completed is aborted."""
    outcome = ended(result(stop_reason, "half"), kill_reason="k")
    assert (outcome.status, outcome.stop_reason, outcome.detail) == ("killed", "aborted", None)


@pytest.mark.parametrize("kill_reason", [None, "k"])
def test_a_rejected_result_is_failed_with_the_error(kill_reason: str | None) -> None:
    """behaviour §3.2"""
    outcome = ended(error="RuntimeError: boom", kill_reason=kill_reason, started=True)
    assert (outcome.status, outcome.detail) == ("failed", "RuntimeError: boom")


@pytest.mark.parametrize(
    ("child", "error", "kill_reason", "detail"),
    [
        (result("completed", "hi"), None, None, "dispose failed: Error: d"),
        (result("aborted"), None, None, "dispose failed: Error: d"),
        (None, None, "k", "dispose failed: Error: d"),
        (result("refusal"), None, None, "refusal; dispose failed: Error: d"),
        (None, "Error: e", None, "Error: e; dispose failed: Error: d"),
    ],
    ids=["completed", "aborted", "killed", "refusal", "rejected"],
)
def test_a_failed_release_makes_any_outcome_failed(
    child: ChildResult | None, error: str | None, kill_reason: str | None, detail: str
) -> None:
    """behaviour §3.2, scenario 48"""
    outcome = ended(child, error=error, dispose_error="Error: d", kill_reason=kill_reason)
    assert (outcome.status, outcome.detail) == ("failed", detail)


def test_partial_text_usage_and_structure_are_kept() -> None:
    """design §6: failed background jobs keep what they produced."""
    child = ChildResult(stop_reason="error", output=(text_block("half"),), structured={"a": 1}, usage=Usage(requests=2))
    outcome = ended(child)
    assert (outcome.text, outcome.structured, outcome.usage) == ("half", {"a": 1}, Usage(requests=2))


def test_a_diagnostic_of_a_completed_result_is_dropped() -> None:
    """behaviour §1.3: only for non-completed results."""
    assert ended(result("completed", diagnostic="d")).diagnostic is None


def test_a_run_without_result_or_error_is_failed() -> None:
    """P3: every run settles."""
    assert ended().detail == "Error: the provider ended without a result"


def test_errors_are_bounded() -> None:
    """P14: diagnostics of at most 4096 bytes."""
    assert ended(error="é" * 9000).error == bounded_diagnostic("é" * 9000)


@pytest.mark.parametrize(
    ("error", "text"),
    [(ToolError("boom"), "Error: boom"), (ValueError("boom"), "ValueError: boom"), (TimeoutError(), "TimeoutError")],
)
def test_an_exception_is_stringified_as_kind_and_message(error: Exception, text: str) -> None:
    """behaviour §2.8"""
    assert outcomes.stringified(error) == text


# --- foreground (behaviour §2.4, §2.8, §2.9) --------------------------------------------------------------


def test_a_foreground_success_is_the_text_blocks_alone() -> None:
    """behaviour §2.4, scenario 21"""
    reasoning: Block = {"type": "reasoning", "text": "hm"}
    child = ChildResult(stop_reason="completed", output=(text_block("a"), reasoning, text_block("b")))
    rendered = render.foreground_result("r1", ended(child))
    assert rendered.text == "ab"
    assert rendered.value == {
        "kind": "foreground",
        "runId": "r1",
        "output": [text_block("a"), reasoning, text_block("b")],
    }
    assert (rendered.is_error, rendered.code) == (False, None)


def test_a_foreground_success_without_text_renders_an_empty_string() -> None:
    """behaviour §2.4"""
    assert render.foreground_result("r1", ended(result("completed"))).text == ""


@pytest.mark.parametrize(
    ("stop_reason", "headline"),
    [
        ("aborted", "subagent run was cancelled"),
        ("error", "subagent run failed"),
        ("max-tokens", "subagent run hit its token limit before finishing"),
        ("refusal", "subagent declined the task"),
        ("melted", "subagent run ended abnormally (melted)"),
    ],
)
def test_each_stop_reason_has_its_headline(stop_reason: str, headline: str) -> None:
    """behaviour §2.9, scenarios 23, 24, 26"""
    rendered = render.foreground_result("r1", ended(result(stop_reason)))
    assert (rendered.text, rendered.is_error, rendered.code) == (f"Error: {headline}", True, "CHILD_FAILED")


def test_diagnostic_and_partial_text_follow_the_headline_in_order() -> None:
    """behaviour §2.9, scenario 25"""
    rendered = render.foreground_result("r1", ended(result("error", "half", diagnostic="disk full")))
    assert rendered.text == f"Error: subagent run failed\nDiagnostic: disk full\n{PARTIAL}\nhalf"


def test_a_long_diagnostic_is_cut_on_a_character_boundary() -> None:
    """behaviour §1.3, scenario 32"""
    text = render.foreground_result("r1", ended(result("error", diagnostic="é" * 3000))).text
    assert text.endswith("é\n[diagnostic truncated]")


def test_a_killed_run_reads_as_cancelled_with_its_partial_text() -> None:
    """behaviour §2.10, scenario 30"""
    outcome = ended(result("aborted", "half"), kill_reason="k")
    assert render.foreground_result("r", outcome).text == f"Error: subagent run was cancelled\n{PARTIAL}\nhalf"


def test_ok_and_released_is_the_value() -> None:
    """behaviour §2.8"""
    assert outcomes.failure_message(ended(result("completed", "hi"))) is None


def test_failed_and_released_is_the_result_error() -> None:
    """behaviour §2.8"""
    assert render.foreground_result("r", ended(error="RuntimeError: boom")).text == "Error: RuntimeError: boom"


def test_completed_and_not_released_is_the_release_error() -> None:
    """behaviour §2.8, scenario 28"""
    rendered = render.foreground_result("r", ended(result("completed", "hi"), dispose_error="Error: leak"))
    assert (rendered.text, rendered.is_error, rendered.value) == ("Error: leak", True, None)


def test_failed_and_not_released_keeps_both_errors() -> None:
    """behaviour §2.8, scenario 29"""
    rendered = render.foreground_result("r", ended(error="Error: boom", dispose_error="Error: leak"))
    assert rendered.text == "Error: subagent run failed: Error: boom; dispose failed: Error: leak"


def test_a_stop_reason_and_a_failed_release_keep_both() -> None:
    """behaviour §2.8: the result error is stringified."""
    rendered = render.foreground_result("r", ended(result("refusal"), dispose_error="Error: leak"))
    assert rendered.text == (
        "Error: subagent run failed: Error: subagent declined the task; dispose failed: Error: leak"
    )


def test_an_infrastructure_error_keeps_partial_text() -> None:
    """design §6"""
    outcome = ended(result("completed", "half"), error="Error: worker lost")
    assert render.foreground_result("r", outcome).text == f"Error: worker lost\n{PARTIAL}\nhalf"


def test_celery_holds_the_canonical_foreground_value() -> None:
    """behaviour §2.4, P3"""
    outcome = ended(result("completed", "hi"))
    expected = {"kind": "foreground", "runId": "r1", "output": [text_block("hi")]}
    assert outcomes.canonical_value("r1", outcome) == expected


# --- starts and refusals ----------------------------------------------------------------------------------


def test_a_started_background_job_is_named() -> None:
    """behaviour §2.4, scenario 36"""
    rendered = render.background_started("subagent-1")
    assert rendered.text == "started background subagent job subagent-1"
    assert rendered.value == {"kind": "background", "jobId": "subagent-1"}


def test_a_started_continuable_child_is_named() -> None:
    """behaviour §2.4, scenario 78"""
    rendered = render.continuable_started("c1")
    assert rendered.text == "started subagent c1"
    assert rendered.value == {"kind": "continuable", "subagentId": "c1"}


def test_a_refused_call_is_an_error_with_its_code() -> None:
    """behaviour §2.7"""
    rendered = render.error_result(ToolError("no"))
    assert (rendered.text, rendered.is_error, rendered.code) == ("Error: no", True, "TOOL_ERROR")


def test_a_call_aborted_before_dispatch_says_so() -> None:
    """behaviour §2.7 step 1, scenario 31"""
    rendered = render.aborted_before_dispatch()
    assert rendered.text == "Error: tool call aborted before dispatch"
    assert (rendered.is_error, rendered.code) == (True, "ABORTED_BEFORE_DISPATCH")


# --- job tools (behaviour §3.5) ---------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["queued", "running", "stopping"])
def test_a_live_job_has_no_output(status: JobStatus) -> None:
    """behaviour §3.5, scenarios 54, 67"""
    assert render.job_output_result(job(status), None).text == f"(no new output)\n[status: {status}]"


def test_a_settled_job_without_output_says_so() -> None:
    """behaviour §3.5, scenarios 55, 67"""
    rendered = render.job_output_result(job(), ended(result("completed")))
    assert rendered.text == "(no new output)\n[status: completed]"


@pytest.mark.parametrize("text", ["hi", "hi\n"])
def test_exactly_one_newline_precedes_the_status(text: str) -> None:
    """behaviour §3.5, scenario 67"""
    rendered = render.job_output_result(job(), ended(result("completed", text)))
    assert rendered.text == "hi\n[status: completed]"


def test_the_value_holds_the_bare_text_and_the_public_job() -> None:
    """behaviour §3.4, §3.5"""
    settled = job().model_copy(update={"finished_at": 9})
    assert render.job_output_result(settled, ended(result("completed", "hi"))).value == {
        "text": "hi",
        "job": {
            "id": "subagent-1",
            "kind": "subagent",
            "label": "greet",
            "status": "completed",
            "startedAt": 5,
            "finishedAt": 9,
        },
    }


def test_a_failed_job_shows_its_partial_text_and_detail() -> None:
    """behaviour §3.5, design §6"""
    outcome = ended(result("max-tokens", "half"))
    rendered = render.job_output_result(job("failed", detail=outcome.detail), outcome)
    assert (rendered.text, rendered.is_error) == ("half\n[status: failed, max-tokens]", False)


def test_jobs_are_listed_one_a_line_in_the_given_order() -> None:
    """behaviour §3.5, scenario 70"""
    second = job("running", label="count").model_copy(update={"id": "subagent-2"})
    rendered = render.job_list_result([job(), second])
    assert rendered.text == "subagent-1 [subagent] completed — greet\nsubagent-2 [subagent] running — count"
    assert isinstance(rendered.value, list)
    assert len(rendered.value) == 2


def test_no_jobs_are_listed_in_words() -> None:
    """behaviour §3.5, scenario 70"""
    rendered = render.job_list_result([])
    assert (rendered.text, rendered.value) == ("(no background jobs)", [])


def test_a_label_cannot_add_lines_to_a_listing() -> None:
    """P13"""
    assert "\n" not in render.job_list_result([job(label="a\r\nsubagent-9 [subagent] completed")]).text


def test_a_kill_is_acknowledged() -> None:
    """behaviour §3.5, scenario 71"""
    rendered = render.job_kill_result(job("stopping"), already_finished=False)
    assert rendered.text == "requested cancellation of job subagent-1"
    assert rendered.value == {
        "outcome": "cancellation-requested",
        "job": {"id": "subagent-1", "kind": "subagent", "label": "greet", "status": "stopping", "startedAt": 5},
    }


def test_a_kill_of_a_finished_job_says_how_it_ended() -> None:
    """behaviour §3.5, scenario 71"""
    rendered = render.job_kill_result(job("failed", detail="refusal"), already_finished=True)
    assert rendered.text == "job subagent-1 had already finished [status: failed, refusal]"
    assert isinstance(rendered.value, dict)
    assert rendered.value["outcome"] == "already-finished"


def test_an_unknown_job_is_named() -> None:
    """behaviour §3.5, scenario 69"""
    assert str(render.unknown_job("nope")) == "unknown job nope"


def test_a_subagent_id_gets_a_hint_naming_the_right_tools() -> None:
    """design §6"""
    text = str(render.unknown_job("c1", really="subagent"))
    assert text.startswith("unknown job c1: this is the id of a subagent")
    assert "send_message" in text
    assert "list_agents" in text


def test_a_foreground_run_id_gets_a_hint() -> None:
    """design §6"""
    assert "foreground run" in str(render.unknown_job("r1", really="foreground"))


def test_a_job_of_another_session_is_refused() -> None:
    """behaviour §3.5, scenario 61"""
    error = render.foreign_job("j1")
    assert (str(error), error.code) == ("job j1 belongs to another session", "UNAUTHORIZED")


# --- notices and bounds (behaviour §3.6, §3.7) ------------------------------------------------------------


def test_a_completion_notice_names_the_job_and_how_to_read_it() -> None:
    """behaviour §3.7"""
    text = "background job subagent-1 (subagent: greet) finished [status: completed]. Read its output with job_output."
    assert outcomes.completion_text(job()) == text


def test_a_failed_completion_notice_carries_the_detail() -> None:
    """behaviour §3.7"""
    assert "finished [status: failed, refusal]." in outcomes.completion_text(job("failed", detail="refusal"))


def test_a_summary_is_kind_label_and_status() -> None:
    """behaviour §3.7"""
    assert outcomes.completion_summary(job()) == "subagent greet [status: completed]"


def test_a_summary_of_120_characters_is_whole() -> None:
    """behaviour §1.8"""
    assert outcomes.bounded_summary("é" * 120) == "é" * 120


def test_a_longer_summary_is_119_characters_and_an_ellipsis() -> None:
    """behaviour §1.8"""
    assert outcomes.bounded_summary("é" * 121) == "é" * 119 + "…"


def test_a_summary_is_one_line() -> None:
    """behaviour §1.8"""
    assert outcomes.bounded_summary("a\nb\u2028c") == "a b c"


@pytest.mark.parametrize(
    ("limit_bytes", "text"),
    [
        (62, "background job subagent-1\n[notice truncated]\nDone; job_output."),
        (61, "background job subagent-1\nDone; job_output."),
        (43, "background job subagent-1\nDone; job_output."),
        (8, "_output."),
        (0, ""),
    ],
)
def test_a_bounded_notice_keeps_the_id_and_the_action_longest(limit_bytes: int, text: str) -> None:
    """behaviour §3.6, scenario 77"""
    assert render.bounded_completion_text(job(), limit_bytes) == text


def test_a_notice_within_its_bound_is_whole() -> None:
    """behaviour §3.6"""
    whole = outcomes.completion_text(job())
    assert render.bounded_completion_text(job(), len(whole)) == whole


def test_a_result_within_its_bound_is_whole() -> None:
    """behaviour §3.6"""
    assert render.bounded_result("é" * 10, 20) == "é" * 10


def test_a_bounded_result_keeps_the_tail_with_the_status() -> None:
    """behaviour §3.6"""
    text = "x" * 100 + "\n[status: completed]"
    assert render.bounded_result(text, 60) == "x" * 21 + "\n[status: completed]" + "\n[output truncated]"


@pytest.mark.parametrize("limit_bytes", [0, 1, 5, 19, 20, 21, 40])
def test_a_bounded_result_is_never_over_its_bound_nor_cut_inside_a_character(limit_bytes: int) -> None:
    """behaviour §3.6"""
    bounded = render.bounded_result("é😀" * 20, limit_bytes)
    assert len(bounded.encode()) <= limit_bytes
    assert "\ufffd" not in bounded
