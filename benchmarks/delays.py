"""How long the parts of a delegation take, with one worker: from the start call to the provider, from the child's
release to the notice in the parent's hands, from a kill to the notice of the killing.

Moments in the worker are its own (`Stamps`), in milliseconds Redis would be too coarse. "Settle" is stamped when the
provider has released the child, right before the settlement is sent: what is shown includes the settling script.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from benchmarks.noop import HOLD, STAMP
from benchmarks.stage import Stage, start_job
from subagent_tasks.host import Session
from subagent_tasks.testing import wait_until

NOTICE_SECONDS = 10.0
"""After this long, a kill counts as stuck."""

HELD_AT_ONCE = 30


@dataclass(frozen=True, slots=True)
class Delays:
    """Milliseconds, and how many kills were stuck."""

    start_to_claim_ms: list[float] = field(default_factory=list[float])
    settle_to_notice_ms: list[float] = field(default_factory=list[float])
    kill_to_stopped_ms: list[float] = field(default_factory=list[float])
    stuck_kills: list[str] = field(default_factory=list[str])


async def measure_delays(stage: Stage, *, jobs: int, kills: int) -> Delays:
    """`jobs` one after another, and `kills` of jobs that run, of which up to thirty are held at once."""
    found = Delays()
    with stage.workers(ours=1):
        await stage.wait_ready(ours=1)
        async with stage.sessions() as (session,), _Notices(session) as notices:
            await _one_by_one(stage, session, notices, jobs=jobs, found=found)
            for first in range(0, kills, HELD_AT_ONCE):
                await _kill_batch(stage, session, notices, count=min(HELD_AT_ONCE, kills - first), found=found)
    return found


async def _one_by_one(stage: Stage, session: Session, notices: _Notices, *, jobs: int, found: Delays) -> None:
    called: dict[str, float] = {}
    arrived: dict[str, float] = {}
    for _ in range(jobs):
        before = time.time()
        job_id = await start_job(session, STAMP)
        called[job_id] = before
        arrived[job_id] = await notices.of(job_id)
    started, released = stage.stamps.read("started"), stage.stamps.read("released")
    found.start_to_claim_ms.extend((started[job_id] - before) * 1000 for job_id, before in called.items())
    found.settle_to_notice_ms.extend((at - released[job_id]) * 1000 for job_id, at in arrived.items())


async def _kill_batch(stage: Stage, session: Session, notices: _Notices, *, count: int, found: Delays) -> None:
    held = [await start_job(session, HOLD) for _ in range(count)]
    await wait_until(lambda: stage.stamps.read("started").keys() >= set(held), description="the jobs run")
    for job_id in held:
        before = time.time()
        await session.kill(job_id)
        try:
            found.kill_to_stopped_ms.append((await notices.of(job_id) - before) * 1000)
        except TimeoutError:
            found.stuck_kills.append(job_id)


class _Notices:
    """Reads a session's notices as they come, and remembers when each did."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._arrivals: dict[str, asyncio.Future[float]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def of(self, job_id: str) -> float:
        """When the notice of that job arrived, in seconds since the epoch. Raises `TimeoutError` if it does not."""
        async with asyncio.timeout(NOTICE_SECONDS):
            return await asyncio.shield(self._arrival(job_id))

    async def __aenter__(self) -> _Notices:
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader

    async def _read(self) -> None:
        async with contextlib.aclosing(_closable(self._session)) as notices:
            async for arrived, sender_id in notices:
                self._arrival(sender_id).set_result(arrived)

    def _arrival(self, job_id: str) -> asyncio.Future[float]:
        return self._arrivals.setdefault(job_id, asyncio.get_running_loop().create_future())


async def _closable(session: Session) -> AsyncGenerator[tuple[float, str]]:
    async for notice in session.notices():
        yield time.time(), notice.sender_id
