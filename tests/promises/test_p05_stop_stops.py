"""P5: a kill reaches queued and running work, survives the death of workers, and no tool starts after it."""

from __future__ import annotations

import threading
import time

from stage import CONCURRENCY, WITHIN_TWO_LEASES_SECONDS, Stage, job, notices_of, start_job

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


async def test_celery_s_own_revoke_kills_a_running_job(stage: Stage) -> None:
    """Protocol §2: flag and ring, nothing stored by Celery. By its command line, with two workers that both hear it."""
    stage.ensure(2)
    stage.model.on("p5-revoke", [call_tool("hold", {"text": "p5-revoke"}), reply("never")])
    async with stage.session() as session:
        job_id = await start_job(session, "p5-revoke")
        await stage.noted("p5-revoke begun")
        answer = stage.run("-m", "celery", "-A", "agents", "control", "revoke", job_id)
        assert "kill requested" in answer
        [notice] = await notices_of(session, 1)
        assert (notice.sender_id, "[status: killed" in notice.text) == (job_id, True)
        assert stage.celery_state(job_id) == "REVOKED"


async def test_flower_s_terminate_kills_a_running_job(stage: Stage) -> None:
    """Protocol §2: what Flower sends, `revoke` with `terminate`."""
    stage.ensure(1)
    stage.model.on("p5-flower", [call_tool("hold", {"text": "p5-flower"}), reply("never")])
    async with stage.session() as session:
        job_id = await start_job(session, "p5-flower")
        await stage.noted("p5-flower begun")
        stage.app.celery.control.revoke(job_id, terminate=True, signal="SIGKILL")
        [notice] = await notices_of(session, 1)
        assert (notice.sender_id, "[status: killed" in notice.text) == (job_id, True)


async def test_celery_s_own_revoke_kills_a_queued_job(stage: Stage) -> None:
    """Protocol §2: the stock command would store REVOKED over a record that stays queued."""
    stage.ensure(1)
    slots = CONCURRENCY * len(stage.living)
    stage.model.on("p5-slots", [call_tool("hold", {"text": "p5-slots"}), reply("done")])
    stage.model.on("p5-queued", reply("never"))
    async with stage.session() as session:
        busy = [await start_job(session, "p5-slots") for _ in range(slots)]
        await wait_until(lambda: len(stage.notes("p5-slots begun")) == slots, description="all slots are taken")
        queued = await start_job(session, "p5-queued")
        stage.app.celery.control.revoke(queued)
        await wait_until(lambda: stage.state(queued) == "settled", description="it ended")
        assert (await job(session, queued))["job"]["status"] == "killed"
        stage.open_gate("p5-slots")
        for job_id in busy:
            await wait_until(lambda id=job_id: stage.state(id) == "settled", description="the others ended")
        await wait_until(lambda: stage.redis.llen(stage.queue()) == 0, description="its message was received")
        assert stage.asked("p5-queued") == []


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
