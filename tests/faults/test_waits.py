"""Waits over faults (P8): a wait that ends is no ending of its job, and a server that restarts costs a wait nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
import redis

from broker_config import BrokerSettings, EmbeddedServer
from subagent_tasks.app import SubagentApp
from subagent_tasks.store.doorbell import Doorbell
from subagent_tasks.testing import (
    FaultyServer,
    Kit,
    ScriptedModel,
    WorkerThread,
    end_outage,
    fake_app,
    reply,
    restart_server,
    wait_for,
    wait_until,
)

JOB = {"description": "a task", "prompt": "say hello", "run_in_background": True}
SLACK_SECONDS = 2.0


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    """A real server that the test restarts."""
    with EmbeddedServer() as server:
        yield server


async def start_job(kit: Kit) -> str:
    return str(cast("dict[str, Any]", (await kit.session.call("subagent", JOB)).value)["jobId"])


async def read(kit: Kit, job_id: str, *, wait_ms: int) -> str:
    result = await kit.session.call("job_output", {"job_id": job_id, "wait": True, "timeout_ms": wait_ms})
    return result.text


async def test_a_wait_that_runs_out_leaves_job_and_notice_alone(server: str) -> None:
    """Field fault 19: it says `running`, and the ending is told all the same."""
    gate, model = asyncio.Event(), ScriptedModel()
    model.on("hello", [wait_for(gate), reply("hi there")])
    async with fake_app(model, url=server) as kit:
        job_id = await start_job(kit)
        await wait_until(lambda: model.requests, description="the child asks its model")
        assert await read(kit, job_id, wait_ms=50) == "(no new output)\n[status: running]"
        gate.set()
        notice = await asyncio.wait_for(anext(aiter(kit.session.notices())), 5)
        assert (notice.sender_id, "[status: completed]" in notice.text) == (job_id, True)


async def test_a_queued_an_expired_and_an_unknown_job_are_told_apart(server: str) -> None:
    """Field fault 24: three answers, for as long again as records are kept."""
    model = ScriptedModel()
    model.on("hello", reply("hi there"))
    async with fake_app(model, url=server, worker=False) as kit:
        gone = await start_job(kit)
        with WorkerThread(kit.app.celery):
            await asyncio.wait_for(anext(aiter(kit.session.notices())), 5)
        keys, redis_client = kit.host.process.keys, cast("Any", kit.redis)
        # As if its retention were over, and no more than that.
        await redis_client.delete(keys.session(gone), keys.transcript(gone))
        [(entry, forgotten_at_ms)] = await redis_client.zrange(keys.expiring, 0, -1, withscores=True)
        await redis_client.zadd(keys.expiring, {entry: forgotten_at_ms - 1000 * kit.app.settings.retention_seconds})
        await end_outage(kit.redis, keys)
        assert (await kit.host.process.sweeper.sweep_once()).ran
        queued = await start_job(kit)
        answers = [await kit.session.call("job_output", {"job_id": job_id}) for job_id in (queued, gone, "never")]
        assert [(answer.text, answer.code) for answer in answers] == [
            ("(no new output)\n[status: queued]", None),
            (
                f"Error: unknown job {gone}: this job has ended, and its record has expired; "
                "it cannot be read any more",
                "UNKNOWN_JOB",
            ),
            ("Error: unknown job never", "UNKNOWN_JOB"),
        ]
        await kit.session.kill(queued)


async def test_a_wait_over_a_restart_of_the_server_ends_at_its_time(own_server: EmbeddedServer) -> None:
    """Field fault 10: with the state, and never an unbounded wait for a result."""
    async with fake_app(ScriptedModel(), url=own_server.url, worker=False) as kit:
        job_id = await start_job(kit)
        started_at = time.monotonic()
        waiting = asyncio.ensure_future(read(kit, job_id, wait_ms=1000))
        await asyncio.to_thread(restart_server, own_server)
        assert await waiting == "(no new output)\n[status: queued]"
        assert 1 <= time.monotonic() - started_at < 1 + SLACK_SECONDS
        await kit.session.kill(job_id)


async def test_a_wait_reads_the_ending_that_it_was_cut_off_from(bundled_server_url: str) -> None:
    """Field fault 10: the subscription comes back by itself. With so long a lease nobody looks again on his own."""
    settings = {"lease_seconds": 60}
    with FaultyServer(bundled_server_url) as faulty:
        async with fake_app(ScriptedModel(), url=faulty.url, settings=settings, worker=False) as kit:
            job_id = await start_job(kit)
            waiting = asyncio.ensure_future(read(kit, job_id, wait_ms=30_000))
            await wait_until(lambda: kit.host.process.waiting.is_expected(job_id), description="it waits")
            faulty.refuse()
            here = kit.app.settings.model_copy(update={"broker_url": bundled_server_url})
            async with SubagentApp(here).host() as other:
                await (await other.open_session(kit.session.id)).kill(job_id)
            faulty.heal()
            assert await asyncio.wait_for(waiting, 5) == "(no new output)\n[status: killed]"


async def test_a_listener_that_hears_nothing_for_long_keeps_its_connection(
    bundled_server_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Field fault 11: no read timeout of a client cuts off who merely waits, and nothing is logged meanwhile."""
    heard: list[str | None] = []
    doorbell = Doorbell(BrokerSettings(broker_url=bundled_server_url, redis_timeout_seconds=0.2))
    try:
        with caplog.at_level(logging.DEBUG, "subagent_tasks"), redis.Redis.from_url(bundled_server_url) as client:
            await doorbell.listen("channel", heard.append)
            [before] = connections(client)

            def has_waited() -> bool:
                return int(connections(client)[0]["age"]) >= 2

            await wait_until(has_waited, description="it has waited for ten read timeouts")
            client.publish("channel", "at last")
            await wait_until(lambda: heard, description="it is heard")
            assert [connection["id"] for connection in connections(client)] == [before["id"]]
    finally:
        await doorbell.close()
    assert (heard, caplog.records) == (["at last"], [])


def connections(client: redis.Redis) -> list[dict[str, str]]:
    """The doorbell's connections, as the server sees them."""
    return [connection for connection in client.client_list() if connection["name"] == "subagent-tasks-doorbell"]
