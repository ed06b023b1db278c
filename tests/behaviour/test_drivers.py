"""Workers that come and go under a run, and what the child's model is asked for. Each test has a worker of its own."""

from __future__ import annotations

import asyncio

from subagent_tasks import RunEnded, RunStarted
from subagent_tasks.protocol.keys import Keys
from subagent_tasks.providers import SpawnProvider
from subagent_tasks.testing import Kit, ScriptedModel, WorkerThread, fake_app, reply
from tests.behaviour.bench import foreground_value, job_id_of, run_id_of, status_of, until
from tests.behaviour.provider import Child, ScriptedProvider, ended


def resumable() -> ScriptedProvider:
    """A provider whose runs go on with another worker."""
    provider = ScriptedProvider()
    provider.resumable = True
    return provider


async def job(kit: Kit, child: Child) -> str:
    return job_id_of(await kit.session.call("subagent", child.in_background()))


async def ending(kit: Kit, job_id: str) -> str:
    """The job's status, once it has ended."""
    return status_of(await kit.session.call("job_output", {"job_id": job_id, "wait": True, "timeout_ms": 5000}))


async def test_an_explicit_token_limit_wins_over_the_providers() -> None:
    """behaviour §10.150: a parent session has no limit to inherit, so the deployment's stands in its place."""
    model = ScriptedModel()
    model.on("", reply("done"))
    provider = SpawnProvider(model, name="bounded", max_tokens=500)
    async with fake_app(providers=[provider], provider="bounded", worker=False) as kit:
        kit.app.add_delegation_tool(provider="bounded", tool_name="brief", agent_options={"max_tokens": 50})
        async with kit.app.host() as host:
            session = await host.open_session("parent")
            with WorkerThread(kit.app.celery):
                for name in ("subagent", "brief"):
                    assert (await session.call(name, {"description": "d", "prompt": "p"})).text == "done"
    assert [request.settings.get("max_tokens") for request in model.seen] == [500, 50]


async def test_an_accepted_run_goes_on_when_its_worker_leaves() -> None:
    """behaviour §10.154: the child at work is released there, and the next worker goes on with the run."""
    provider = resumable()
    child = provider.child(holds_result=True)
    async with fake_app(providers=[provider], provider="scripted", worker=False) as kit:
        calling = asyncio.create_task(kit.session.call("subagent", child.arguments()))
        with WorkerThread(kit.app.celery):
            await until(lambda: child.is_running, "the child runs")
        assert child.log == ["starting", "started", "cancel", "result", "dispose"]
        child.go_on.set()
        with WorkerThread(kit.app.celery):
            result = await calling
        assert result.value == foreground_value(run_id_of(result), "done")
        assert child.starts == 2


async def test_a_start_that_races_with_its_workers_end_creates_nothing_there() -> None:
    """behaviour §10.154: it is given up and cleaned up; one child is made, by the next worker."""
    provider = resumable()
    child = provider.child(holds_start=True)
    async with fake_app(providers=[provider], provider="scripted", worker=False) as kit:
        job_id = await job(kit, child)
        with WorkerThread(kit.app.celery):
            await until(lambda: child.starts == 1, "the start is under way")
        assert child.log == ["starting", "start cancelled"]
        child.go_on.set()
        with WorkerThread(kit.app.celery):
            assert await ending(kit, job_id) == "completed"
    assert child.log.count("started") == 1


async def test_a_child_that_is_handed_back_begins_and_ends_once() -> None:
    """behaviour §10.192: one pair, though one worker began the run and another one ended it."""
    provider, events = resumable(), list[RunStarted | RunEnded]()
    child = provider.child(holds_result=True)
    async with fake_app(providers=[provider], provider="scripted", worker=False) as kit:
        kit.app.on_event(events.append)
        job_id = await job(kit, child)
        with WorkerThread(kit.app.celery):
            await until(lambda: child.is_running, "the child runs")
        child.go_on.set()
        with WorkerThread(kit.app.celery):
            assert await ending(kit, job_id) == "completed"
            await until(lambda: len(events) == 2, "one start and one end")
    assert events == [
        RunStarted(events[0].run_id, "scripted", job_id, "test-session"),
        RunEnded(events[0].run_id, "scripted", job_id, "test-session", "completed"),
    ]


async def test_a_listing_shows_every_change_of_a_job() -> None:
    """behaviour §10.65: registered, running, stopping, settled, and gone when its record has expired."""
    provider = ScriptedProvider()
    child = provider.child(holds_result=True, ignores_cancel=True, result=ended(stop_reason="aborted"))
    async with fake_app(providers=[provider], provider="scripted", worker=False) as kit:

        async def listed() -> str:
            return (await kit.session.call("job_list", {})).text

        job_id = await job(kit, child)
        assert await listed() == f"{job_id} [subagent] queued — a task"
        with WorkerThread(kit.app.celery):
            await until(lambda: child.is_running, "the child runs")
            assert await listed() == f"{job_id} [subagent] running — a task"
            await kit.session.call("job_kill", {"job_id": job_id})
            assert await listed() == f"{job_id} [subagent] stopping — a task"
            child.go_on.set()
            assert await ending(kit, job_id) == "killed"
        assert await listed() == f"{job_id} [subagent] killed — a task"
        await kit.redis.pexpire(Keys(kit.app.settings.namespace).session(job_id), 1)

        async def is_gone() -> bool:
            return await listed() == "(no background jobs)"

        await until(is_gone, "the record has expired")
