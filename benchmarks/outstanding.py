"""How many results one host process can wait for at once: thousands of foreground calls, heard of over one connection.

All calls are made, and wait, before any worker runs, so that all are outstanding together; then one worker settles
them. When a run was settled its record says, in Redis time, which is this machine's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from benchmarks.stage import OUR_DATABASE, Stage, call
from subagent_tasks.host import Session
from subagent_tasks.protocol.keys import Keys
from subagent_tasks.testing import wait_until

OUR_CLIENTS = "subagent-tasks"
CALLS_AT_ONCE = 500
"""So many are made together; they all wait together. A command to Redis is bounded from when it is asked for, so a
greater burst would measure how fast the machine is."""

ADMISSION_SECONDS = 60.0
CALL_SECONDS = 120.0

_Call = asyncio.Task[tuple[str, float] | None]
"""Ends with the run's id and when its caller knew the result; with None if it failed."""


@dataclass(frozen=True, slots=True)
class Outstanding:
    """Out of `count` calls, how many came to their result, what the host held while all waited, and how long it took.

    `listening` counts pub/sub connections, `connections` all that bear our name; the first over the whole time.
    """

    count: int
    resolved: int
    listening: int
    connections: int
    wall_seconds: float
    settle_to_known_ms: list[float]
    last_settle_to_last_known_ms: float


async def measure_outstanding(stage: Stage, *, count: int) -> Outstanding:
    """`count` calls of one session, waiting together for one worker that starts when all of them wait."""
    async with stage.sessions() as (session,):
        begun = time.time()
        calls = await _all_wait(stage, session, count=count)
        # Without a worker, whoever is connected to our database is this host, or the benchmark's own client.
        clients = _clients(stage)
        with stage.workers(ours=1):
            ended = await asyncio.gather(*calls)
        listening = {client["id"] for client in [*clients, *_clients(stage)] if _listens(client)}
    known = dict(one for one in ended if one is not None)
    if not known:
        raise RuntimeError(f"none of {count} calls came to its result")
    settled = _settled(stage, list(known))
    return Outstanding(
        count=count,
        resolved=len(known),
        listening=len(listening),
        connections=sum(client["name"].startswith(OUR_CLIENTS) for client in clients),
        wall_seconds=max(known.values()) - begun,
        settle_to_known_ms=[(at - settled[run_id]) * 1000 for run_id, at in known.items()],
        last_settle_to_last_known_ms=(max(known.values()) - max(settled.values())) * 1000,
    )


async def _all_wait(stage: Stage, session: Session, *, count: int) -> list[_Call]:
    """Make the calls, and return once each is accepted, or has failed."""

    async def one() -> tuple[str, float] | None:
        try:
            return await call(session, timeout_seconds=CALL_SECONDS), time.time()
        except RuntimeError:
            return None  # one result less is a finding, and no reason to lose all others

    calls: list[_Call] = []
    while len(calls) < count:
        calls += [asyncio.create_task(one()) for _ in range(min(CALLS_AT_ONCE, count - len(calls)))]
        await _until_accepted(stage, session, calls)
    return calls


async def _until_accepted(stage: Stage, session: Session, calls: Sequence[_Call]) -> None:
    unsettled = Keys(stage.app.settings.namespace).unsettled(session.id)
    await wait_until(
        lambda: stage.redis.scard(unsettled) + sum(one.done() for one in calls) >= len(calls),
        description=f"{len(calls)} calls are accepted",
        timeout_seconds=ADMISSION_SECONDS,
    )


def _clients(stage: Stage) -> list[dict[str, str]]:
    clients = cast("list[dict[str, str]]", cast("Any", stage.redis).client_list())
    return [client for client in clients if client["db"] == str(OUR_DATABASE)]


def _listens(client: dict[str, str]) -> bool:
    return any(int(client.get(kind, 0)) for kind in ("sub", "psub", "ssub"))


def _settled(stage: Stage, run_ids: list[str]) -> dict[str, float]:
    """When each was settled, in seconds since the epoch."""
    keys = Keys(stage.app.settings.namespace)
    pipeline = stage.redis.pipeline(transaction=False)
    for run_id in run_ids:
        pipeline.hget(keys.session(run_id), "finished_at")
    return {run_id: int(cast("str", text)) / 1000 for run_id, text in zip(run_ids, pipeline.execute(), strict=True)}
