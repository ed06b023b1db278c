"""P10: after settlement and retention no key remains; none is without a lifetime or an owner. Retention is short."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
from stage import MakeStage, Stage, arguments, delegate, job, start_job

from broker_config import EmbeddedServer
from subagent_tasks.testing import call_tool, fail, reply, wait_for, wait_until

RETENTION_SECONDS = 2
RUN_SECONDS = 1.9
OF_SWEEPERS = ("clock", "expiring", "overtaken", "sweeper")
"""What the processes keep for their sweeping: each has a lifetime, and there is one of each."""
BINDINGS = "_kombu.binding"
"""Celery's own: one entry for each queue, kept on purpose."""


@pytest.fixture
def stage(make_stage: MakeStage, own_server: EmbeddedServer) -> Stage:
    """On a server of its own, so that every key there is can be looked at."""
    short = {
        "RETENTION_SECONDS": str(RETENTION_SECONDS),
        "VISIBILITY_TIMEOUT_SECONDS": str(RETENTION_SECONDS),
        **dict.fromkeys(
            ("RUN_LIMIT_SECONDS", "MODEL_REQUEST_TIMEOUT_SECONDS", "FIRST_EVENT_TIMEOUT_SECONDS"), str(RUN_SECONDS)
        ),
    }
    return make_stage(
        url=own_server.url, environment={f"SUBAGENT_TASKS_{name}": value for name, value in short.items()}
    )


async def test_every_kind_of_ending_leaves_nothing_behind(stage: Stage) -> None:
    """P10, field fault 21: completed, read, failed, killed, in a chain, never claimed, and lost with its worker."""
    [worker] = stage.ensure(1, concurrency=1)
    never = threading.Event()
    stage.model.on("p10-good", [call_tool("note", {"text": "p10"}), reply("good")])
    stage.model.on("p10-bad", fail(400))
    stage.model.on("p10-chain", [delegate("p10-good"), delegate("p10-good", background=True), reply("chained")])
    stage.model.on("p10-held", [wait_for(never), reply("never")])
    async with stage.session() as session:
        read = await start_job(session, "p10-good")
        await job(session, read, wait_ms=2000)
        running = await start_job(session, "p10-held")
        await wait_until(lambda: stage.state(running) == "driven", description="the only slot is taken")
        queued = await start_job(session, "p10-good")
        for job_id in (queued, running):
            await session.kill(job_id)
        await start_job(session, "p10-bad")
        await session.call("subagent", arguments("p10-chain"))
        assert len(stage.tree(session.id)) == 7
        lost = await start_job(session, "p10-held", tool="subagent_once")
        await wait_until(lambda: stage.state(lost) == "driven", description="it is driven")
        worker.kill()
        await wait_until(lambda: set(stage.states()) == {"settled"}, description="all ended")
        await wait_until(lambda: stage.redis.zcard(stage.keys.processes) == 1, description="only this host is known")
        assert stage.redis.exists(stage.keys.session(session.id), f"celery-task-meta-{lost}") == 2
    await wait_until(lambda: not left(stage), description="nothing is left")


def left(stage: Stage) -> list[str]:
    """Every key of the server, but those of the processes that have a lifetime and Celery's own."""
    server = cast("Any", stage.redis)
    names = cast("list[str]", sorted(server.scan_iter()))
    own = [f"{{{stage.namespace}}}:{kind}" for kind in OF_SWEEPERS]
    return [
        name
        for name in names
        if not name.startswith(BINDINGS) and not (name.startswith(tuple(own)) and server.ttl(name) > 0)
    ]
