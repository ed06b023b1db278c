"""The runs that a child starts and waits for while it is driven: what makes waiting cost no slot (P11, protocol §3).

A child that can only wait is suspended: everything its calls wait for is named to the `suspend` move, and the drive
ends. The next drive makes the same calls again, finds the same runs by their ids, and reads what has settled. While
something else of the child runs in this process, the waits are held here instead.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from broker_config import BrokerSettings
from subagent_tasks.delegation import Delegation
from subagent_tasks.drive import LeasedDrive, persist
from subagent_tasks.errors import BrokerUnavailable, DriveStopped
from subagent_tasks.protocol.models import Mode, Outcome
from subagent_tasks.protocol.records import RunSpec
from subagent_tasks.waiting import Waiting

T = TypeVar("T")

LISTEN_AFTER_SECONDS = 0.05
"""Calls of one message are mostly all waiting within moments; hearing of endings meanwhile costs a subscription."""


@dataclass(slots=True, eq=False)
class _Wait:
    call_id: str
    run_id: str
    until_ms: int | None
    future: asyncio.Future[Outcome | None]


class OwnRuns:
    """One child's own runs, for one drive. At most `max_parallel` foreground runs of a message go on at once.

    `call_id` is that of the model's call which asks: a call that merely waits here does not count as being at work.
    """

    def __init__(
        self,
        drive: LeasedDrive,
        *,
        delegation: Delegation,
        waiting: Waiting,
        settings: BrokerSettings,
        max_parallel: int,
    ) -> None:
        self._drive = drive
        self._delegation = delegation
        self._waiting = waiting
        self._lease_seconds = settings.lease_seconds
        # In the order of the calls: asyncio lets the one pass that has waited longest.
        self._pool = asyncio.Semaphore(max_parallel)
        self._behind = 0
        self._waits: list[_Wait] = []
        self._has_news = asyncio.Event()
        self._waiter: asyncio.Task[None] | None = None
        self._is_attached = False

    @property
    def queue(self) -> str:
        """The queue the child waits in once it is to go on."""
        return self._drive.queue

    @property
    def last_response_at_ms(self) -> int:
        """When the message was written down whose calls are made now, as Redis time."""
        return self._drive.last_response_at_ms

    async def carry_out(self, call: Callable[[], Awaitable[T]], *, call_id: str, is_checked: bool) -> T:
        """Make one call of a tool of ours; while Redis does not answer it is made again, for it may be repeated.

        `is_checked`: the call's own move asks whether it may happen, so nothing is asked before. Raises `DriveStopped`
        when it may not, or Redis stays away.
        """
        self._drive.begin(call_id)
        try:
            if not is_checked:
                await self._drive.announce()
            return await persist(call, patience_seconds=2 * self._lease_seconds)
        except BrokerUnavailable:
            # Our own trouble with Redis is not for the child's model to deal with.
            self._drive.stop("stale")
            raise DriveStopped("stale") from None

    @asynccontextmanager
    async def place(self, *, call_id: str) -> AsyncGenerator[None]:
        """Around one foreground run: waits until there is room for it among those of its message."""
        self._behind += 1
        self._drive.rest(call_id)
        try:
            await self._pool.acquire()
        finally:
            self._behind -= 1
            self._drive.begin(call_id)
        try:
            yield
        finally:
            self._pool.release()

    async def start(self, run_id: str, *, mode: Mode, spec: RunSpec) -> None:
        """Start a run of the child's own, or find it again. Raises as `Delegation.start`."""
        try:
            await self._delegation.start(
                run_id, owner=self._drive.session_id, mode=mode, spec=spec, token=self._drive.token
            )
        except DriveStopped as stopped:
            self._drive.stop("kill" if stopped.reason == "kill" else "stale")
            raise

    async def outcome(self, run_id: str) -> Outcome | None:
        """How a run ended that an earlier drive of the child may have started; None where there is no outcome."""
        return None if self._drive.is_last_response_new else (await self._drive.outcomes([run_id]))[0]

    async def ending(self, run_id: str, *, call_id: str, until_ms: int | None = None) -> Outcome | None:
        """The outcome of one of the child's runs; None if `until_ms` (Redis time) came first.

        Raises `DriveStopped` once the child is suspended to wait for it.
        """
        if self._drive.stopped is not None:
            raise DriveStopped(self._drive.stopped)
        if until_ms is not None and until_ms <= self._drive.now_ms:
            return None
        wait = _Wait(call_id, run_id, until_ms, asyncio.get_running_loop().create_future())
        self._waits.append(wait)
        self._has_news.set()
        if self._waiter is None:
            self._waiter = asyncio.create_task(self._wait(), name=f"waits of {self._drive.session_id}")
        self._drive.rest(call_id)
        try:
            return await wait.future
        finally:
            if wait in self._waits:
                self._waits.remove(wait)

    async def close(self) -> None:
        """The drive is over: nobody waits any more."""
        if self._waiter is not None:
            self._waiter.cancel()
            await asyncio.gather(self._waiter, return_exceptions=True)
        if self._is_attached:
            await self._waiting.detach(self._drive.session_id)

    async def _wait(self) -> None:
        try:
            while self._waits:
                self._has_news.clear()
                if self._drive.is_busy or self._ends_soon:
                    if await self._listen():
                        await self._answer()
                    continue
                if await self._suspend() == "busy":
                    continue
                if not await self._answer():
                    # Gone from the index, yet no outcome that this process can read: nothing to ask about in a rush.
                    await asyncio.sleep(self._lease_seconds / 12)
            self._waiter = None
        except BaseException as error:
            for wait in self._waits:
                if not wait.future.done():
                    wait.future.set_exception(error)
            if not isinstance(error, DriveStopped):
                raise

    async def _suspend(self) -> Literal["busy", "go_on"]:
        awaited = list(dict.fromkeys(wait.run_id for wait in self._waits))
        deadlines = [wait.until_ms for wait in self._waits if wait.until_ms is not None]
        # Whoever stands behind may start as soon as one has ended.
        wake_at = len(awaited) - 1 if self._behind else 0
        return await self._drive.suspend(awaited, wake_at=wake_at, alarm_ms=min(deadlines, default=None))

    async def _answer(self) -> bool:
        """Give those their answers who can have one; whether anybody got one."""
        waits = list(self._waits)
        outcomes = await self._drive.outcomes([wait.run_id for wait in waits])
        answered = False
        for wait, outcome in zip(waits, outcomes, strict=True):
            is_over = wait.until_ms is not None and wait.until_ms <= self._drive.now_ms
            if (outcome is None and not is_over) or wait not in self._waits:
                continue
            self._waits.remove(wait)
            # Before its call goes on, so that nobody takes the child for one that can only wait.
            self._drive.begin(wait.call_id)
            if not wait.future.done():
                wait.future.set_result(outcome)
            answered = True
        return answered

    async def _listen(self) -> bool:
        """Until an awaited run has ended or a wait is over (True), or there is nothing left to do but wait."""
        quiet = asyncio.ensure_future(self._drive.calls_ended())
        try:
            await asyncio.wait({quiet}, timeout=LISTEN_AFTER_SECONDS)
            if quiet.done() and not self._ends_soon:
                return False
            if not self._is_attached:
                # Not heard, endings are found by the periodic look that is kept for lost messages.
                with contextlib.suppress(BrokerUnavailable):
                    await self._waiting.attach(self._drive.session_id)
                    self._is_attached = True
                if quiet.done() and not self._ends_soon:
                    # Meanwhile nothing is left to do but wait, and what is waited for may need the slot held here.
                    return False
            return await self._hear(quiet)
        finally:
            quiet.cancel()

    async def _hear(self, quiet: asyncio.Future[None]) -> bool:
        run_ids = {wait.run_id for wait in self._waits}
        endings: set[asyncio.Future[Any]] = {self._waiting.expect(run_id) for run_id in run_ids}
        news = asyncio.ensure_future(self._has_news.wait())
        try:
            for run_id in run_ids:
                # It may have ended before anybody listened.
                self._waiting.look(run_id)
            watched = {*endings, news} if quiet.done() else {*endings, news, quiet}
            await asyncio.wait(watched, timeout=self._next_end_seconds(), return_when=asyncio.FIRST_COMPLETED)
            return any(ending.done() for ending in endings) or self._next_end_seconds() == 0
        finally:
            news.cancel()
            for run_id in run_ids:
                self._waiting.forget(run_id)

    @property
    def _ends_soon(self) -> bool:
        """Whether a wait is over before a sweeper, which sees to alarms, would surely have looked."""
        seconds = self._next_end_seconds()
        return seconds is not None and seconds < self._lease_seconds / 3

    def _next_end_seconds(self) -> float | None:
        deadlines = [wait.until_ms for wait in self._waits if wait.until_ms is not None]
        return max(0.0, (min(deadlines) - self._drive.now_ms) / 1000) if deadlines else None
