"""P5: a kill reaches queued and running work, survives the death of workers, and no tool starts after it."""

from __future__ import annotations

import threading
import time

import pytest
from stage import WITHIN_TWO_LEASES_SECONDS, MakeStage, Stage, job, notices_of, start_job

from subagent_tasks.testing import call_tool, reply, wait_for, wait_until


async def test_no_tool_starts_after_a_kill(stage: Stage) -> None:
    """P5: the model answers after the kill with a tool call."""
    stage.ensure(1)
    gate = threading.Event()
    stage.model.on("p5-a", [wait_for(gate), call_tool("note", {"text": "p5-a"}), reply("too late")])
    async with stage.session() as session:
        job_id = await start_job(session, "p5-a")
        await wait_until(lambda: stage.asked("p5-a"), description="the model is asked")
        await session.kill(job_id, "no longer needed")
        gate.set()
        await wait_until(lambda: stage.state(job_id) == "settled", description="it ended")
        assert (await job(session, job_id))["job"]["status"] == "killed"
        assert stage.notes("p5-a") == []


async def test_a_kill_ends_a_tool_that_runs(stage: Stage) -> None:
    """P5: at once, through the doorbell, long before a lease is over."""
    stage.ensure(1)
    stage.model.on("p5-b", [call_tool("hold", {"text": "p5-b"}), reply("never")])
    async with stage.session() as session:
        job_id = await start_job(session, "p5-b")
        await stage.noted("p5-b begun")
        killed_at = time.monotonic()
        await session.kill(job_id)
        await wait_until(lambda: stage.state(job_id) == "settled", description="it ended")
        assert time.monotonic() - killed_at < 0.5
        assert stage.notes("p5-b") == ["p5-b begun"]


async def test_a_kill_is_kept_for_a_frozen_worker(stage: Stage) -> None:
    """P5, field fault 15: the doorbell rings while nobody listens; whoever drives it next ends it."""
    stage.ensure(2)
    stage.model.on(
        "p5-c", [call_tool("hold", {"text": "p5-c"}), call_tool("note", {"text": "p5-c on"}), reply("never")]
    )
    async with stage.session() as session:
        job_id = await start_job(session, "p5-c")
        sleeper = stage.by_pid(await stage.noted("p5-c begun"))
        sleeper.freeze()
        result = await session.kill(job_id, "stop it")
        assert "requested cancellation" in result.text
        await wait_until(lambda: stage.state(job_id) == "settled", description="it ended")
        stage.open_gate("p5-c")
        sleeper.thaw()
        await wait_until(lambda: stage.notes("p5-c ended"), description="the announced effect is finished")
        assert (await job(session, job_id))["job"]["status"] == "killed"
        assert stage.notes("p5-c on") == []


@pytest.mark.parametrize("words", [("revoke",), ("terminate", "SIGTERM")], ids=["revoke", "terminate"])
async def test_celery_s_own_revoke_kills_a_running_job(stage: Stage, words: tuple[str, ...]) -> None:
    """Protocol §2: flag and ring, nothing stored by Celery. With two workers, since each sees the command."""
    stage.ensure(2)
    name = f"p5-{words[0]}"
    stage.model.on(name, [call_tool("hold", {"text": name}), reply("never")])
    async with stage.session() as session:
        job_id = await start_job(session, name)
        await stage.noted(f"{name} begun")
        answer = stage.run("-m", "celery", "-A", "agents", "control", *words, job_id)
        assert "kill requested" in answer
        [notice] = await notices_of(session, 1)
        assert (notice.sender_id, "[status: killed" in notice.text) == (job_id, True)
        assert stage.app.celery.AsyncResult(job_id).state == "REVOKED"


async def test_celery_s_own_revoke_kills_a_queued_job(make_stage: MakeStage) -> None:
    """Protocol §2: the stock command would store REVOKED over a record that stays queued."""
    stage = make_stage()
    stage.worker(concurrency=1).wait_ready()
    stage.model.on("p5-first", [call_tool("hold", {"text": "p5-first"}), reply("first")])
    stage.model.on("p5-queued", reply("never"))
    async with stage.session() as session:
        first = await start_job(session, "p5-first")
        await stage.noted("p5-first begun")
        queued = await start_job(session, "p5-queued")
        assert (await job(session, queued))["job"]["status"] == "queued"
        stage.run("-m", "celery", "-A", "agents", "control", "revoke", queued)
        await wait_until(lambda: stage.state(queued) == "settled", description="it ended")
        assert (await job(session, queued))["job"]["status"] == "killed"
        stage.open_gate("p5-first")
        await wait_until(lambda: stage.state(first) == "settled", description="the other one ended")
        await wait_until(lambda: stage.redis.llen(stage.queue()) == 0, description="its message was received")
        assert stage.asked("p5-queued") == []


async def test_inspect_shows_what_runs_and_hides_what_it_is_about(stage: Stage) -> None:
    """Design §4, P14: `celery inspect active` works on the declaration, which holds both `app` and `celery`."""
    stage.ensure(1)
    stage.model.on("p5-shown", [call_tool("hold", {"text": "p5-shown"}), reply("seen")])
    async with stage.session() as session:
        job_id = await start_job(session, "p5-shown")
        await stage.noted("p5-shown begun")
        shown = stage.run("-m", "celery", "-A", "agents", "inspect", "active", "--json")
        assert (job_id in shown, "p5-shown" in shown) == (True, False)
        stage.open_gate("p5-shown")
        await wait_until(lambda: stage.state(job_id) == "settled", description="it ended")


async def test_a_kill_whose_worker_is_dead_ends_the_job(stage: Stage) -> None:
    """P5, P6: no worker is left; the host that asked finds the dead one and settles what it asked for."""
    stage.ensure(1)
    stage.model.on("p5-dead", [call_tool("hold", {"text": "p5-dead"}), reply("never")])
    async with stage.session() as session:
        job_id = await start_job(session, "p5-dead")
        await stage.noted("p5-dead begun")
        for worker in stage.living:
            worker.kill()
        killed_at = time.monotonic()
        await session.kill(job_id, "its worker is gone")
        [notice] = await notices_of(session, 1)
        assert time.monotonic() - killed_at < WITHIN_TWO_LEASES_SECONDS
        assert (notice.sender_id, "[status: killed" in notice.text) == (job_id, True)


async def test_a_job_killed_while_no_worker_runs_never_starts(stage: Stage) -> None:
    """P5, field fault 15: settled at once; the worker that starts later finds nothing to do."""
    for worker in stage.living:
        worker.kill()
    stage.model.on("p5-none", reply("never"))
    stage.model.on("p5-after", reply("after"))
    async with stage.session() as session:
        killed = await start_job(session, "p5-none")
        await session.kill(killed)
        assert (await job(session, killed))["job"]["status"] == "killed"
        after = await start_job(session, "p5-after")
        stage.ensure(1)
        await wait_until(lambda: stage.state(after) == "settled", description="the one behind it ended")
        assert stage.asked("p5-none") == []
