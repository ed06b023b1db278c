"""A one-shot background delegation: when it becomes a job, what can stop it, and what the job says of its end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from subagent_tasks.protocol.keys import Keys
from subagent_tasks.protocol.models import ChildResult
from tests.behaviour.bench import Bench, first_notices, job_id_of, job_of, status_of, until
from tests.behaviour.provider import ended


async def test_a_background_call_returns_before_the_child_is_done(bench: Bench) -> None:
    """behaviour §10.36: the text names the job id, the answer comes through job_output; ids are Celery result ids."""
    session, child = await bench.session(), bench.provider.child(holds_result=True)
    started = await session.call("subagent", child.in_background())
    job_id = job_id_of(started)
    assert started.text == f"started background subagent job {job_id}"
    assert started.value == {"kind": "background", "jobId": job_id}
    await until(lambda: child.is_running, "the child runs after the call returned")
    assert bench.kit.app.celery.AsyncResult(job_id).state == "STARTED"
    child.go_on.set()
    assert (await bench.settled(session, job_id)).text == "done\n[status: completed]"


async def test_a_one_shot_tool_on_a_continuable_provider_makes_a_job(bench: Bench) -> None:
    """behaviour §10.37: the mode decides, not what the provider could do."""
    assert bench.provider.capabilities.prepare_continuable
    session, child = await bench.session(), bench.provider.child()
    result = await session.call("subagent", child.in_background())
    assert isinstance(result.value, dict)
    assert result.value["kind"] == "background"
    await bench.settled(session, job_id_of(result))


async def test_an_omitted_argument_waits_in_one_shot_mode(bench: Bench) -> None:
    """behaviour §10.38"""
    session, child = await bench.session(), bench.provider.child()
    result = await session.call("subagent", child.arguments())
    assert isinstance(result.value, dict)
    assert (result.value["kind"], result.text) == ("foreground", "done")
    assert (await session.call("job_list", {})).text == "(no background jobs)"


async def test_without_job_tools_a_background_call_is_refused(bench: Bench) -> None:
    """behaviour §10.39: nobody could read or stop the job; the error names the fix, and nothing was started."""
    child, app = bench.provider.child(), bench.other_app()
    app.add_delegation_tool(provider="scripted")
    async with app.host() as host:
        session = await bench.session(host=host)
        refused = await session.call("subagent", child.in_background(), call_id="c1")
        assert refused.text.startswith("Error: background jobs unavailable: ")
        assert "app.add_job_tools()" in refused.text
        assert refused.is_error
        assert child.starts == 0
        # No id was consumed either: the same call without the argument is no conflict.
        assert (await session.call("subagent", child.arguments(), call_id="c1")).text == "done"


async def test_without_job_tools_the_missing_label_is_not_what_is_said(bench: Bench) -> None:
    """behaviour §2.7, §3.3: the jobs service comes before the label."""
    child, app = bench.provider.child(), bench.other_app()
    app.add_delegation_tool(provider="scripted")
    async with app.host() as host:
        session = await bench.session(host=host)
        refused = await session.call("subagent", child.in_background(description=""))
    assert refused.text.startswith("Error: background jobs unavailable: ")


async def test_a_refused_job_starts_nothing_and_takes_no_id(bench: Bench) -> None:
    """behaviour §10.40: at the limit the provider is not started; the call id stays free for a later try."""
    child, app = bench.provider.child(), bench.other_app(max_active_jobs=1)
    app.add_delegation_tool(provider="scripted")
    app.add_job_tools()
    async with app.host() as host:
        session, first = await bench.session(host=host), bench.provider.child(holds_result=True)
        await bench.running_job(session, first)
        refused = await session.call("subagent", child.in_background(), call_id="c1")
        assert refused.code == "LIMIT_REACHED"
        assert child.starts == 0
        assert len((await session.call("job_list", {})).text.splitlines()) == 1
        first.go_on.set()
        await first_notices(session, 1)
        accepted = await session.call("subagent", child.in_background(), call_id="c1")
        await bench.settled(session, job_id_of(accepted))
    assert child.starts == 1


async def test_a_signal_set_beforehand_makes_no_job(bench: Bench) -> None:
    """behaviour §10.41"""
    session, signal, child = await bench.session(), asyncio.Event(), bench.provider.child()
    signal.set()
    result = await session.call("subagent", child.in_background(), signal=signal)
    assert result.code == "ABORTED_BEFORE_DISPATCH"
    assert (await session.call("job_list", {})).value == []
    assert child.starts == 0


async def test_a_signal_after_the_id_was_returned_does_not_stop_the_job(bench: Bench) -> None:
    """behaviour §10.42: the call no longer owns the work."""
    session, signal = await bench.session(), asyncio.Event()
    child = bench.provider.child(holds_result=True)
    job_id = job_id_of(await session.call("subagent", child.in_background(), signal=signal))
    await until(lambda: child.is_running, "the child runs")
    signal.set()
    assert status_of(await session.call("job_output", {"job_id": job_id})) == "running"
    child.go_on.set()
    assert status_of(await bench.settled(session, job_id)) == "completed"
    assert child.cancel_reasons == []


async def test_a_rejected_start_fails_the_job(bench: Bench) -> None:
    """behaviour §10.43: the detail is the error; a run that never was is not released."""
    session, child = await bench.session(), bench.provider.child(start_error=OSError("no such binary"))
    result = await bench.settled(session, await bench.job(session, child.in_background()))
    assert result.text == "(no new output)\n[status: failed, OSError: no such binary]"
    assert child.log == ["starting"]


async def test_a_kill_while_the_start_is_pending_kills_the_job(bench: Bench) -> None:
    """behaviour §10.44: the start is cancelled, not waited for."""
    session, child = await bench.session(), bench.provider.child(holds_start=True)
    job_id = await bench.job(session, child.in_background())
    await until(lambda: child.starts, "the start began")
    await session.call("job_kill", {"job_id": job_id})
    result = await bench.settled(session, job_id)
    assert result.text == "(no new output)\n[status: killed]"
    assert child.log == ["starting", "start cancelled"]


async def test_a_killed_start_that_rejects_is_killed(bench: Bench) -> None:
    """behaviour §3.2: a single error after a kill is how the start gave up."""
    session = await bench.session()
    child = bench.provider.child(holds_start=True, rollback_error=OSError("gave up"))
    job_id = await bench.job(session, child.in_background())
    await until(lambda: child.starts, "the start began")
    await session.call("job_kill", {"job_id": job_id})
    assert (await bench.settled(session, job_id)).text == "(no new output)\n[status: killed]"


async def test_a_killed_start_that_cannot_clean_up_is_failed(bench: Bench) -> None:
    """behaviour §10.45: several errors in one say that something is left behind; a kill must not hide them."""
    session = await bench.session()
    both = ExceptionGroup("start failed", [ValueError("killed"), OSError("process 12 lives")])
    child = bench.provider.child(holds_start=True, rollback_error=both)
    job_id = await bench.job(session, child.in_background())
    await until(lambda: child.starts, "the start began")
    await session.call("job_kill", {"job_id": job_id})
    job = job_of(await bench.settled(session, job_id))
    assert job["status"] == "failed"
    assert job["detail"] == "ExceptionGroup: start failed [ValueError: killed; OSError: process 12 lives]"


@pytest.mark.parametrize(
    ("more", "reason"),
    [({"reason": "no longer needed"}, "no longer needed"), ({}, "background subagent task killed")],
)
async def test_the_kill_reason_reaches_the_child(bench: Bench, more: dict[str, Any], reason: str) -> None:
    """behaviour §10.46: as given, else the default text."""
    session, child = await bench.session(), bench.provider.child(holds_result=True)
    job_id = await bench.running_job(session, child)
    await session.call("job_kill", {"job_id": job_id, **more})
    assert status_of(await bench.settled(session, job_id)) == "killed"
    assert child.cancel_reasons == [reason]


async def test_another_stop_reason_fails_the_job_with_its_diagnostic(bench: Bench) -> None:
    """behaviour §10.47: and the partial text is kept (design §6)."""
    session = await bench.session()
    child = bench.provider.child(result=ended("half", stop_reason="max-tokens", diagnostic="cut at 100"))
    result = await bench.settled(session, await bench.job(session, child.in_background()))
    assert result.text == "half\n[status: failed, max-tokens; diagnostic: cut at 100]"


async def test_an_aborted_child_is_a_killed_job(bench: Bench) -> None:
    """behaviour §3.2: even if nobody killed it."""
    session, child = await bench.session(), bench.provider.child(result=ended(stop_reason="aborted"))
    result = await bench.settled(session, await bench.job(session, child.in_background()))
    assert result.text == "(no new output)\n[status: killed]"


@pytest.mark.parametrize(
    ("outcome", "status"), [(ended("done"), "completed"), (OSError("gone"), "failed")], ids=["success", "rejection"]
)
async def test_a_run_is_released_before_its_job_reports(
    bench: Bench, outcome: ChildResult | Exception, status: str
) -> None:
    """behaviour §10.48: whoever sees the outcome finds the run released."""
    session, child = await bench.session(), bench.provider.child(result=outcome)
    result = await bench.settled(session, await bench.job(session, child.in_background()))
    assert status_of(result) == status
    assert child.log == ["starting", "started", "result", "dispose"]


@pytest.mark.parametrize(
    ("outcome", "detail"),
    [
        (ended("done"), "dispose failed: OSError: port open"),
        (ended(stop_reason="refusal"), "refusal; dispose failed: OSError: port open"),
        (ValueError("no answer"), "ValueError: no answer; dispose failed: OSError: port open"),
    ],
    ids=["completed", "refused", "rejected"],
)
async def test_a_failed_release_fails_the_job(bench: Bench, outcome: ChildResult | Exception, detail: str) -> None:
    """behaviour §10.48, §3.2: behind what was said before."""
    session = await bench.session()
    child = bench.provider.child(result=outcome, dispose_error=OSError("port open"))
    job = job_of(await bench.settled(session, await bench.job(session, child.in_background())))
    assert (job["status"], job["detail"]) == ("failed", detail)


async def test_a_killed_run_whose_result_is_rejected_is_failed(bench: Bench) -> None:
    """behaviour §3.2: a fault after the start is an infrastructure fault, kill or not."""
    session = await bench.session()
    child = bench.provider.child(holds_result=True, when_cancelled=OSError("broken pipe"))
    job_id = await bench.running_job(session, child)
    await session.call("job_kill", {"job_id": job_id})
    job = job_of(await bench.settled(session, job_id))
    assert (job["status"], job["detail"]) == ("failed", "OSError: broken pipe")


async def test_a_killed_child_keeps_the_text_it_had(bench: Bench) -> None:
    """design §6: partial text is kept for background jobs too."""
    session = await bench.session()
    child = bench.provider.child(holds_result=True, when_cancelled=ended("half", stop_reason="aborted"))
    job_id = await bench.running_job(session, child)
    await session.call("job_kill", {"job_id": job_id})
    assert (await bench.settled(session, job_id)).text == "half\n[status: killed]"


async def test_a_job_outlives_the_host_that_started_it(bench: Bench) -> None:
    """design §6: another process reopens the session, and reads the job there."""
    child = bench.provider.child(holds_result=True)
    async with bench.kit.app.host() as host:
        session = await bench.session(host=host)
        job_id = await bench.running_job(session, child)
        await session.close()
    child.go_on.set()
    again = await bench.host.open_session(session.id)
    assert (await bench.settled(again, job_id)).text == "done\n[status: completed]"


async def test_a_repeated_background_call_is_the_same_job(bench: Bench) -> None:
    """design §4: one job, one child, before and after its end."""
    session, child = await bench.session(), bench.provider.child()
    first = await session.call("subagent", child.in_background(), call_id="c1")
    await bench.settled(session, job_id_of(first))
    assert await session.call("subagent", child.in_background(), call_id="c1") == first
    assert child.starts == 1


async def test_closing_with_cancel_ends_the_jobs(bench: Bench) -> None:
    """behaviour §3.8, design §6: on purpose, with the reason the contract gives; the children are released."""
    session, child = await bench.session(), bench.provider.child(holds_result=True)
    job_id = await bench.running_job(session, child)
    await session.close(cancel_jobs=True)
    again = await bench.host.open_session(session.id)
    # It has been waited for.
    assert status_of(await again.call("job_output", {"job_id": job_id})) == "killed"
    assert child.cancel_reasons == ["owner disposed"]


async def test_closing_leaves_the_jobs_alone(bench: Bench) -> None:
    """design §4: `cancel_jobs` is off unless asked for."""
    session, child = await bench.session(), bench.provider.child(holds_result=True)
    job_id = await bench.running_job(session, child)
    await session.close()
    again = await bench.host.open_session(session.id)
    assert status_of(await again.call("job_output", {"job_id": job_id})) == "running"
    child.go_on.set()
    assert status_of(await bench.settled(again, job_id)) == "completed"


async def test_a_settled_job_leaves_nothing_without_a_lifetime(bench: Bench) -> None:
    """P10: everything of it expires together with its record."""
    session, child = await bench.session(), bench.provider.child()
    job_id = await bench.job(session, child.in_background())
    await bench.settled(session, job_id)
    keys = Keys(bench.kit.app.settings.namespace)
    lifetimes = [
        await bench.kit.redis.ttl(name)
        for name in (keys.session(job_id), keys.transcript(job_id), f"celery-task-meta-{job_id}")
    ]
    retention_seconds = bench.kit.app.settings.retention_seconds
    assert all(retention_seconds - 10 < lifetime <= retention_seconds for lifetime in lifetimes)
