"""One attempt at one run, as its provider sees it: the `Drive` over a lease.

It owns the lease and the transcript's length, and nothing else; every write goes through one script that checks the
lease and the kill flag. After `stop` every call raises `DriveStopped`, so a provider that goes on can change nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal, TypeVar

from broker_config import BrokerSettings
from subagent_tasks.errors import BrokerUnavailable, DriveStopped
from subagent_tasks.protocol.interfaces import ChildTools, NewEvent
from subagent_tasks.protocol.models import InboxEntry, TranscriptEvent
from subagent_tasks.protocol.records import RunRecord
from subagent_tasks.store.runs import Lease, RunStore

T = TypeVar("T")

StopReason = Literal["kill", "stale", "release", "limit"]


class LeasedDrive:
    """What the executor lends to a provider."""

    def __init__(
        self, record: RunRecord, lease: Lease, *, runs: RunStore, tools: ChildTools, settings: BrokerSettings
    ) -> None:
        self.session_id = record.id
        self.depth = record.depth
        self.attempt = record.attempt + 1
        self.tools = tools
        self.model_request_timeout_seconds = float(settings.model_request_timeout_seconds)
        self.first_event_timeout_seconds = float(settings.first_event_timeout_seconds)
        self.stopped: StopReason | None = None
        self.stop_requested = asyncio.Event()
        self._lease = lease
        self._runs = runs
        self._seq = record.seq
        self._patience_seconds = 2 * settings.lease_seconds
        # A provider may run tools side by side; the transcript is written by one at a time.
        self._writing = asyncio.Lock()
        self._writes: set[asyncio.Task[Any]] = set()
        self._open_calls = 0
        self._no_open_call = asyncio.Event()
        self._no_open_call.set()

    @property
    def has_begun(self) -> bool:
        """Whether the run's prompt was taken, so that a child may have been started, now or in an earlier attempt."""
        return self._seq > 0

    def stop(self, reason: StopReason) -> None:
        """Let no further effect start. The first reason stands; later ones change nothing."""
        if self.stopped is None:
            self.stopped = reason
            self.stop_requested.set()

    async def transcript(self) -> Sequence[TranscriptEvent]:
        """All events so far, in order."""
        return await self._persist(lambda: self._runs.transcript(self.session_id))

    async def take_input(self) -> Sequence[InboxEntry]:
        """What a later step may take: the waiting `next-step` entries."""
        return await self.take("later")

    async def take(self, step: Literal["first", "later"]) -> Sequence[InboxEntry]:
        """Move input from the inbox into the transcript (behaviour §1.7)."""

        async def move() -> Sequence[InboxEntry]:
            async with self._writing:
                self._check()
                answer = await self._persist(lambda: self._runs.take(self._lease, seq=self._seq, step=step))
                if isinstance(answer, str):
                    raise self._refused(answer)
                self._seq += len(answer)
                return answer

        return await self._whole(move())

    async def announce(self, call: NewEvent | None = None) -> None:
        """Right before an effect: may it start? A tool call is written down first."""
        self._check()
        await self._append("announce", () if call is None else (call,))
        if call is not None:
            self._open_calls += 1
            self._no_open_call.clear()

    async def record(self, *events: NewEvent) -> None:
        """Write down what happened; also what ends after the drive was stopped, while the lease is still ours."""
        if self.stopped == "stale":
            raise DriveStopped("stale")
        await self._append("record", events)
        self._open_calls -= sum(event.kind == "tool_result" for event in events)
        if self._open_calls <= 0:
            self._no_open_call.set()

    async def calls_ended(self, *, timeout_seconds: float) -> None:
        """Wait until every announced tool call has its result, at most that long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._no_open_call.wait()

    async def _append(self, purpose: Literal["announce", "record"], events: Sequence[NewEvent]) -> None:
        async def write() -> None:
            async with self._writing:
                answer = await self._persist(
                    lambda: self._runs.append(self._lease, seq=self._seq, purpose=purpose, events=events)
                )
                if isinstance(answer, str):
                    raise self._refused(answer)
                self._seq = answer

        await self._whole(write())

    async def _whole(self, write: Coroutine[Any, Any, T]) -> T:
        # A provider may be cancelled inside a write. Its answer must still count: with the wrong length the next event
        # would look like a repetition of this one, and be lost.
        task = asyncio.ensure_future(write)
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        return await asyncio.shield(task)

    def _check(self) -> None:
        if self.stopped is not None:
            raise DriveStopped(self.stopped)

    def _refused(self, word: str) -> DriveStopped:
        self.stop("kill" if word == "stop" else "stale")
        return DriveStopped(self.stopped or "stale")

    async def _persist(self, move: Callable[[], Awaitable[T]]) -> T:
        try:
            return await persist(move, patience_seconds=self._patience_seconds)
        except BrokerUnavailable:
            self.stop("stale")
            raise DriveStopped("stale") from None


async def persist(move: Callable[[], Awaitable[T]], *, patience_seconds: float) -> T:
    """Repeat a move while Redis does not answer: an outage is not a death. Moves are made to be repeated."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_seconds
    pause_seconds = 0.05
    while True:
        try:
            return await move()
        except BrokerUnavailable:
            if loop.time() + pause_seconds > deadline:
                raise
        await asyncio.sleep(pause_seconds)
        pause_seconds = min(pause_seconds * 2, 1.0)
