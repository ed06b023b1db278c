"""Who owns a job: the session with that id, in whatever process it is open, and what becomes of work when it leaves."""

from __future__ import annotations

import asyncio

import pytest

from subagent_tasks import CallerError, RunStarted, Session
from subagent_tasks.protocol.ids import run_id_for_call
from tests.behaviour.bench import Bench, first_notices, job_id_of, pending_notices, status_of, until
from tests.behaviour.provider import Child, ScriptedProvider

LIMIT = "Error: background job limit reached for this owner (limit: 1)"


async def test_each_session_has_a_job_limit_of_its_own(bench: Bench) -> None:
    """behaviour §10.52: what one session holds takes nothing from another."""
    app = bench.other_app(max_active_jobs=1)
    app.add_delegation_tool(provider="scripted")
    app.add_job_tools()
    held = [bench.provider.child(holds_result=True) for _ in range(2)]
    async with app.host() as host:
        sessions = [await bench.session(host=host) for _ in held]
        jobs = [await bench.running_job(session, child) for session, child in zip(sessions, held, strict=True)]
        for session in sessions:
            refused = await session.call("subagent", held[0].in_background())
            assert refused.text.startswith(LIMIT)
        await release(bench, sessions, jobs, held)


async def test_a_reopened_session_still_holds_what_it_held(bench: Bench) -> None:
    """behaviour §10.52: it is the same owner, so its jobs count on, in another host too."""
    app = bench.other_app(max_active_jobs=1)
    app.add_delegation_tool(provider="scripted")
    app.add_job_tools()
    child, other = bench.provider.child(holds_result=True), bench.provider.child()
    async with app.host() as host:
        session = await bench.session(host=host)
        job_id = await bench.running_job(session, child)
    async with app.host() as host:
        again = await host.open_session(session.id)
        assert (await again.call("subagent", other.in_background())).text.startswith(LIMIT)
        await release(bench, [again], [job_id], [child])
    assert other.starts == 0


async def release(bench: Bench, sessions: list[Session], jobs: list[str], children: list[Child]) -> None:
    for session, job_id, child in zip(sessions, jobs, children, strict=True):
        child.go_on.set()
        await bench.settled(session, job_id)


async def test_a_closed_session_object_can_do_nothing_any_more(bench: Bench) -> None:
    """behaviour §10.62: though the session is open again under its id, whose new object can."""
    stale, child = await bench.session(), bench.provider.child(holds_result=True)
    job_id = await bench.running_job(stale, child)
    await stale.close()
    again = await bench.host.open_session(stale.id)
    closed = "the session is closed; open it again with host.open_session"
    for name, arguments in (("job_output", {"job_id": job_id}), ("job_kill", {"job_id": job_id}), ("job_list", {})):
        with pytest.raises(CallerError, match=closed):
            await stale.call(name, arguments)
    with pytest.raises(CallerError, match=closed):
        await stale.kill(job_id)
    assert status_of(await again.call("job_output", {"job_id": job_id})) == "running"
    await release(bench, [again], [job_id], [child])
    assert child.cancel_reasons == []


async def test_an_owner_that_leaves_with_its_jobs_ends_every_live_one(bench: Bench) -> None:
    """behaviour §10.63: the running ones through their workers, the queued ones there and then."""
    app = bench.other_app(providers=[bench.provider, ScriptedProvider("nobody", queue="nobody")])
    app.add_delegation_tool(provider="scripted")
    app.add_delegation_tool(provider="nobody", tool_name="nobodys")
    app.add_job_tools()
    child, ignored, done = bench.provider.child(holds_result=True), bench.provider.child(), bench.provider.child()
    async with app.host() as host:
        session = await bench.session(host=host)
        finished = await bench.job(session, done.in_background())
        await bench.settled(session, finished)
        running = await bench.running_job(session, child)
        queued = job_id_of(await session.call("nobodys", ignored.in_background()))
        await session.close(cancel_jobs=True)
        again = await host.open_session(session.id)
        assert [status_of(await bench.settled(again, job_id)) for job_id in (running, queued, finished)] == [
            "killed",
            "killed",
            "completed",
        ]
    assert child.cancel_reasons == ["owner disposed"]
    assert child.log[-1] == "dispose"


async def test_jobs_ended_by_a_closing_are_told_to_whoever_reopens_the_session(bench: Bench) -> None:
    """behaviour §10.63, P4: its model did not ask for their end, so it is told; their records stay readable."""
    session, child = await bench.session(), bench.provider.child(holds_result=True)
    job_id = await bench.running_job(session, child)
    await session.close(cancel_jobs=True)
    again = await bench.host.open_session(session.id)
    (notice,) = await first_notices(again, 1)
    assert (notice.sender_id, "[status: killed]" in notice.text) == (job_id, True)
    assert (await again.call("job_output", {"job_id": job_id})).text == "(no new output)\n[status: killed]"


async def test_a_notice_goes_to_the_session_wherever_it_is_open(bench: Bench) -> None:
    """behaviour §10.76: the owner is the id: a session reopened in another host gets it, no other session does."""
    child = bench.provider.child(holds_result=True)
    async with bench.kit.app.host() as host:
        session, other = await bench.session(host=host), await bench.session(host=host)
        job_id = await bench.running_job(session, child)
    again = await bench.host.open_session(session.id)
    child.go_on.set()
    assert [notice.sender_id for notice in await first_notices(again, 1)] == [job_id]
    assert await pending_notices(bench, other) == 0


async def test_a_notice_is_not_told_again_to_who_reopens_the_session(bench: Bench) -> None:
    """behaviour §10.76: what the owner acknowledged before it left is not news to its successor."""
    session, first, second = await bench.session(), bench.provider.child(), bench.provider.child()
    await bench.job(session, first.in_background())
    (notice,) = await first_notices(session, 1)
    await session.acknowledge(notice)
    await session.close()
    async with bench.kit.app.host() as host:
        again = await host.open_session(session.id)
        job_id = await bench.job(again, second.in_background())
        assert [notice.sender_id for notice in await first_notices(again, 1)] == [job_id]


async def test_a_closed_session_delegates_nothing(bench: Bench) -> None:
    """behaviour §10.153: a loud error, no child, no record, no event."""
    session, child, started = await bench.session(), bench.provider.child(), list[str]()
    bench.kit.app.on_event(lambda event: started.append(event.child_id) if event.parent_id == session.id else None)
    await session.close()
    for arguments in (child.arguments(), child.in_background()):
        with pytest.raises(CallerError, match="the session is closed"):
            await session.call("subagent", arguments, call_id="c1")
    again = await bench.host.open_session(session.id)
    with pytest.raises(CallerError, match="unknown child"):
        await anext(again.transcript(run_id(bench, session, "c1")))
    assert (child.starts, started) == (0, [])


async def test_a_host_that_stops_under_a_call_leaves_no_child(bench: Bench) -> None:
    """behaviour §10.153: the call ends with an error at once, and the start under way is given up and never told."""
    child, events = bench.provider.child(holds_start=True), list[object]()
    async with bench.kit.app.host() as host:
        session = await bench.session(host=host)
        bench.kit.app.on_event(lambda event: events.append(event) if event.parent_id == session.id else None)
        calling = asyncio.create_task(session.call("subagent", child.arguments(), call_id="c1"))
        await until(lambda: child.starts == 1, "the start is under way")
    ended = await calling
    assert (ended.is_error, ended.code) == (True, "HOST_STOPPED")
    await until(lambda: child.log == ["starting", "start cancelled"], "the start is given up")
    again = await bench.host.open_session(session.id)
    told = [event async for event in again.transcript(run_id(bench, session, "c1"), follow=True)]
    assert told[-1].data == {"status": "killed", "stopReason": "aborted"}
    assert not [event for event in events if isinstance(event, RunStarted)]


def run_id(bench: Bench, session: Session, call_id: str) -> str:
    """The id that a call's run has, or would have had."""
    namespace = bench.kit.app.settings.namespace
    return run_id_for_call(namespace=namespace, session_id=session.id, call_id=call_id)
