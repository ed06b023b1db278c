"""What one delegation asks of Redis: the host's round trips counted where they are sent, and everything as the server
sees it (MONITOR), with what idle processes do anyway taken away.

A round trip of the server's list is one command, or one transaction: redis-py sends those in one go. What scripts do
inside the server is counted apart: it costs the server, but no round trip.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

import redis
import redis.asyncio.connection

from benchmarks.raw import noop_task
from benchmarks.stage import CALL_SECONDS, OUR_DATABASE, RAW_DATABASE, Stage, call, collect, start_job
from subagent_tasks.protocol import scripts

END_OF_WATCH = "benchmarks-end-of-watch"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Per delegation, unless a name says otherwise."""

    start_call_sends: float
    foreground_call_sends: float
    kinds: dict[str, Commands] = field(default_factory=dict[str, "Commands"])


@dataclass(frozen=True, slots=True)
class Commands:
    """Round trips by name (a script's name stands for its EVALSHA), and commands that scripts ran in the server."""

    round_trips: dict[str, float]
    inside_scripts: float

    @property
    def total(self) -> float:
        return sum(self.round_trips.values())


async def measure_traffic(stage: Stage, *, count: int, idle_seconds: float) -> Traffic:
    """`count` delegations of each kind, one after another, with one worker of each side that is otherwise idle."""
    with stage.workers(ours=1, raw=1):
        await stage.wait_ready(ours=1, raw=1)
        async with stage.sessions() as (session,):
            # The first calls load scripts and open connections.
            await call(session)
            await collect(session, await start_job(session))
            await asyncio.to_thread(_raw_calls, stage, 1)

            async def foreground() -> None:
                for _ in range(count):
                    await call(session)

            async def jobs() -> None:
                for _ in range(count):
                    await collect(session, await start_job(session))

            with _counted_sends() as sends:
                for _ in range(count):
                    await start_job(session)
                start_call_sends = sends() / count
            await asyncio.sleep(1)
            with _counted_sends() as sends:
                await foreground()
                foreground_call_sends = sends() / count
            idle = await _watched(stage, lambda: asyncio.sleep(idle_seconds))
            found = Traffic(start_call_sends=start_call_sends, foreground_call_sends=foreground_call_sends)
            for name, work, database in (
                ("foreground", foreground, OUR_DATABASE),
                ("job", jobs, OUR_DATABASE),
                ("raw", lambda: asyncio.to_thread(_raw_calls, stage, count), RAW_DATABASE),
            ):
                watch = await _watched(stage, work)
                found.kinds[name] = watch.per(count, idle=idle, database=database)
            return found


@dataclass(slots=True)
class _Watch:
    """What the server saw in a while, per database."""

    seconds: float = 0.0
    round_trips: Counter[tuple[int, str]] = field(default_factory=Counter[tuple[int, str]])
    inside: Counter[int] = field(default_factory=Counter[int])

    def per(self, count: int, *, idle: _Watch, database: int) -> Commands:
        share = self.seconds / idle.seconds
        names = {name for number, name in self.round_trips if number == database}
        net = {
            name: (self.round_trips[database, name] - idle.round_trips[database, name] * share) / count
            for name in sorted(names)
        }
        return Commands(
            round_trips={name: round(number, 2) for name, number in net.items() if number >= 0.05},
            inside_scripts=round((self.inside[database] - idle.inside[database] * share) / count, 1),
        )


async def _watched(stage: Stage, work: Callable[[], Awaitable[object]]) -> _Watch:
    """Everything the server executes while `work` goes on."""
    watch, ready = _Watch(), threading.Event()
    watcher = asyncio.create_task(asyncio.to_thread(_watch, stage.server.url, watch, ready))
    await asyncio.to_thread(ready.wait)
    begun = time.perf_counter()
    await work()
    watch.seconds = time.perf_counter() - begun
    await asyncio.to_thread(lambda: stage.redis.echo(END_OF_WATCH))
    await watcher
    return watch


def _watch(url: str, watch: _Watch, ready: threading.Event) -> None:
    names = {script.sha: script.name for script in scripts.ALL}
    transactions: set[str] = set()
    client = redis.Redis.from_url(url, decode_responses=True)
    with client, client.monitor() as monitor:
        ready.set()
        while True:
            seen = cast("dict[str, Any]", monitor.next_command())
            words, database = str(seen["command"]).split(), int(seen["db"])
            address = f"{seen['client_address']}:{seen['client_port']}"
            if END_OF_WATCH in words:
                return
            command = words[0].upper()
            if seen["client_type"] == "lua":
                watch.inside[database] += 1
            elif command == "MULTI":
                transactions.add(address)
            elif command == "EXEC":
                transactions.discard(address)
                watch.round_trips[database, "MULTI … EXEC"] += 1
            elif address not in transactions:
                name = names.get(words[1], command) if command == "EVALSHA" else command
                watch.round_trips[database, name] += 1


_counter: ContextVar[list[int] | None] = ContextVar("benchmarks_counter", default=None)


@contextmanager
def _counted_sends() -> Generator[Callable[[], int]]:
    """Count what this task, and what it starts, sends to Redis: a send is a round trip. Others' sends do not count."""
    connection = cast("Any", redis.asyncio.connection.AbstractConnection)
    send = connection.send_packed_command
    counted = [0]

    async def counting(self: Any, *args: Any, **kwargs: Any) -> None:
        counter = _counter.get()
        if counter is not None:
            counter[0] += 1
        await send(self, *args, **kwargs)

    connection.send_packed_command = counting
    token = _counter.set(counted)
    try:
        yield lambda: counted[0]
    finally:
        _counter.reset(token)
        connection.send_packed_command = send


def _raw_calls(stage: Stage, count: int) -> None:
    task = noop_task(stage.raw)
    for _ in range(count):
        task.apply_async().get(timeout=CALL_SECONDS)
