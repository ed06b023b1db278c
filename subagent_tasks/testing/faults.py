"""Faults of Redis and on the way to it: a proxy that loses, refuses and stalls, a server that freezes or restarts,
leases that lapse without waiting.

The proxy is a TCP address like any other, so hosts, real worker processes and plain clients can be put behind it. It
knows RESP only as far as it must: where a command ends, and which reply is its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar, cast
from urllib.parse import parse_qs, unquote, urlsplit, urlunsplit

import redis.asyncio

from broker_config import EmbeddedServer
from subagent_tasks.errors import CallerError, OperatorError
from subagent_tasks.protocol.keys import Keys
from subagent_tasks.protocol.scripts import Script

T = TypeVar("T")

CHUNK_BYTES = 65_536
START_SECONDS = 5.0


class FaultyServer:
    """A proxy in front of a Redis server: `with FaultyServer(server.url) as faulty: ... faulty.url`.

    Without a fault asked for it passes everything on. All methods may be called from any thread. Raises `CallerError`
    for an upstream that is neither `redis://` nor a Unix socket: what is encrypted cannot be told apart.
    """

    def __init__(self, upstream_url: str) -> None:
        parts = urlsplit(upstream_url)
        if parts.scheme not in ("redis", "unix", "redis+socket"):
            raise CallerError(f"FaultyServer cannot stand before {parts.scheme}://: use redis:// or a Unix socket")
        self._upstream = parts
        self._lock = threading.Lock()
        self._rules: list[_Loss] = []
        self._replies_lost = 0
        self._is_refusing = False
        self._flowing: asyncio.Event
        self._port = 0
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The proxy's address, with the upstream's login and database."""
        if not self._port:
            raise OperatorError("the proxy is not running: use it inside `with`")
        login, found, _ = self._upstream.netloc.rpartition("@")
        query = parse_qs(self._upstream.query)
        is_socket = self._upstream.scheme != "redis"
        number = (query.get("db") or query.get("virtual_host") or ["0"])[0]
        path = f"/{number.lstrip('/')}" if is_socket else self._upstream.path
        return urlunsplit(("redis", f"{login}{found}127.0.0.1:{self._port}", path, "", ""))

    @property
    def replies_lost(self) -> int:
        """How many replies were lost so far."""
        return self._replies_lost

    def lose_reply(self, containing: str | Script | None = None, *, times: int = 1) -> None:
        """Let the next `times` matching commands run and lose their replies: the connection closes instead.

        A command matches when its bytes hold the text, or when it runs the script (by its SHA or in full); None
        matches every command. A server that does not know the script yet ran nothing: that answer is passed on and
        does not count.
        """
        needles: tuple[bytes, ...] = (b"",)
        if isinstance(containing, Script):
            needles = (containing.sha.encode(), containing.source.encode())
        elif containing is not None:
            needles = (containing.encode(),)
        with self._lock:
            self._rules.append(_Loss(needles, times))

    def cut(self) -> None:
        """Close every connection now; new ones are accepted."""
        self._run(self._cut())

    def refuse(self) -> None:
        """Close every connection, and each new one at once, as a server that is down does; until `heal`."""
        self._is_refusing = True
        self.cut()

    def stall(self) -> None:
        """Let no byte through, in neither direction, and close nothing; what waited goes on with `heal`."""
        self._run(self._set_flowing(False))

    def heal(self) -> None:
        """End what goes on, and forget what was asked for and has not happened yet."""
        with self._lock:
            self._rules.clear()
        self._is_refusing = False
        self._run(self._set_flowing(True))

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty-redis", daemon=True)
        self._thread.start()
        self._flowing = self._run(_set_event())
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self._port = int(self._server.sockets[0].getsockname()[1])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._loop is None or self._thread is None:
            return
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_SECONDS)
        self._loop.close()
        self._loop = self._thread = None
        self._port = 0

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            work.close()
            raise OperatorError("the proxy is not running: use it inside `with`")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_SECONDS)

    async def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._cut()

    async def _set_flowing(self, flows: bool) -> None:
        if flows:
            self._flowing.set()
        else:
            self._flowing.clear()

    async def _cut(self) -> None:
        connections = list(self._connections)
        for connection in connections:
            for task in connection.tasks:
                task.cancel()
        await asyncio.gather(*(connection.closed.wait() for connection in connections))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client's connection, until either side ends it or a fault does."""
        if self._is_refusing:
            writer.close()
            return
        try:
            upstream_reader, upstream_writer = await self._connect()
        except OSError:
            writer.close()
            return
        if self._is_refusing:
            # Since it was accepted: `refuse` does not know it yet.
            writer.close()
            upstream_writer.close()
            return
        connection = _Connection()
        connection.tasks = (
            asyncio.ensure_future(self._pass_commands(connection, reader, upstream_writer)),
            asyncio.ensure_future(self._pass_replies(connection, upstream_reader, writer)),
        )
        self._connections.add(connection)
        try:
            await asyncio.wait(connection.tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in connection.tasks:
                task.cancel()
            await asyncio.gather(*connection.tasks, return_exceptions=True)
            for end in (writer, upstream_writer):
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()
            self._connections.discard(connection)
            connection.closed.set()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._upstream.scheme != "redis":
            return await asyncio.open_unix_connection(unquote(self._upstream.path))
        return await asyncio.open_connection(self._upstream.hostname or "127.0.0.1", self._upstream.port or 6379)

    async def _pass_commands(
        self, connection: _Connection, reader: asyncio.StreamReader, upstream: asyncio.StreamWriter
    ) -> None:
        buffer = bytearray()
        while chunk := await reader.read(CHUNK_BYTES):
            await self._flowing.wait()
            buffer += chunk
            while (end := value_end(buffer, 0)) is not None:
                command = bytes(buffer[:end])
                del buffer[:end]
                # Noted before it is sent: its reply may come at once.
                connection.awaited.append(self._loss_of(command))
                upstream.write(command)
            await upstream.drain()

    async def _pass_replies(
        self, connection: _Connection, upstream: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        buffer = bytearray()
        while chunk := await upstream.read(CHUNK_BYTES):
            await self._flowing.wait()
            buffer += chunk
            while (end := value_end(buffer, 0)) is not None:
                reply = bytes(buffer[:end])
                del buffer[:end]
                if not self._survives(connection, reply):
                    await writer.drain()
                    return
                writer.write(reply)
            await writer.drain()

    def _loss_of(self, command: bytes) -> _Loss | None:
        """The fault that this command's reply is to meet; it is then spent."""
        with self._lock:
            for rule in self._rules:
                if rule.times > 0 and any(needle in command for needle in rule.needles):
                    rule.times -= 1
                    return rule
        return None

    def _survives(self, connection: _Connection, reply: bytes) -> bool:
        # Pushes (RESP3) and messages on a subscribed connection (RESP2) answer no command.
        if reply.startswith(b">") or not connection.awaited:
            return True
        rule = connection.awaited.popleft()
        if rule is None:
            return True
        with self._lock:
            if reply.startswith(b"-NOSCRIPT"):
                rule.times += 1
                return True
            self._replies_lost += 1
        return False


def lose_reply(server: FaultyServer, containing: str | Script | None = None, *, times: int = 1) -> None:
    """Let the next matching command run and lose its reply (`FaultyServer.lose_reply`)."""
    server.lose_reply(containing, times=times)


def cut(server: FaultyServer) -> None:
    """Close every connection now; new ones are accepted (`FaultyServer.cut`)."""
    server.cut()


def refuse(server: FaultyServer) -> None:
    """Refuse every connection until `server.heal()` (`FaultyServer.refuse`)."""
    server.refuse()


def freeze_server(server: EmbeddedServer) -> AbstractContextManager[object]:
    """Freeze a server at once: connections stay open and nothing is answered. In a `with`, until its end."""
    server.freeze()
    frozen = contextlib.ExitStack()
    frozen.callback(server.thaw)
    return frozen


def restart_server(server: EmbeddedServer) -> None:
    """Kill a server and start it again at its address: what it had acknowledged is still there, clients are not."""
    server.kill()
    server.start()


async def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


async def age_lease(client: redis.asyncio.Redis, keys: Keys, process_id: str) -> None:
    """Let a process's heartbeat have lapsed long ago, as if it had been silent; its next beat undoes it."""
    known = await cast("Any", client.zscore(keys.processes, process_id))
    assert known is not None, f"process {process_id!r} never beat, or was retired"
    await cast("Any", client.zadd(keys.processes, {process_id: 1}))


async def end_outage(client: redis.asyncio.Redis, keys: Keys) -> None:
    """Let sweepers sweep now, as if one lease had passed since the server came back."""
    await cast("Any", client.hset(keys.clock, "wait_until", 0))


def value_end(data: bytes | bytearray, start: int) -> int | None:
    """Where the RESP value (or inline command) that begins at `start` ends; None while it is incomplete."""
    newline = data.find(b"\r\n", start)
    if newline < 0:
        return None
    kind, end = data[start : start + 1], newline + 2
    if kind in (b"$", b"=", b"!"):
        length = int(data[start + 1 : newline])
        end += length + 2 if length >= 0 else 0
        return end if end <= len(data) else None
    parts = 0
    if kind in (b"*", b"~", b">"):
        parts = int(data[start + 1 : newline])
    elif kind in (b"%", b"|"):
        # Attributes are followed by the value they belong to.
        parts = 2 * int(data[start + 1 : newline]) + (1 if kind == b"|" else 0)
    for _ in range(parts):
        inner = value_end(data, end)
        if inner is None:
            return None
        end = inner
    return end


@dataclass(slots=True)
class _Loss:
    """How many replies to lose, of commands that hold one of these."""

    needles: tuple[bytes, ...]
    times: int


@dataclass(eq=False, slots=True)
class _Connection:
    """One client's connection: for each command that was not answered yet, the fault its reply meets."""

    awaited: deque[_Loss | None] = field(default_factory=deque["_Loss | None"])
    tasks: tuple[asyncio.Task[None], ...] = ()
    closed: asyncio.Event = field(default_factory=asyncio.Event)
