"""One attempt at one run, as its provider sees it: the `Drive` over a lease.

It owns the lease and the transcript's length, and nothing else; every write goes through one script that checks the
lease and the kill flag. After `stop` every call raises `DriveStopped`, so a provider that goes on can change nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal, TypeVar

from broker_config import BrokerSettings
from subagent_tasks.errors import BrokerUnavailable, DriveStopped
from subagent_tasks.protocol.interfaces import ChildTools, NewEvent
from subagent_tasks.protocol.models import InboxEntry, Outcome, TranscriptEvent
from subagent_tasks.protocol.records import RunRecord
from subagent_tasks.store.runs import Lease, RunStore

T = TypeVar("T")

StopReason = Literal["kill", "stale", "release", "limit", "suspend"]


class LeasedDrive:
    """What the executor lends to a provider."""

    def __init__(self, record: RunRecord, lease: Lease, *, runs: RunStore, settings: BrokerSettings) -> None:
        self.session_id = record.id
        self.depth = record.depth
        self.attempt = record.attempt + 1
        self.tools: ChildTools  # made for this drive, and set before its provider sees it
        self.model_request_timeout_seconds = float(settings.model_request_timeout_seconds)
        self.first_event_timeout_seconds = float(settings.first_event_timeout_seconds)
        self.stopped: StopReason | None = None
        self.stop_requested = asyncio.Event()
        # When the newest model message was written down, as Redis time: the waits its calls ask for count from there.
        self.last_response_at_ms = 0
        # Whether that was here: an earlier drive has made none of its calls then.
        self.is_last_response_new = False
        self.queue = record.spec.queue
        self.token = lease.token
        self._limit_at_ms = record.limit_at_ms
        # Redis time goes on from the claim at the pace of this process's clock.
        self._claimed_at_ms = record.claimed_at or record.created_at
        self._claimed_at = time.monotonic()
        self._lease = lease
        self._runs = runs
        self._seq = record.seq
        self._patience_seconds = 2 * settings.lease_seconds
        # A provider may run tools side by side; the transcript is written by one at a time.
        self._writing = asyncio.Lock()
        self._writes: set[asyncio.Task[Any]] = set()
        # Call id -> whether a cancel ends it.
        self._at_work: dict[str, bool] = {}
        self._quiet = _quiet()
        self._interruptible = _quiet()

    @property
    def has_begun(self) -> bool:
        """Whether the run's prompt was taken, so that a child may have been started, now or in an earlier attempt."""
        return self._seq > 0

    @property
    def is_busy(self) -> bool:
        """Whether a tool call is at work: begun, without a result yet, and not merely waiting."""
        return bool(self._at_work)

    def begin(self, call_id: str, *, is_interruptible: bool = True) -> None:
        """A call is at work (again). Those that are announced are so without this; a result in the record ends it."""
        self._at_work[call_id] = is_interruptible
        self._quiet.clear()
        if not is_interruptible:
            self._interruptible.clear()

    def rest(self, call_id: str) -> None:
        """A call merely waits now."""
        self._at_work.pop(call_id, None)
        if not self._at_work:
            self._quiet.set()
        if all(self._at_work.values()):
            self._interruptible.set()

    @property
    def now_ms(self) -> int:
        """Redis time, as far as it is known here."""
        return self._claimed_at_ms + int((time.monotonic() - self._claimed_at) * 1000)

    def stop(self, reason: StopReason) -> None:
        """Let no further effect start. The first reason stands; later ones change nothing."""
        if self.stopped is None:
            self.stopped = reason
            self.stop_requested.set()

    async def transcript(self) -> Sequence[TranscriptEvent]:
        """All events so far, in order."""
        events = await self._persist(lambda: self._runs.transcript(self.session_id))
        self.last_response_at_ms = next(
            (event.at_ms for event in reversed(events) if event.kind == "response"), self.last_response_at_ms
        )
        return events

    async def outcomes(self, run_ids: Sequence[str]) -> list[Outcome | None]:
        """The outcomes of other runs; None where there is none yet, or none that can be read."""
        return await self._persist(lambda: self._runs.outcomes(run_ids))

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
        await self._append("announce", () if call is None else (call,))

    async def record(self, *events: NewEvent) -> None:
        """Write down what happened; also what ends after the drive was stopped, while the lease is still ours."""
        if self.stopped == "stale":
            raise DriveStopped("stale")
        await self._append("record", events)
        if any(event.kind == "response" for event in events):
            self.last_response_at_ms, self.is_last_response_new = self.now_ms, True

    async def calls_ended(self, *, timeout_seconds: float | None = None) -> None:
        """Wait until no tool call is at work, at most that long."""
        await _in_time(self._quiet.wait(), timeout_seconds)

    @property
    def is_interruptible(self) -> bool:
        """Whether a cancel would end all that is at work."""
        return self._interruptible.is_set()

    async def becomes_interruptible(self, *, timeout_seconds: float) -> None:
        """Wait until no call is at work that a cancel does not end, at most that long."""
        await _in_time(self._interruptible.wait(), timeout_seconds)

    async def suspend(self, awaited: Sequence[str], *, wake_at: int, alarm_ms: int | None) -> Literal["busy", "go_on"]:
        """Let go of the run until no more than `wake_at` of the awaited runs are unsettled (protocol §3).

        `alarm_ms` is when it goes on at the latest, as Redis time; None for its run limit. Raises `DriveStopped` once
        the run is suspended. Returns why it is not: a tool call runs still, or so many have settled meanwhile.
        """
        alarm_ms = self._limit_at_ms if alarm_ms is None else min(alarm_ms, self._limit_at_ms)

        async def move() -> Literal["busy", "go_on"]:
            async with self._writing:
                self._check()
                if self.is_busy:
                    return "busy"
                answer = await self._persist(
                    lambda: self._runs.suspend(
                        self._lease, seq=self._seq, awaited=awaited, wake_at=wake_at, alarm_ms=alarm_ms
                    )
                )
                if answer == "suspended":
                    self.stop("suspend")
                    raise DriveStopped("suspend")
                if answer != "go_on":
                    raise self._refused(answer)
                return answer

        return await self._whole(move())

    async def _append(self, purpose: Literal["announce", "record"], events: Sequence[NewEvent]) -> None:
        async def write() -> None:
            async with self._writing:
                if purpose == "announce":
                    self._check()
                answer = await self._persist(
                    lambda: self._runs.append(self._lease, seq=self._seq, purpose=purpose, events=events)
                )
                if isinstance(answer, str):
                    raise self._refused(answer)
                self._seq = answer
                self._count_calls(events)

        await self._whole(write())

    def _count_calls(self, events: Sequence[NewEvent]) -> None:
        # While the write is still exclusive: a suspension behind it must see the call that it let start.
        for event in events:
            if event.kind == "tool_call":
                is_interruptible = event.data.get("interruptible") is not False
                self.begin(str(event.data.get("tool_call_id")), is_interruptible=is_interruptible)
            elif event.kind == "tool_result":
                self.rest(str(event.data.get("tool_call_id")))

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


def _quiet() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


async def _in_time(work: Coroutine[Any, Any, Any], timeout_seconds: float | None) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_seconds):
            await work


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
