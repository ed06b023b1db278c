"""The hosts of a chaos run: they delegate without pause, do on each answer what the README tells users to do, and keep
a ledger of what they asked for and what they were told.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from plan import Delegation, delegations

from subagent_tasks import SubagentApp
from subagent_tasks.commands.kill import kill
from subagent_tasks.errors import BrokerUnavailable
from subagent_tasks.host import Session
from subagent_tasks.protocol.ids import run_id_for_call
from subagent_tasks.protocol.models import Notice, ToolResult

T = TypeVar("T")

CALL_SECONDS = 120.0
"""How long a foreground call waits: longer than any plan with all its faults."""
READ_MS = 2_000
TERMINAL = ("completed", "failed", "killed")


@dataclass
class Entry:
    """One delegation that may have been accepted, and all that was said of it."""

    delegation: Delegation
    session_id: str
    run_id: str
    accepted: bool = False
    refused: str | None = None
    result: ToolResult | None = None
    """Of a foreground call."""
    reads: set[str] = field(default_factory=set[str])
    """The terminal states that `job_output` or `job_kill` said."""
    read_at: float | None = None
    """When it did (monotonic seconds)."""
    killed_by_model: bool = False

    def read(self, status: str) -> None:
        self.reads.add(status)
        self.read_at = time.monotonic()


@dataclass
class Ledger:
    """Everything that was asked and told, over all hosts."""

    entries: list[Entry] = field(default_factory=list[Entry])
    notices: Counter[str] = field(default_factory=Counter[str])
    """Whose ending was announced how often."""
    announced: dict[str, str] = field(default_factory=dict[str, str])
    """What a notice said of it."""
    announced_late: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    """Those that `job_output` had told before, and how many seconds before."""
    sessions: list[str] = field(default_factory=list[str])
    repeated: int = 0
    """Calls that were repeated because Redis did not answer in time."""

    def hear(self, notice: Notice) -> None:
        run_id = notice.sender_id
        self.notices[run_id] += 1
        self.announced[run_id] = notice.text
        for entry in self.entries:
            if entry.run_id == run_id and entry.read_at is not None:
                self.announced_late.append((run_id, time.monotonic() - entry.read_at))


class Load:
    """The lanes of all sessions of one host."""

    def __init__(self, app: SubagentApp, ledger: Ledger, *, name: str, sessions: int, lanes: int) -> None:
        self._app = app
        self._ledger = ledger
        self._name = name
        self._sessions = sessions
        self._lanes = lanes
        self._stopping = asyncio.Event()
        self.done = asyncio.Event()
        """Nothing is asked any more."""

    def stop(self) -> None:
        """Delegate nothing further; what is under way comes to its end."""
        self._stopping.set()

    async def run(self, *, until_told: asyncio.Event) -> None:
        """Delegate until stopped; go on listening for notices until `until_told`."""
        async with self._app.host() as host:
            readers: list[asyncio.Task[None]] = []
            lanes: list[Coroutine[Any, Any, None]] = []
            for number in range(self._sessions):
                session_id = f"{self._name}{number}"
                session = await patiently(lambda session_id=session_id: host.open_session(session_id))
                self._ledger.sessions.append(session_id)
                readers.append(asyncio.create_task(self._read(session)))
                lanes += [self._delegate(session, f"{session_id}.{lane}") for lane in range(self._lanes)]
            await asyncio.gather(*lanes)
            self.done.set()
            await until_told.wait()
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _read(self, session: Session) -> None:
        async for notice in session.notices():
            self._ledger.hear(notice)
            await patiently(lambda notice=notice: session.acknowledge(notice))

    async def _delegate(self, session: Session, seed: str) -> None:
        for delegation in delegations(seed):
            if self._stopping.is_set():
                return
            namespace = self._app.settings.namespace
            run_id = run_id_for_call(namespace=namespace, session_id=session.id, call_id=delegation.id)
            entry = Entry(delegation, session.id, run_id)
            self._ledger.entries.append(entry)
            await self._carry_out(session, entry)

    async def _carry_out(self, session: Session, entry: Entry) -> None:
        delegation = entry.delegation
        is_background = delegation.purpose != "wait"
        arguments = {
            "description": delegation.id,
            "prompt": delegation.prompt,
            "run_in_background": is_background,
        }
        result = await self._call(session, "subagent", arguments, call_id=delegation.id)
        if result.code == "LIMIT_REACHED":
            entry.refused = result.text
            # As a model would: wait for one of those that are there.
            await asyncio.sleep(0.2)
            return
        entry.accepted = True
        if not is_background:
            entry.result = result
            return
        match delegation.purpose:
            case "hear":
                return
            case "kill by model":
                await asyncio.sleep(delegation.kill_after_seconds)
                killed = await self._call(session, "job_kill", {"job_id": entry.run_id})
                entry.killed_by_model = not killed.is_error
                if status_of(killed) in TERMINAL:
                    # It had already finished: the answer says how, so no notice needs to.
                    entry.read(status_of(killed))
                return
            case "kill by host":
                await asyncio.sleep(delegation.kill_after_seconds)
                await patiently(lambda: session.kill(entry.run_id))
                return
            case "kill by operator":
                await asyncio.sleep(delegation.kill_after_seconds)
                await patiently(lambda: kill(self._app.settings, entry.run_id, reason="chaos"))
                return
            case _:
                await self._collect(session, entry)

    async def _collect(self, session: Session, entry: Entry) -> None:
        arguments = {"job_id": entry.run_id, "wait": True, "timeout_ms": READ_MS}
        while True:
            result = await self._call(session, "job_output", arguments)
            status = status_of(result)
            if status in TERMINAL:
                entry.read(status)
                return

    async def _call(
        self, session: Session, tool: str, arguments: Mapping[str, Any], *, call_id: str | None = None
    ) -> ToolResult:
        """Repeated while it is not known whether it was accepted (README: by the same call id)."""
        while True:
            result = await session.call(tool, arguments, call_id=call_id, timeout=CALL_SECONDS)
            if result.code != "BROKER_UNAVAILABLE":
                return result
            self._ledger.repeated += 1
            await asyncio.sleep(0.05)


def status_of(result: ToolResult) -> str:
    """What a reading of a job says it is."""
    value = cast("dict[str, Any] | None", result.value)
    return str(value["job"]["status"]) if value else f"no job: {result.text}"


async def patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Again until Redis answers."""
    while True:
        with contextlib.suppress(BrokerUnavailable):
            return await ask()
        await asyncio.sleep(0.1)
