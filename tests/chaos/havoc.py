"""What goes wrong in a chaos run: workers die, leave and freeze, links break, the server freezes and restarts.

One worker at a time, and three again before the next one; links and server at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import plan
import redis
import redis.exceptions

from broker_config import EmbeddedServer
from subagent_tasks.errors import OperatorError
from subagent_tasks.protocol import scripts
from subagent_tasks.protocol.keys import Keys
from subagent_tasks.testing import FaultyServer, WorkerProcess, freeze_server, restart_server

HERE = Path(__file__).parent
WORKERS = 3
CONCURRENCY = 20
START_SECONDS = 60.0
WATCH_SECONDS = 60.0
"""How long the runs of a killed worker are watched before they count as never taken over."""


@dataclass
class Toll:
    """What was done, and how long it took until a killed worker's runs were driven again, or had ended."""

    counts: Counter[str] = field(default_factory=Counter[str])
    takeovers: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """When (monotonic seconds) the worker was killed, and how many seconds later one of its runs went on."""
    never_taken: list[str] = field(default_factory=list[str])
    unwell: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """When the server was frozen or away, from and to."""

    def takeovers_when_well(self, *, lease_seconds: float) -> list[float]:
        """Those in whose time the server answered, and had for a lease: before that sweepers take nothing."""
        return [
            seconds
            for killed_at, seconds in self.takeovers
            if not any(
                since < killed_at + seconds and until + lease_seconds > killed_at for since, until in self.unwell
            )
        ]


class Havoc:
    """Everything that goes wrong until it is stopped."""

    def __init__(
        self,
        *,
        seed: int,
        server: EmbeddedServer,
        links: list[FaultyServer],
        worker_environment: Mapping[str, str],
        keys: Keys,
        lease_seconds: float,
        stack: ExitStack,
        logs: Path,
    ) -> None:
        self._seed = seed
        self._server = server
        self._links = links
        self._environment = dict(worker_environment)
        self._keys = keys
        self._lease_seconds = lease_seconds
        self._stack = stack
        self._logs = logs
        self._direct = redis.Redis.from_url(server.url, decode_responses=True, socket_timeout=5)
        self._workers: list[WorkerProcess] = []
        self._watches: set[asyncio.Task[None]] = set()
        self.toll = Toll()

    async def start_workers(self) -> None:
        for _ in range(WORKERS):
            self._start_worker()
        await asyncio.gather(*(asyncio.to_thread(worker.wait_ready, START_SECONDS) for worker in self._workers))

    async def rage(self, seconds: float) -> None:
        """Let everything go wrong for so long, and heal it."""
        loops = [
            asyncio.create_task(self._on_workers()),
            asyncio.create_task(self._on_links()),
            asyncio.create_task(self._on_server()),
        ]
        done, _ = await asyncio.wait(loops, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        for link in self._links:
            await asyncio.to_thread(link.heal)
        for loop in done:
            loop.result()  # none ends by itself but with an error
        # The end may have come while one was being replaced, or just after the server had been away.
        for worker in list(self._workers):
            with contextlib.suppress(OperatorError):
                await asyncio.to_thread(worker.wait_ready, START_SECONDS)
            await self._replace(worker)
        if self._watches:
            await asyncio.wait(self._watches)

    def stop_workers(self) -> list[int]:
        """SIGTERM to all; their exit codes."""
        for worker in self._workers:
            worker.terminate()
        return [worker.wait(30) for worker in self._workers]

    def _start_worker(self) -> WorkerProcess:
        worker = WorkerProcess(
            "chaos_agents",
            directory=HERE,
            env={**self._environment, "PYTHONWARNINGS": "ignore"},
            concurrency=CONCURRENCY,
            options=("--without-gossip", "--without-mingle"),
            log_file=self._logs / f"worker-{self.toll.counts['workers started']}.log",
        )
        self.toll.counts["workers started"] += 1
        self._workers.append(self._stack.enter_context(worker))
        return worker

    async def _on_workers(self) -> None:
        for pause_seconds, fault, number in plan.worker_faults(self._seed):
            await asyncio.sleep(pause_seconds)
            worker = self._workers[number % WORKERS]
            self.toll.counts[f"worker: {fault}"] += 1
            match fault:
                case "kill":
                    await self._kill(worker)
                case "stop":
                    worker.terminate()
                    await asyncio.to_thread(worker.wait, 30)
                case _:
                    leases = 0.5 if fault == "short freeze" else 3
                    worker.freeze()
                    try:
                        await asyncio.sleep(leases * self._lease_seconds)
                    finally:
                        worker.thaw()
            if not worker.is_running:
                await self._replace(worker)

    async def _replace(self, worker: WorkerProcess) -> None:
        """As a supervisor does: again, if the server was away just when the new one began."""
        while not worker.is_running:
            self._workers.remove(worker)
            worker = self._start_worker()
            with contextlib.suppress(OperatorError):
                await asyncio.to_thread(worker.wait_ready, START_SECONDS)

    async def _kill(self, worker: WorkerProcess) -> None:
        killed_at = time.monotonic()
        await asyncio.to_thread(worker.kill)
        watch = asyncio.create_task(self._watch(worker.pid, killed_at))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _watch(self, pid: int, killed_at: float) -> None:
        """How long it takes until each run of that process is another's, or nobody's any more."""
        left: dict[str, str] = await self._ask(lambda: self._driven_by(pid))
        while left and time.monotonic() < killed_at + WATCH_SECONDS:
            for run_id, process in list(left.items()):
                if not await self._ask(lambda run_id=run_id, process=process: self._is_with(run_id, process)):
                    self.toll.takeovers.append((killed_at, time.monotonic() - killed_at))
                    del left[run_id]
            await asyncio.sleep(0.02)
        self.toll.never_taken += left

    async def _ask(self, question: Any) -> Any:
        """Once the server answers."""
        while True:
            try:
                return await asyncio.to_thread(question)
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
                await asyncio.sleep(0.05)

    def _driven_by(self, pid: int) -> dict[str, str]:
        prefix = self._keys.driven(f"worker-{pid}-")
        found = cast("list[str]", self._direct.keys(f"{prefix}*"))
        return {
            str(run_id): key.rpartition(":")[2]
            for key in found
            for run_id in cast("set[str]", self._direct.smembers(key))
        }

    def _is_with(self, run_id: str, process: str) -> bool:
        state, driver = cast("list[str]", self._direct.hmget(self._keys.session(run_id), ["state", "driver"]))
        return state == "queued" or (state == "driven" and driver == process)

    async def _on_links(self) -> None:
        for pause_seconds, fault, number, much in plan.link_faults(self._seed):
            await asyncio.sleep(pause_seconds)
            link = self._links[number % len(self._links)]
            self.toll.counts[f"link: {fault}"] += 1
            match fault:
                case "cut":
                    await asyncio.to_thread(link.cut)
                case "lose":
                    # Of one script, or of whatever comes next.
                    which = [None, *scripts.ALL][int(much * (len(scripts.ALL) + 1))]
                    link.lose_reply(which, times=1 + number % 3)
                case "stall":
                    await asyncio.to_thread(link.stall)
                    await asyncio.sleep(much * self._lease_seconds / 2)
                    await asyncio.to_thread(link.heal)

    async def _on_server(self) -> None:
        for pause_seconds, fault in plan.server_faults(self._seed):
            await asyncio.sleep(pause_seconds)
            self.toll.counts[f"server: {fault}"] += 1
            since = time.monotonic()
            if fault == "restart":
                await asyncio.to_thread(restart_server, self._server)
            else:
                with freeze_server(self._server):
                    await asyncio.sleep(self._lease_seconds * (0.5 if fault == "short freeze" else 2.5))
            self.toll.unwell.append((since, time.monotonic()))
