"""P1: once a call returned an id, no crash of host, worker or broker loses the work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from stage import WITHIN_TWO_LEASES_SECONDS, MakeStage, Stage, delegate, job, start_job

from broker_config import EmbeddedServer
from subagent_tasks.queue.publisher import BrokerPublisher
from subagent_tasks.testing import reply, wait_until

# A host process that dies, without a word, right after the call returned.
DYING_HOST = """
import asyncio, os, sys
from agents import app
async def main():
    async with app.host() as host:
        session = await host.open_session(sys.argv[1])
        arguments = {"description": "a task", "prompt": sys.argv[2], "run_in_background": True}
        result = await session.call("subagent", arguments, call_id="c1")
        print(result.value["jobId"], flush=True)
        os._exit(0)
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def mortal() -> Iterator[EmbeddedServer]:
    """A server that tests kill and start again."""
    with EmbeddedServer() as running:
        yield running


@pytest.fixture(scope="module")
def own_stage(make_stage: MakeStage, mortal: EmbeddedServer) -> Stage:
    return make_stage(url=mortal.url)


async def test_a_job_outlives_the_host_that_started_it(stage: Stage) -> None:
    """P1: a delegation from a second process, which dies at once; a third one reads the result, as does Celery."""
    stage.ensure(1)
    stage.model.on("p1-host", reply("for whoever asks"))
    job_id = stage.run("-c", DYING_HOST, "p1-host", "p1-host").strip()
    async with stage.session("p1-host") as session:
        await wait_until(lambda: stage.state(job_id) == "settled", description="it ended")
        assert (await job(session, job_id))["text"] == "for whoever asks"
    assert stage.app.celery.AsyncResult(job_id).get(timeout=5)["runId"] == job_id


async def test_accepted_work_outlives_a_kill_of_the_server(own_stage: Stage, mortal: EmbeddedServer) -> None:
    """P1, with persistence on: accepted while no worker ran, then kill -9 of the server."""
    own_stage.model.on("p1-server", reply("kept"))
    async with own_stage.session("p1") as session:
        job_id = await start_job(session, "p1-server")
    mortal.kill()
    mortal.start()
    own_stage.ensure(1)
    async with own_stage.session("p1") as session:
        assert (await job(session, job_id, wait_ms=5000))["text"] == "kept"


async def test_an_idle_worker_consumes_again_after_a_restart_of_the_server(
    own_stage: Stage, mortal: EmbeddedServer
) -> None:
    """Field fault 9: within ten seconds, ping or no ping."""
    own_stage.model.on("p1-idle", reply("awake"))
    own_stage.ensure(1)
    mortal.restart()
    async with own_stage.session() as session:
        job_id = await start_job(session, "p1-idle")
        # Celery waits two seconds, then four, between its attempts to reconnect.
        await wait_until(lambda: own_stage.state(job_id) == "settled", description="it ended", timeout_seconds=10)


async def test_a_message_that_died_with_its_worker_is_sent_again(stage: Stage) -> None:
    """P1: it was handed to a worker that never read it, so no queue and no record of Celery's holds it."""
    sleeper, *_ = stage.ensure(1)
    stage.model.on("p1-lost", reply("found"))
    sleeper.freeze()
    async with stage.session() as session:
        job_id = await start_job(session, "p1-lost")
        assert (stage.redis.llen(stage.queue()), stage.redis.hlen("unacked")) == (0, 0)
        sleeper.kill()
        killed_at = time.monotonic()
        await wait_until(lambda: stage.redis.llen(stage.queue()) == 1, description="the host sent it again")
        assert time.monotonic() - killed_at < WITHIN_TWO_LEASES_SECONDS
        stage.ensure(1)
        await wait_until(lambda: stage.state(job_id) == "settled", description="it ended")


@pytest.fixture
def split(make_stage: MakeStage, shared_server: EmbeddedServer, own_server: EmbeddedServer) -> Stage:
    """Broker and state are two servers: the message is sent right after the move, and may be lost in between."""
    # A short lease: what counts as overtaken is two leases old.
    environment = {"SUBAGENT_TASKS_REDIS_URL": shared_server.url, "SUBAGENT_TASKS_LEASE_SECONDS": "1"}
    stage = make_stage(url=own_server.url, environment=environment)
    stage.model.on("p1-split", reply("over there"))
    return stage


async def test_the_broker_may_be_another_server_than_the_state(split: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protocol §1, §4: a message that was never sent is found lost once a later one was claimed."""
    split.ensure(1)
    async with split.session() as session:
        with monkeypatch.context() as patch:
            patch.setattr(BrokerPublisher, "publish", _lose)
            lost = await start_job(session, "p1-split")
        later = await start_job(session, "p1-split")
        assert (await job(session, later, wait_ms=5000))["text"] == "over there"
        await wait_until(lambda: split.state(lost) == "settled", description="the lost one was sent again")
        assert split.redis.exists(split.queue()) == 0


async def test_a_kill_from_the_command_line_sends_its_owner_on_over_the_broker(split: Stage) -> None:
    """Protocol §1: the ending of what a suspended child waits for queues the child, whoever ended it."""
    split.ensure(1, providers=("spawn",))
    split.model.on("p1-owner", [delegate("p1-killed", tool="subagent_apart"), reply("goes on")])
    async with split.session() as session:
        job_id = await start_job(session, "p1-owner")
        await wait_until(lambda: split.state(job_id) == "suspended", description="the child waits")
        (_, own) = split.tree(session.id)
        # Nobody sweeps: what is not sent by the command is not sent.
        split.redis.set(split.keys.sweeper, "nobody")
        await asyncio.to_thread(split.run, "-m", "subagent_tasks", "kill", own["id"])
        assert (await job(session, job_id, wait_ms=5000))["text"] == "goes on"
        assert split.redis.exists(split.queue()) == 0
        split.redis.delete(split.keys.sweeper)


async def test_work_accepted_while_the_broker_is_away_is_sent_once_it_is_back(
    split: Stage, own_server: EmbeddedServer
) -> None:
    """P1: the call returns an id, since the record is durable; nothing that comes later has to uncover it."""
    async with split.session() as session:
        own_server.kill()
        job_id = await start_job(session, "p1-split")
        own_server.start()
        split.ensure(1)
        assert (await job(session, job_id, wait_ms=5000))["text"] == "over there"


async def _lose(*_: object, **__: object) -> None:
    """What a host does that dies before it sends."""
