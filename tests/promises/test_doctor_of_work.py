"""What the doctor says of work that is left lying, and that `--fix` sees to it: the server as real crashes leave it."""

from __future__ import annotations

import asyncio

import pytest
from stage import MakeStage, Stage, start_job

from subagent_tasks.testing import call_tool, reply


@pytest.fixture(scope="module")
def stage(make_stage: MakeStage) -> Stage:
    return make_stage()


async def doctor(stage: Stage, *words: str) -> str:
    """What it prints; nobody serves the queues here, so it always fails."""
    said = await asyncio.to_thread(stage.run, "-m", "subagent_tasks", "doctor", *words, code=1, timeout_seconds=40)
    return " ".join(said.split())


async def test_runs_of_a_worker_that_died_alone_are_found_and_mended(make_stage: MakeStage) -> None:
    """P6, with no process left that sweeps."""
    stage = make_stage()
    [worker] = stage.ensure(1)
    stage.model.on("doctor-drives", [call_tool("hold", {"text": "doctor-drives"}), reply("never")])
    async with stage.session() as session:
        job_id = await start_job(session, "doctor-drives")
        await stage.noted("doctor-drives begun")
    worker.kill()
    driver = str(stage.redis.hget(stage.keys.session(job_id), "driver"))
    await stage.aged(driver)
    assert f"1 runs are left with processes that are gone: {driver}" in await doctor(stage)
    assert stage.state(job_id) == "driven"
    assert "left with processes" not in await doctor(stage, "--fix")
    assert stage.state(job_id) == "queued"


async def test_runs_whose_message_is_lost_are_found_and_mended(stage: Stage) -> None:
    """P1: accepted is durable."""
    async with stage.session() as session:
        job_id = await start_job(session, "doctor-messages")
    stage.redis.delete(stage.queue())
    stage.redis.zadd(stage.keys.queued(stage.queue()), {job_id: 1_000})
    assert "1 runs wait whose message is lost" in await doctor(stage)
    assert stage.redis.llen(stage.queue()) == 0
    assert "message is lost" not in await doctor(stage, "--fix")
    assert stage.redis.llen(stage.queue()) == 1


async def test_messages_of_another_app_in_our_queue_are_found(make_stage: MakeStage) -> None:
    """They are reported, and left where they are."""
    stage = make_stage()
    stage.redis.lpush(stage.queue(), '{"headers": {"task": "mail.send"}}')
    said = await doctor(stage, "agents:app", "--fix")
    assert f"{stage.queue()} holds messages of the task 'mail.send', which is not ours" in said
    assert stage.redis.llen(stage.queue()) == 1
