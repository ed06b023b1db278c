"""A gate between processes: many children arrive at it, and one keeper lets them all go.

A Unix socket carries it. A process whose children arrive holds one connection and names each of them in a line; the
connection ends when the gate opens, or with the keeper, so nobody is left waiting for a benchmark that is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import TracebackType
from typing import Self

GATE_VARIABLE = "BENCHMARKS_GATE"
"""The environment variable that names the socket."""


class Gate:
    """The keeper's side: `async with Gate(path) as gate`. Shut until it is opened or left."""

    def __init__(self, path: Path) -> None:
        self._arrived: set[bytes] = set()
        self._path = path
        self._changed = asyncio.Condition()
        self._visitors: set[asyncio.StreamWriter] = set()
        self._is_open = False
        self._server: asyncio.Server | None = None

    @property
    def arrived(self) -> int:
        """How many children have come. One that comes again, begun anew, counts once."""
        return len(self._arrived)

    async def until_arrived(self, count: int) -> None:
        """Return once so many children stand at the gate."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.arrived >= count)

    def open(self) -> None:
        """Let go whoever waits, and whoever comes later."""
        self._is_open = True
        for visitor in self._visitors:
            visitor.close()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._let_arrive, self._path)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.open()
        if self._server is not None:
            self._server.close()
        self._path.unlink(missing_ok=True)

    async def _let_arrive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._visitors.add(writer)
        if self._is_open:
            writer.close()
        while child := await reader.readline():
            async with self._changed:
                self._arrived.add(child)
                self._changed.notify_all()


class Turnstile:
    """The children's side, one per process: connects when the first child arrives."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_open = asyncio.Event()
        self._connecting: asyncio.Task[asyncio.StreamWriter] | None = None
        self._listening: asyncio.Task[None] | None = None

    async def passed(self, child: str) -> None:
        """Arrive as `child`, a name without line breaks, and return once the gate is open."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
        keeper = await asyncio.shield(self._connecting)
        keeper.write(f"{child}\n".encode())
        await self._is_open.wait()

    async def _connect(self) -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_unix_connection(self._path)
        self._listening = asyncio.create_task(self._listen(reader))
        return writer

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        # Words that the keeper did not read any more make the end a reset.
        with contextlib.suppress(ConnectionError):
            await reader.read()
        self._is_open.set()
