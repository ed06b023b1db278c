"""What a notice starts in its owner's agent loop: it joins the turn that runs, or opens a turn (behaviour §3.7).

Decides when, and keeps what waits; reading and acknowledging are the session's, the turn is the loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Literal, Protocol, Self

from subagent_tasks.protocol.models import Notice


class NoticeSource(Protocol):
    """A session, as far as its notices go."""

    def notices(self) -> AsyncIterator[Notice]: ...


class NoticeInbox:
    """`async with session.notice_inbox() as inbox`: one per agent loop.

    A loop that is busy calls `take` before each step, one that is idle awaits `wake`. Under `wakeup` at most
    `max_consecutive_wakes` turns in a row are opened by notices; after that they wait for the next turn, until
    `user_spoke`. Under `quiet` none is. Nothing is acknowledged here: do that once the model has read them.
    """

    def __init__(
        self, source: NoticeSource, *, delivery: Literal["wakeup", "quiet"] = "wakeup", max_consecutive_wakes: int = 3
    ) -> None:
        self._source = source
        self._max_wakes = max_consecutive_wakes if delivery == "wakeup" else 0
        self._wakes = 0
        self._waiting: list[Notice] = []
        self._may_wake = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    def take(self) -> list[Notice]:
        """What has come since the last time, for the step that begins."""
        taken, self._waiting = self._waiting, []
        self._look()
        return taken

    async def wake(self) -> list[Notice]:
        """Wait while the loop is idle; the notices that open a turn. Raises what reading the notices raised."""
        assert self._reading is not None, "use it inside `async with`"
        waking = asyncio.ensure_future(self._may_wake.wait())
        try:
            await asyncio.wait({waking, self._reading}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waking.cancel()
        if not self._may_wake.is_set():
            self._reading.result()
            return []
        self._wakes += 1
        return self.take()

    def user_spoke(self) -> None:
        """A user's message was taken up: notices may open as many turns again. Other messages do not count."""
        self._wakes = 0
        self._look()

    async def __aenter__(self) -> Self:
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        async for notice in self._source.notices():
            self._waiting.append(notice)
            self._look()

    def _look(self) -> None:
        if self._waiting and self._wakes < self._max_wakes:
            self._may_wake.set()
        else:
            self._may_wake.clear()
