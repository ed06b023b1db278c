"""One executor over a server, without Celery: a test hands it messages and beats, and looks at what came of a run.

The child is a provider made of two functions, so that a test says in its own lines what goes wrong.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

from broker_config import BrokerSettings, queue_name
from subagent_tasks.delegation import Delegation
from subagent_tasks.execution import Executor
from subagent_tasks.process import fresh_ids
from subagent_tasks.protocol.interfaces import Drive, Provider, Run
from subagent_tasks.protocol.keys import Keys
from subagent_tasks.protocol.models import ChildRequest, ChildResult, Outcome, text_block
from subagent_tasks.protocol.records import RunRecord, RunSpec
from subagent_tasks.queue.publisher import ScriptPublisher
from subagent_tasks.settling import Settler
from subagent_tasks.store.connection import Moves, connect
from subagent_tasks.store.processes import ProcessStore
from subagent_tasks.store.runs import RunStore
from subagent_tasks.store.sessions import SessionStore
from subagent_tasks.sweeper import Sweeper
from subagent_tasks.toolbox import Toolbox

OWNER = "owner"


def done(text: str = "done") -> ChildResult:
    return ChildResult(stop_reason="completed", output=(text_block(text),))


class MadeRun:
    """A child whose end is a coroutine function's."""

    def __init__(self, result: Callable[[], Awaitable[Any]]) -> None:
        self._result = result
        self.disposed = 0

    async def result(self) -> ChildResult:
        return cast("ChildResult", await self._result())

    async def cancel(self, reason: str) -> None:
        pass

    async def dispose(self) -> None:
        self.disposed += 1


class MadeProvider(Provider):
    """Starts whatever `make` gives for a drive, and counts how often."""

    name = "made"

    def __init__(self, make: Callable[[Drive], Awaitable[Any]], *, resumable: bool = True) -> None:
        self._make = make
        self.resumable = resumable
        self.starts = 0

    async def start(self, request: ChildRequest, drive: Drive) -> Run:
        self.starts += 1
        return cast("Run", await self._make(drive))


@dataclass
class Told:
    """The events of an executor."""

    started_runs: list[str] = field(default_factory=list[str])
    ended_runs: list[str] = field(default_factory=list[str])

    def started(self, record: RunRecord, *, attempt_id: str) -> None:
        self.started_runs.append(record.id)

    def ended(self, record: RunRecord, *, attempt_id: str, outcome: Outcome) -> None:
        self.ended_runs.append(record.id)


class Stage:
    """An executor of one process, with the stores under it."""

    def __init__(self, url: str, provider: MadeProvider, **settings: Any) -> None:
        self.settings = BrokerSettings(broker_url=url, namespace=f"test-{uuid.uuid4().hex[:12]}", **settings)
        self.keys = Keys(self.settings.namespace)
        self.client = connect(self.settings)
        moves = Moves(self.client, self.settings)
        lease_ms, retention_ms = int(self.settings.lease_seconds * 1000), int(self.settings.retention_seconds * 1000)
        self.runs = RunStore(
            moves,
            self.keys,
            retention_ms=retention_ms,
            slack_ms=lease_ms,
            max_notices=self.settings.max_pending_notices,
        )
        self.sessions = SessionStore(moves, self.keys, retention_ms=retention_ms)
        self.processes = ProcessStore(moves, self.keys, lease_ms=lease_ms)
        self.publisher, self.ids = ScriptPublisher(), fresh_ids()
        self.provider, self.told, self.process_id = provider, Told(), "worker-1"
        self.settler = Settler(runs=self.runs, publisher=self.publisher, settings=self.settings, ids=self.ids)
        self.delegation = Delegation(
            runs=self.runs,
            settler=self.settler,
            publisher=self.publisher,
            settings=self.settings,
            process_id="host-1",
        )
        self.queue = queue_name(self.settings.namespace, provider.name)
        self.executor = Executor(
            runs=self.runs,
            providers={provider.name: provider},
            tools_of=lambda _: nullcontext(Toolbox()),
            settler=self.settler,
            publisher=self.publisher,
            settings=self.settings,
            process_id=self.process_id,
            ids=self.ids,
            listener=self.told,
        )

    def sweeper(self) -> Sweeper:
        return Sweeper(
            runs=self.runs,
            processes=self.processes,
            settler=self.settler,
            publisher=self.publisher,
            settings=self.settings,
            process_id="host-1",
            ids=self.ids,
            queues=[self.queue],
        )

    async def accept(self, run_id: str, *, prompt: str = "do it", run_limit_seconds: float = 60) -> None:
        """Admit a job of the owner's."""
        spec = RunSpec(
            provider=self.provider.name,
            queue=self.queue,
            label="a task",
            request=ChildRequest(label="a task", prompt=prompt, max_depth=1),
            may_resume=self.provider.resumable,
            run_limit_seconds=run_limit_seconds,
        )
        await self.delegation.start(run_id, owner=OWNER, mode="background", spec=spec)

    async def beat(self) -> None:
        """One heartbeat, told to the executor."""
        answer = await self.processes.beat(self.process_id)
        self.executor.on_beat(flagged=answer.flagged, driven=answer.driven)

    async def record(self, run_id: str) -> RunRecord:
        record = await self.runs.get(run_id)
        assert record is not None
        return record

    async def is_settled(self, run_id: str) -> bool:
        return (await self.record(run_id)).is_settled

    async def outcome(self, run_id: str) -> Outcome:
        record = await self.record(run_id)
        assert record.outcome is not None, record.state
        return record.outcome


@asynccontextmanager
async def driving(url: str, provider: MadeProvider, **settings: Any) -> AsyncGenerator[Stage]:
    """A stage with an open owner's session and a living worker."""
    stage = Stage(url, provider, **settings)
    try:
        await stage.sessions.open(OWNER)
        await stage.beat()
        yield stage
    finally:
        # A Celery result carries no namespace: what is left driven must not be found by another test.
        await stage.client.flushdb()
        await stage.client.aclose()
