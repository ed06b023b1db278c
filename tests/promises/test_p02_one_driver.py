"""P2: at most one process starts an effect or commits a result for a run; a frozen one commits nothing."""

from __future__ import annotations

import threading

import redis
from stage import MakeStage, Stage, job, start_job

from broker_config import EmbeddedServer
from subagent_tasks.queue.message import activation_message
from subagent_tasks.queue.publisher import ACTIVATE
from subagent_tasks.testing import call_tool, reply, wait_for, wait_until


async def test_a_frozen_worker_can_only_finish_what_it_had_begun(stage: Stage) -> None:
    """P2, field fault 3: it sleeps through its lease, another one finishes, it wakes up."""
    stage.ensure(2)
    stage.model.on(
        "p2-a", [call_tool("hold", {"text": "p2-a"}), call_tool("note", {"text": "p2-a next"}), reply("the other's")]
    )
    async with stage.session() as session:
        job_id = await start_job(session, "p2-a")
        sleeper = stage.by_pid(await stage.noted("p2-a begun"))
        sleeper.freeze()
        await wait_until(lambda: stage.state(job_id) == "settled", description="the other worker finished it")
        before = stage.transcript(job_id)
        stage.open_gate("p2-a")
        sleeper.thaw()
        await wait_until(lambda: stage.notes("p2-a ended"), description="the announced effect is finished")
        await wait_until(lambda: "run lost to another worker" in sleeper.log, description="it gave the run up")
        assert stage.transcript(job_id) == before
        assert stage.notes("p2-a next") == ["p2-a next"]
        assert stage.note_pids("p2-a next") != [sleeper.pid]
        assert (await job(session, job_id))["text"] == "the other's"


async def test_a_worker_frozen_in_a_model_request_starts_nothing_when_it_wakes(stage: Stage) -> None:
    """P2: its answer arrives, its tool call is never announced. The other worker's one runs."""
    stage.ensure(2)
    gate = threading.Event()
    stage.model.on("p2-b", [wait_for(gate), call_tool("note", {"text": "p2-b"}), reply("the other's")])
    async with stage.session() as session:
        job_id = await start_job(session, "p2-b")
        await wait_until(lambda: len(stage.asked("p2-b")) == 1, description="the model is asked")
        sleeper = stage.by_pid(stage.driver_pid(job_id))
        sleeper.freeze()
        await wait_until(lambda: len(stage.asked("p2-b")) == 2, description="the other worker asks the model again")
        gate.set()
        await wait_until(lambda: stage.state(job_id) == "settled", description="the other worker finished it")
        sleeper.thaw()
        await wait_until(lambda: "run lost to another worker" in sleeper.log, description="it gave the run up")
        assert (len(stage.note_pids("p2-b")), sleeper.pid in stage.note_pids("p2-b")) == (1, False)


async def test_messages_delivered_again_start_nothing(stage: Stage) -> None:
    """Field fault 1: ten more deliveries of a running run's message, on two workers: the model is asked once."""
    stage.ensure(2)
    stage.model.on("p2-c", [call_tool("hold", {"text": "p2-c"}), reply("once")])
    async with stage.session() as session:
        job_id = await start_job(session, "p2-c")
        await stage.noted("p2-c begun")
        again = activation_message(task=ACTIVATE, task_id=job_id, run_id=job_id, queue=stage.queue())
        stage.redis.lpush(stage.queue(), *[again] * 10)
        await wait_until(lambda: stage.redis.llen(stage.queue()) == 0, description="all were received")
        assert len(stage.asked("p2-c")) == 1
        stage.open_gate("p2-c")
        await wait_until(lambda: stage.state(job_id) == "settled", description="it ended")
        assert stage.notes("p2-c") == ["p2-c begun", "p2-c ended"]


async def test_a_second_delivery_after_the_end_asks_no_model(stage: Stage) -> None:
    """Field fault 1: the late receipt."""
    stage.ensure(1)
    stage.model.on("p2-d", reply("once"))
    async with stage.session() as session:
        job_id = await start_job(session, "p2-d")
        await wait_until(lambda: stage.state(job_id) == "settled", description="it ended")
        again = activation_message(task=ACTIVATE, task_id=job_id, run_id=job_id, queue=stage.queue())
        stage.redis.lpush(stage.queue(), again)
        # Queues are first in, first out: once the next job ended, the late message was handled.
        other = await start_job(session, "p2-d")
        await wait_until(lambda: stage.state(other) == "settled", description="the next one ended")
        assert len(stage.asked("p2-d")) == 2


async def test_a_message_is_acknowledged_before_its_run_begins(
    make_stage: MakeStage, shared_server: EmbeddedServer, own_server: EmbeddedServer
) -> None:
    """Field fault 1: however long a run takes, Celery has nothing left that its visibility timeout could deliver again.

    Where broker and state are one server it keeps no such list at all.
    """
    stage = make_stage(url=own_server.url, environment={"SUBAGENT_TASKS_REDIS_URL": shared_server.url})
    stage.ensure(1)
    stage.model.on("p2-f", [call_tool("hold", {"text": "p2-f"}), reply("once")])
    async with stage.session() as session:
        job_id = await start_job(session, "p2-f")
        await stage.noted("p2-f begun")
        with redis.Redis.from_url(own_server.url) as broker:
            assert (broker.hlen("unacked"), broker.llen(stage.queue())) == (0, 0)
        stage.open_gate("p2-f")
        assert (await job(session, job_id, wait_ms=5000))["text"] == "once"


async def test_a_second_worker_gets_work_at_once(stage: Stage) -> None:
    """Field fault 5: no worker holds what it cannot start. Two at a time, twenty queued, all held by the model."""
    gate = threading.Event()
    stage.model.on("p2-e", [wait_for(gate), reply("done")])
    for worker in stage.living:
        worker.kill()
    stage.worker(concurrency=2).wait_ready()
    second = stage.worker(concurrency=2)
    second.freeze()
    async with stage.session() as one, stage.session() as two:
        for session in (one, two):
            for _ in range(10):
                await start_job(session, "p2-e")
        await wait_until(lambda: len(stage.asked("p2-e")) == 2, description="the first worker is full")
        assert stage.redis.llen(stage.queue()) == 18
        second.thaw()
        second.wait_ready()
        await wait_until(lambda: len(stage.asked("p2-e")) == 4, description="it has work", timeout_seconds=1)
        gate.set()
        await wait_until(lambda: set(stage.states()) == {"settled"}, description="all ended")
