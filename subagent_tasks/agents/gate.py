"""The one way of a child's loop to its drive: a refusal stands, and a write that has begun comes to its end.

It decides nothing about the run; it remembers what the drive said, for whoever asks later how the run may end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from subagent_tasks.errors import DriveStopped
from subagent_tasks.protocol.interfaces import Drive, NewEvent
from subagent_tasks.protocol.models import InboxEntry


class Gate:
    """Stands between the loop and one drive, from the child's first step to its result."""

    def __init__(self, drive: Drive) -> None:
        self._drive = drive
        self._stopped: DriveStopped | None = None
        self._fault: Exception | None = None
        self._is_halted = False
        self._is_closed = False

    def halt(self) -> None:
        """The run was cancelled: no further effect may start, what has started may still report."""
        self._is_halted = True

    def close(self) -> None:
        """The run has its result: what still runs in its name may not write any more."""
        self._is_closed = True

    def raise_if_halted(self) -> None:
        if self._is_halted:
            raise asyncio.CancelledError

    def raise_refusal(self) -> None:
        """Raise what the drive raised, if somebody else goes on with the run; an ended one keeps its partial text."""
        if self._stopped is not None and not self.was_ended:
            raise self._stopped
        if self._fault is not None:
            raise self._fault

    @property
    def was_ended(self) -> bool:
        """Whether the drive said that the run is to end here (a kill, its limit)."""
        return self._stopped is not None and self._stopped.reason in ("kill", "limit")

    def heed(self, stop: DriveStopped) -> None:
        """A tool of ours was told by its own move that the run may not go on here."""
        self._remember(stop)

    async def announce(self, event: NewEvent | None) -> None:
        if self._stopped is not None:
            raise self._stopped
        if not self._is_halted:
            await self._write(lambda: self._drive.announce(event))
        # Also after it: a cancel that came during the write has spared the write, not the effect.
        self.raise_if_halted()

    async def take_input(self) -> Sequence[InboxEntry]:
        """What waits for the next step, and is in the transcript now. As `announce`, for a model request."""
        taken: list[InboxEntry] = []

        async def take() -> None:
            taken.extend(await self._drive.take_input())

        if self._stopped is not None:
            raise self._stopped
        if not self._is_halted:
            await self._write(take)
        return taken

    async def record(self, *events: NewEvent, then: Callable[[], None] | None = None) -> None:
        """Write events down; `then` is called once they are, whatever becomes of the caller meanwhile."""

        async def write() -> None:
            await self._drive.record(*events)
            if then is not None:
                then()

        # A run that is being released may still report what it had started: the drive says whether it is in time.
        if self._stopped is not None and self._stopped.reason != "release":
            raise self._stopped
        await self._write(write)

    async def _write(self, write: Callable[[], Awaitable[None]]) -> None:
        if self._is_closed:
            raise DriveStopped("stale")
        if self._fault is not None:
            raise self._fault
        # A cancel that lands inside a write would leave open whether it was committed, and so what comes next.
        writing = asyncio.ensure_future(write())
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            while not writing.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({writing})
            if not writing.cancelled():
                self._remember(writing.exception())
            raise
        except BaseException as error:
            self._remember(error)
            raise

    def _remember(self, error: BaseException | None) -> None:
        if isinstance(error, DriveStopped) and self._stopped is None:
            self._stopped = error
        elif isinstance(error, Exception) and self._fault is None:
            self._fault = error
