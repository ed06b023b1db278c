"""How long one no-op takes from call to result, one after another: ours in the foreground and as a job, beside raw
Celery's `apply_async().get()`.

The sides take turns, so that whatever else the machine does meets both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.raw import noop_task
from benchmarks.stage import CALL_SECONDS, Stage, call, collect, start_job

WARM_UP_CALLS = 20


@dataclass(frozen=True, slots=True)
class RoundTrips:
    """Milliseconds per call, by round."""

    foreground_ms: list[list[float]] = field(default_factory=list[list[float]])
    job_ms: list[list[float]] = field(default_factory=list[list[float]])
    start_ms: list[list[float]] = field(default_factory=list[list[float]])
    raw_ms: list[list[float]] = field(default_factory=list[list[float]])
    raw_start_ms: list[list[float]] = field(default_factory=list[list[float]])


async def measure_round_trips(stage: Stage, *, rounds: int, calls: int) -> RoundTrips:
    """`calls` of each kind in each of `rounds`, with one worker of ours and one of raw Celery."""
    found = RoundTrips()
    with stage.workers(ours=1, raw=1):
        await stage.wait_ready(ours=1, raw=1)
        async with stage.sessions() as (session,):

            async def job() -> tuple[float, float]:
                begun = time.perf_counter()
                job_id = await start_job(session)
                started = time.perf_counter()
                await collect(session, job_id)
                return (started - begun) * 1000, (time.perf_counter() - begun) * 1000

            await _repeat(lambda: call(session), WARM_UP_CALLS)
            await asyncio.to_thread(_raw_calls, stage, WARM_UP_CALLS)
            for _ in range(rounds):
                found.foreground_ms.append(await _repeat(lambda: call(session), calls))
                started, ended = zip(*[await job() for _ in range(calls)], strict=True)
                found.start_ms.append(list(started))
                found.job_ms.append(list(ended))
                started, ended = zip(*await asyncio.to_thread(_raw_calls, stage, calls), strict=True)
                found.raw_start_ms.append(list(started))
                found.raw_ms.append(list(ended))
    return found


async def _repeat(work: Callable[[], Awaitable[object]], count: int) -> list[float]:
    durations_ms: list[float] = []
    for _ in range(count):
        begun = time.perf_counter()
        await work()
        durations_ms.append((time.perf_counter() - begun) * 1000)
    return durations_ms


def _raw_calls(stage: Stage, count: int) -> list[tuple[float, float]]:
    """In a thread of its own: Celery's wait blocks, and our host's loop goes on beside it as it does in use."""
    task = noop_task(stage.raw)
    durations_ms: list[tuple[float, float]] = []
    for _ in range(count):
        begun = time.perf_counter()
        result: Any = task.apply_async()
        started = time.perf_counter()
        result.get(timeout=CALL_SECONDS)
        durations_ms.append(((started - begun) * 1000, (time.perf_counter() - begun) * 1000))
    return durations_ms
