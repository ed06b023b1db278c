"""`job_output`, `job_list` and `job_kill` as the model meets them: exact texts, limits, and what each reports."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from subagent_tasks import ConfigurationError, JobToolsConfig, SubagentApp
from subagent_tasks.testing import wait_until
from tests.behaviour.bench import Bench, first_notices, job_of, pending_notices, status_of
from tests.behaviour.provider import ended


def test_a_default_wait_above_the_cap_is_refused() -> None:
    """behaviour §10.66: at the declaration, with both numbers."""
    with pytest.raises(ConfigurationError) as refused:
        SubagentApp().add_job_tools(wait_timeout_ms=20, max_wait_timeout_ms=10)
    assert str(refused.value) == "tool-jobs: waitTimeoutMs (20) exceeds maxWaitTimeoutMs (10)"


@pytest.mark.parametrize(("value", "shown"), [(1.5, "1.5"), (-1, "-1"), ("two", "two"), (True, "true"), (2**53, 2**53)])
def test_a_wake_budget_that_is_no_whole_number_is_refused(value: Any, shown: object) -> None:
    """behaviour §10.66"""
    with pytest.raises(ConfigurationError) as refused:
        SubagentApp().add_job_tools(max_consecutive_wakes=value)
    assert str(refused.value) == f"tool-jobs: maxConsecutiveWakes ({shown}) must be a whole number of turns"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"wait_timeout": 5}, "wait_timeout: unknown key; did you mean wait_timeout_ms?"),
        ({"wait_timeout_ms": 0}, "wait_timeout_ms: "),
        ({"wait_timeout_ms": "30"}, "wait_timeout_ms: "),
        ({"wait_timeout_ms": 1, "waitTimeoutMs": 1}, "wait_timeout_ms is also given as waitTimeoutMs"),
        ({"completion_delivery": "loud"}, "completion_delivery: input should be 'wakeup' or 'quiet', got \"loud\""),
    ],
)
def test_a_wrong_declaration_names_key_value_and_fix(values: dict[str, Any], said: str) -> None:
    """P13"""
    with pytest.raises(ConfigurationError) as refused:
        SubagentApp().add_job_tools(**values)
    assert said in str(refused.value)


def test_job_tools_are_declared_once() -> None:
    """P13: and either with a configuration or with its keys."""
    app = SubagentApp()
    app.add_job_tools(JobToolsConfig(wait_timeout_ms=10))
    with pytest.raises(ConfigurationError, match=r'tool "job_output" is already registered.*add_job_tools once'):
        app.add_job_tools()


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("", "(no new output)\n[status: completed]"),
        ("one line", "one line\n[status: completed]"),
        ("one line\n", "one line\n[status: completed]"),
        ("\n", "\n[status: completed]"),
    ],
)
async def test_output_is_followed_by_exactly_one_newline_and_the_status(bench: Bench, text: str, rendered: str) -> None:
    """behaviour §10.67"""
    session, child = await bench.session(), bench.provider.child(result=ended(text))
    assert (await bench.settled(session, await bench.job(session, child.in_background()))).text == rendered


async def test_a_wait_is_capped_and_running_out_is_no_error(bench: Bench) -> None:
    """behaviour §10.68: a timeout above the cap counts as the cap."""
    app = bench.other_app()
    app.add_delegation_tool(provider="scripted")
    app.add_job_tools(wait_timeout_ms=20, max_wait_timeout_ms=50)
    child = bench.provider.child(holds_result=True)
    async with app.host() as host:
        session = await bench.session(host=host)
        job_id = await bench.running_job(session, child)
        async with asyncio.timeout(5):
            for more in ({"timeout_ms": 600_000}, {"timeout_ms": 1e308}, {}):
                result = await session.call("job_output", {"job_id": job_id, "wait": True, **more})
                assert (result.text, result.is_error) == ("(no new output)\n[status: running]", False)
        child.go_on.set()
        await first_notices(session, 1)


async def test_a_call_waits_no_longer_than_its_own_timeout(bench: Bench) -> None:
    """P8: the host's `timeout` bounds what the model asked for."""
    session, child = await bench.session(), bench.provider.child(holds_result=True)
    job_id = await bench.running_job(session, child)
    async with asyncio.timeout(5):
        result = await session.call("job_output", {"job_id": job_id, "wait": True}, timeout=0.05)
    assert status_of(result) == "running"
    child.go_on.set()
    await bench.settled(session, job_id)


@pytest.mark.parametrize("name", ["job_output", "job_kill"])
@pytest.mark.parametrize(
    ("job_id", "said", "code"),
    [
        ("", 'Error: invalid job_id: expected a non-empty string, got ""', "INVALID_ARGS"),
        ("subagent-1", "Error: unknown job subagent-1", "UNKNOWN_JOB"),
    ],
)
async def test_an_empty_or_unknown_id_has_its_exact_text(
    bench: Bench, name: str, job_id: str, said: str, code: str
) -> None:
    """behaviour §10.69"""
    result = await (await bench.session()).call(name, {"job_id": job_id})
    assert (result.text, result.is_error, result.code) == (said, True, code)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("job_output", {}, "job_id: required, but missing"),
        ("job_output", {"job_id": 7}, "job_id: expected a string, got 7"),
        ("job_output", {"job_id": "a\x00"}, "job_id: contains a NUL character at position 1"),
        ("job_output", {"job_id": "\udfff"}, "job_id: contains half of a surrogate pair at position 0"),
        ("job_output", {"job_id": "a" * 5000}, "job_id: 5000 bytes of UTF-8 exceed the limit of 4096"),
        ("job_output", {"job_id": "a", "wait": "yes"}, 'wait: expected true or false, got "yes"'),
        ("job_output", {"job_id": "a", "wait": True, "timeout_ms": "5"}, 'timeout_ms: expected a number, got "5"'),
        ("job_kill", {"job_id": "a", "reason": 5}, "reason: expected a string, got 5"),
        ("job_kill", "not json", "arguments: expected a JSON object, got text of 8 characters"),
        ("job_list", [], "arguments: expected a JSON object, got a list of 0"),
    ],
)
async def test_bad_arguments_are_refused_by_field_value_and_fix(
    bench: Bench, name: str, arguments: Any, said: str
) -> None:
    """P13"""
    result = await (await bench.session()).call(name, arguments)
    assert result.text.startswith("Error: invalid arguments: ")
    assert said in result.text
    assert result.code == "INVALID_ARGS"


@pytest.mark.parametrize(("timeout_ms", "shown"), [(0, "0"), (-5, "-5"), (float("inf"), "Infinity")])
async def test_a_wait_of_no_positive_length_is_refused(bench: Bench, timeout_ms: float, shown: str) -> None:
    """behaviour §3.5"""
    arguments = {"job_id": "a", "wait": True, "timeout_ms": timeout_ms}
    result = await (await bench.session()).call("job_output", arguments)
    assert result.text == f"Error: invalid wait timeout: expected a positive number of milliseconds, got {shown}"


async def test_jobs_are_listed_in_the_order_they_were_registered(bench: Bench) -> None:
    """behaviour §10.70: one line each, whatever their state; none has words of its own."""
    session = await bench.session()
    assert (await session.call("job_list", {})).text == "(no background jobs)"
    slow, quick = bench.provider.child(holds_result=True), bench.provider.child()
    first = await bench.running_job(session, slow)
    second = await bench.job(session, quick.in_background(description="quick\none"))
    await bench.settled(session, second)
    listing = await session.call("job_list", {})
    assert listing.text.splitlines() == [
        f"{first} [subagent] running — a task",
        f"{second} [subagent] completed — quick one",
    ]
    assert isinstance(listing.value, list)
    assert len(listing.value) == 2
    slow.go_on.set()
    await bench.settled(session, first)


async def test_a_listing_reports_nothing(bench: Bench) -> None:
    """behaviour §3.5: only reading a job does; its notice stays."""
    session, child = await bench.session(), bench.provider.child()
    await bench.job(session, child.in_background())
    await first_notices(session, 1)
    assert "completed" in (await session.call("job_list", {})).text
    assert await pending_notices(bench, session) == 1


async def test_a_kill_is_acknowledged_at_once_and_needs_no_notice(bench: Bench) -> None:
    """behaviour §10.71, §10.75: the job is `stopping` until its child has ended."""
    session, child = await bench.session(), bench.provider.child(holds_result=True, ignores_cancel=True)
    child.result = ended(stop_reason="aborted")
    job_id = await bench.running_job(session, child)
    killed = await session.call("job_kill", {"job_id": job_id})
    assert killed.text == f"requested cancellation of job {job_id}"
    assert killed.value == {"outcome": "cancellation-requested", "job": job_of(killed)}
    assert status_of(killed) == "stopping"
    child.go_on.set()

    async def has_settled() -> bool:
        return "killed" in (await session.call("job_list", {})).text

    await wait_until(has_settled, description="the job is killed")
    assert await pending_notices(bench, session) == 0


async def test_a_kill_of_a_finished_job_says_how_it_ended_and_takes_nothing_away(bench: Bench) -> None:
    """behaviour §10.71: the output is still there afterwards; the notice is withdrawn, for the model now knows."""
    session, child = await bench.session(), bench.provider.child()
    job_id = await bench.job(session, child.in_background())
    await first_notices(session, 1)
    killed = await session.call("job_kill", {"job_id": job_id})
    assert killed.text == f"job {job_id} had already finished [status: completed]"
    assert killed.value == {"outcome": "already-finished", "job": job_of(killed)}
    assert await pending_notices(bench, session) == 0
    assert (await session.call("job_output", {"job_id": job_id})).text == "done\n[status: completed]"


async def test_a_second_kill_changes_nothing(bench: Bench) -> None:
    """protocol §2: the flag is set once and the child is cancelled once, with the first reason."""
    session, child = await bench.session(), bench.provider.child(holds_result=True)
    job_id = await bench.running_job(session, child)
    for reason in ("first", "second"):
        await session.call("job_kill", {"job_id": job_id, "reason": reason})
    assert status_of(await bench.settled(session, job_id)) == "killed"
    assert child.cancel_reasons == ["first"]


async def test_a_terminal_reading_withdraws_the_notice(bench: Bench) -> None:
    """behaviour §3.7, §10.75: the model has seen the end; a reader that comes later finds nothing."""
    session, child = await bench.session(), bench.provider.child()
    job_id = await bench.job(session, child.in_background())
    await first_notices(session, 1)
    await session.call("job_output", {"job_id": job_id})
    assert await pending_notices(bench, session) == 0
