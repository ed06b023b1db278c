"""How many no-ops per second two worker processes get through: a backlog drained, and calls made live by one client.

A drain is measured by the moments at which the results were written, between 15 % and 95 % of them, so that neither the
workers' start nor the last stragglers count. Nothing reads the server meanwhile but a look at the queue's length.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast

from benchmarks.machine import group_cpu_seconds
from benchmarks.raw import QUEUE, noop_task
from benchmarks.samples import rate_between
from benchmarks.stage import CALL_SECONDS, Stage, call, start_job
from subagent_tasks.protocol.keys import Keys
from subagent_tasks.testing.processes import WorkerProcess

OUR_WORKERS = 2
SESSIONS = 4
ADMITTING = 32
DRAIN_SECONDS = 120.0
LOOK_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time of one no-op in all worker processes together and in the server; nan where it cannot be read."""

    worker_cpu_ms: float
    server_cpu_ms: float


@dataclass(frozen=True, slots=True)
class Rates:
    """No-ops per second by round, and what one of them cost."""

    ours: list[float] = field(default_factory=list[float])
    raw: list[float] = field(default_factory=list[float])
    our_cpu: list[Cost] = field(default_factory=list["Cost"])
    raw_cpu: list[Cost] = field(default_factory=list["Cost"])


async def measure_drain(stage: Stage, *, rounds: int, count: int) -> Rates:
    """A backlog of `count`, drained by two processes of ours; then by raw Celery's two; `rounds` times."""
    rates = Rates()
    for _ in range(rounds):
        await _drain_ours(stage, rates, count=count)
        await asyncio.to_thread(_drain_raw, stage, rates, count=count)
    return rates


async def measure_live(stage: Stage, *, rounds: int, count: int, in_flight: int) -> Rates:
    """`count` calls with `in_flight` of them under way, from one client process, awaited to their results."""
    rates = Rates()
    with stage.workers(ours=OUR_WORKERS, raw=1):
        await stage.wait_ready(ours=OUR_WORKERS, raw=1)
        async with stage.sessions() as (session,):
            for _ in range(rounds):
                slots = asyncio.Semaphore(in_flight)

                async def one(slots: asyncio.Semaphore = slots) -> None:
                    async with slots:
                        await call(session)

                begun = time.perf_counter()
                await asyncio.gather(*(one() for _ in range(count)))
                rates.ours.append(count / (time.perf_counter() - begun))
                begun = time.perf_counter()
                await asyncio.to_thread(_raw_live, stage, count=count, in_flight=in_flight)
                rates.raw.append(count / (time.perf_counter() - begun))
    return rates


async def _drain_ours(stage: Stage, rates: Rates, *, count: int) -> None:
    async with stage.sessions(SESSIONS) as sessions:
        slots = asyncio.Semaphore(ADMITTING)

        async def admit(number: int) -> str:
            async with slots:
                return await start_job(sessions[number % SESSIONS])

        run_ids = await asyncio.gather(*(admit(number) for number in range(count)))
        owners = [session.id for session in sessions]
    # The host has left: what follows is workers and server alone.
    await asyncio.to_thread(_drain_admitted, stage, rates, run_ids, owners)


def _drain_admitted(stage: Stage, rates: Rates, run_ids: Sequence[str], owners: Sequence[str]) -> None:
    keys = Keys(stage.app.settings.namespace)

    def left() -> int:
        return sum(stage.redis.scard(keys.unsettled(owner)) for owner in owners)

    with stage.workers(ours=OUR_WORKERS) as (workers, _):
        looks = _watch(stage, workers, left=left, side="our")
    pipeline = stage.redis.pipeline(transaction=False)
    for run_id in run_ids:
        pipeline.hget(keys.session(run_id), "finished_at")
    rates.ours.append(rate_between([int(cast("str", text)) / 1000 for text in pipeline.execute()]))
    rates.our_cpu.append(_cost(looks))


def _drain_raw(stage: Stage, rates: Rates, *, count: int) -> None:
    task = noop_task(stage.raw)
    names = [f"celery-task-meta-{task.apply_async().id}" for _ in range(count)]
    # As above, the client leaves: otherwise every result is also sent to a connection that nobody reads.
    cast("Any", stage.raw.backend).result_consumer.stop()

    def left() -> int:
        waiting = stage.raw_redis.llen(QUEUE)
        return waiting or count - stage.raw_redis.exists(*names)

    with stage.workers(raw=1) as (_, workers):
        looks = _watch(stage, workers, left=left, side="raw Celery's")
    stored = [json.loads(text) for text in cast("list[str]", stage.raw_redis.mget(names))]
    stage.raw_redis.delete(*names)
    rates.raw.append(rate_between([datetime.fromisoformat(meta["date_done"]).timestamp() for meta in stored]))
    rates.raw_cpu.append(_cost(looks))


def _raw_live(stage: Stage, *, count: int, in_flight: int) -> None:
    task = noop_task(stage.raw)
    under_way: deque[Any] = deque()
    for _ in range(count):
        if len(under_way) == in_flight:
            under_way.popleft().get(timeout=CALL_SECONDS)
        under_way.append(task.apply_async())
    while under_way:
        under_way.popleft().get(timeout=CALL_SECONDS)


@dataclass(frozen=True, slots=True)
class _Look:
    left: int
    worker_seconds: float
    server_seconds: float


def _watch(stage: Stage, workers: Sequence[WorkerProcess], *, left: Callable[[], int], side: str) -> list[_Look]:
    """Look now and then until nothing is left. Raises `RuntimeError` when that takes too long."""
    deadline = time.monotonic() + DRAIN_SECONDS
    looks: list[_Look] = []
    while not looks or looks[-1].left:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{side} backlog was not drained within {DRAIN_SECONDS:g} s: {looks[-1].left} left")
        time.sleep(LOOK_SECONDS)
        looks.append(
            _Look(
                left(),
                sum(group_cpu_seconds(worker.pid) for worker in workers),
                group_cpu_seconds(stage.server.pid),
            )
        )
    return looks


def _cost(looks: Sequence[_Look]) -> Cost:
    """Per no-op, between the looks nearest to 15 % and 95 % done: the imports at the start do not count."""
    backlog = max(look.left for look in looks)
    first = min(looks, key=lambda look: abs(look.left - 0.85 * backlog))
    last = min(looks, key=lambda look: abs(look.left - 0.05 * backlog))
    done = max(first.left - last.left, 1)
    return Cost(
        worker_cpu_ms=(last.worker_seconds - first.worker_seconds) * 1000 / done,
        server_cpu_ms=(last.server_seconds - first.server_seconds) * 1000 / done,
    )
