"""No text outgrows its cap or leaves UTF-8, whatever a child, a caller or an exception put into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from wire_values import any_texts, jobs, json_values, outcomes, refusal, results

from subagent_tasks.errors import ToolError
from subagent_tasks.protocol.models import (
    DIAGNOSTIC_MARKER,
    MAX_DIAGNOSTIC_BYTES,
    ChildResult,
    JobSnapshot,
    Outcome,
    bounded_diagnostic,
)
from subagent_tasks.protocol.outcomes import bounded_summary, completion_summary, limited, outcome_of, stringified
from subagent_tasks.tools import render
from subagent_tasks.tools.arguments import parse_delegation, parse_job_kill, parse_job_output
from subagent_tasks.tools.config import display_value

UNITS = ("a", "é", "€", "😀", "\ud800", "a\n", "\x00")
COUNTS = (0, 1, 1000, 1024, 1360, 1365, 2048, 4070, 4090, 4096, 5000)
"""Around the cap, in characters of one to four bytes."""


def _long(parts: tuple[str, int, str]) -> str:
    unit, count, tail = parts
    return unit * count + tail


long_texts = st.tuples(st.sampled_from(UNITS), st.sampled_from(COUNTS), any_texts).map(_long)


def size(text: str) -> int:
    """Its bytes. Raises for what is not UTF-8."""
    return len(text.encode("utf-8"))


@given(long_texts)
def test_a_diagnostic_fits_and_says_what_it_can(text: str) -> None:
    """behaviour §1.3: at most 4096 bytes, whole characters, marked when cut."""
    bounded = bounded_diagnostic(text)
    clean = text.encode("utf-8", "replace").decode()
    assert size(bounded) <= MAX_DIAGNOSTIC_BYTES
    if size(clean) <= MAX_DIAGNOSTIC_BYTES:
        assert bounded == clean
    else:
        assert clean.startswith(bounded.removesuffix(DIAGNOSTIC_MARKER))
        assert size(bounded) > MAX_DIAGNOSTIC_BYTES - 4
        assert bounded.endswith(DIAGNOSTIC_MARKER)


@given(
    st.recursive(
        long_texts.map(ValueError) | long_texts.map(ToolError),
        lambda inner: st.builds(ExceptionGroup, long_texts, st.lists(inner, min_size=1, max_size=3)),
        max_leaves=4,
    )
)
def test_a_stringified_exception_fits(error: Exception) -> None:
    """P14, behaviour §1.8: aggregates too."""
    assert size(stringified(error)) <= MAX_DIAGNOSTIC_BYTES


@given(results(any_texts), st.none() | long_texts, st.none() | long_texts, st.none() | long_texts, st.booleans())
def test_what_an_outcome_says_of_errors_fits(
    result: ChildResult, error: str | None, dispose_error: str | None, kill_reason: str | None, started: bool
) -> None:
    """P14: and is written as JSON that reads the same."""
    outcome = outcome_of(result, error=error, dispose_error=dispose_error, kill_reason=kill_reason, started=started)
    for text in (outcome.error, outcome.dispose_error, outcome.diagnostic):
        assert size(text or "") <= MAX_DIAGNOSTIC_BYTES
    assert Outcome.model_validate_json(outcome.to_json().encode("utf-8")).status == outcome.status


@given(outcomes(any_texts), st.integers(0, 60))
def test_an_output_over_its_limit_is_cut_to_it(outcome: Outcome, max_output_bytes: int) -> None:
    """protocol §6: the run fails, and keeps the text that fits."""
    bounded = limited(outcome, max_output_bytes=max_output_bytes)
    whole = len(outcome.text.encode("utf-8", "replace"))
    assert len(bounded.text.encode("utf-8", "replace")) <= max(max_output_bytes, 0)
    assert bounded == outcome or (bounded.status, bounded.stop_reason) == ("failed", "error")
    if whole > max_output_bytes:
        assert bounded.status == "failed"


@given(long_texts, st.integers(0, 300) | st.integers(4000, 5000))
@example("é", 1)
def test_a_tool_result_fits_its_limit(text: str, limit_bytes: int) -> None:
    """behaviour §3.6: the tail stays."""
    bounded = render.bounded_result(text, limit_bytes)
    assert size(bounded) <= limit_bytes
    kept = bounded.removesuffix(render.OUTPUT_MARKER)
    assert text.encode("utf-8", "replace").decode().endswith(kept)


@given(jobs(any_texts), st.integers(0, 400))
def test_a_notice_fits_its_limit(job: JobSnapshot, limit_bytes: int) -> None:
    """behaviour §3.6."""
    assert size(render.bounded_completion_text(job, limit_bytes)) <= limit_bytes


@given(jobs(any_texts), long_texts)
def test_a_summary_is_one_line_of_120_characters(job: JobSnapshot, text: str) -> None:
    """behaviour §1.8."""
    for summary in (completion_summary(job), bounded_summary(text)):
        assert len(summary) <= 120
        assert len(summary.splitlines()) <= 1


@given(st.lists(jobs(any_texts), max_size=5))
def test_a_listing_has_one_line_for_each_job(listed: list[JobSnapshot]) -> None:
    """behaviour §3.5: no label passes for another job."""
    lines = render.job_list_result(listed).text.splitlines()
    assert len(lines) == max(len(listed), 1)


@given(json_values(any_texts))
def test_a_shown_value_is_short_and_one_line(value: object) -> None:
    """P13: it is quoted in refusals."""
    shown = display_value(value)
    assert size(shown) <= 500
    assert len(shown.splitlines()) == 1


Parse = Callable[[dict[str, Any] | str], object]
FIELDS = ("description", "prompt", "provider", "model", "reasoning_effort", "run_in_background", "job_id", "wait",
          "timeout_ms", "reason")  # fmt: skip
arguments = st.dictionaries(st.sampled_from(FIELDS) | any_texts, json_values(any_texts) | long_texts, max_size=10)


@pytest.mark.parametrize("parse", [parse_delegation, parse_job_output, parse_job_kill])
@given(arguments=arguments | any_texts)
def test_a_refusal_is_short_and_can_be_sent(parse: Parse, arguments: dict[str, Any] | str) -> None:
    """P13: a model reads it."""
    refused = refusal(lambda: parse(arguments))
    if refused is not None:
        assert refused.code == "INVALID_ARGS"
        assert size(str(refused)) <= MAX_DIAGNOSTIC_BYTES
