"""Outages of the server while a child is at work (protocol §4): an outage is not a death; a long one costs a call."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from stage import MakeStage, Stage, job, start_job

from broker_config import EmbeddedServer
from subagent_tasks.agents.transcript import UNKNOWN_EFFECT
from subagent_tasks.testing import call_tool, reply, wait_until
from subagent_tasks.testing.faults import freeze_server

LEASE_SECONDS = 1.0
RECONNECT_SECONDS = 10.0
"""Celery waits two seconds, then four, between its attempts."""


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    """The server that goes away."""
    with EmbeddedServer() as running:
        yield running


@pytest.fixture(scope="module")
def stage(make_stage: MakeStage, server: EmbeddedServer) -> Stage:
    return make_stage(url=server.url, environment={"SUBAGENT_TASKS_LEASE_SECONDS": str(LEASE_SECONDS)})


async def silent_for(server: EmbeddedServer, leases: float) -> None:
    """Freeze the server for so long; by no shorter way does Redis time go on while nobody is answered."""
    with freeze_server(server):
        thaws_at = time.monotonic() + leases * LEASE_SECONDS
        await wait_until(lambda: time.monotonic() > thaws_at, description="the outage is over")


async def test_an_outage_longer_than_a_lease_takes_nothing_from_a_living_worker(
    stage: Stage, server: EmbeddedServer
) -> None:
    """Protocol §4: every heartbeat has lapsed when the server answers again, and yet nobody is taken for dead.

    The run may not resume: its host, which sweeps as well, would end it.
    """
    stage.ensure(1)
    stage.model.on("outage-a", [call_tool("hold", {"text": "outage-a"}), reply("the answer")])
    async with stage.session() as session:
        job_id = await start_job(session, "outage-a", tool="subagent_once")
        pid = await stage.noted("outage-a begun")
        await silent_for(server, 1.5)
        stage.open_gate("outage-a")
        assert (await job(session, job_id, wait_ms=5000))["text"] == "the answer"
        assert (stage.driver_pid(job_id), stage.notes("outage-a")) == (pid, ["outage-a begun", "outage-a ended"])


async def test_a_worker_that_is_not_answered_for_two_leases_lets_go(stage: Stage, server: EmbeddedServer) -> None:
    """Protocol §4: others may drive its runs by then. The call that was cut off has an unknown effect, as elsewhere."""
    [worker] = stage.ensure(1)
    stage.model.on("outage-b", [call_tool("hold", {"text": "outage-b"}), reply("went on")])
    async with stage.session() as session:
        job_id = await start_job(session, "outage-b")
        await stage.noted("outage-b begun")
        with freeze_server(server):
            await wait_until(
                lambda: f"run lost to another worker run_id={job_id}" in worker.log, description="it let go"
            )
        assert (await job(session, job_id, wait_ms=5000))["text"] == "went on"
        assert stage.notes("outage-b") == ["outage-b begun"]
        assert UNKNOWN_EFFECT in stage.model.seen[-1].messages[-1].text


async def test_a_busy_worker_consumes_again_after_a_restart_of_the_server(stage: Stage, server: EmbeddedServer) -> None:
    """Field fault 9: within ten seconds; what it was at goes on meanwhile, and is done once."""
    stage.ensure(1)
    stage.model.on("outage-c", [call_tool("hold", {"text": "outage-c"}), reply("held out")])
    stage.model.on("outage-d", reply("awake"))
    async with stage.session() as session:
        busy = await start_job(session, "outage-c")
        await stage.noted("outage-c begun")
        server.restart()
        new = await start_job(session, "outage-d")
        await wait_until(
            lambda: stage.state(new) == "settled", description="it consumes again", timeout_seconds=RECONNECT_SECONDS
        )
        stage.open_gate("outage-c")
        assert (await job(session, busy, wait_ms=5000))["text"] == "held out"
        assert stage.notes("outage-c") == ["outage-c begun", "outage-c ended"]
