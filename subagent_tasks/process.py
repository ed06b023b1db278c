"""What every process has, host or worker: connections, the heartbeat, the doorbell and the sweeper.

Assembled here once; what a host or a worker adds is in their own files.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from broker_config import BrokerSettings
from subagent_tasks.delegation import Delegation
from subagent_tasks.protocol.keys import Keys
from subagent_tasks.protocol.ports import Ids, Publisher
from subagent_tasks.settling import Settler
from subagent_tasks.store.connection import Moves, connect
from subagent_tasks.store.doorbell import Doorbell
from subagent_tasks.store.heartbeat import Heartbeat
from subagent_tasks.store.processes import BeatAnswer, ProcessStore
from subagent_tasks.store.runs import RunStore
from subagent_tasks.store.sessions import SessionStore
from subagent_tasks.sweeper import Sweeper
from subagent_tasks.waiting import Waiting


def fresh_ids() -> Ids:
    """Random ids and the wall clock: what everything but a test uses."""
    return Ids(new=lambda: str(uuid.uuid4()), now_iso=lambda: datetime.now(UTC).isoformat())


class Process:
    """One living process of a namespace. Its id is new at every start."""

    def __init__(self, settings: BrokerSettings, *, role: str, publisher: Publisher, queues: Sequence[str]) -> None:
        self.settings = settings
        self.ids = fresh_ids()
        self.id = f"{role}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self.keys = Keys(settings.namespace)
        self.publisher = publisher
        self._client = connect(settings)
        moves = Moves(self._client, settings)
        lease_ms, retention_ms = int(settings.lease_seconds * 1000), int(settings.retention_seconds * 1000)
        self.runs = RunStore(
            moves,
            self.keys,
            retention_ms=retention_ms,
            slack_ms=lease_ms,
            max_notices=settings.max_pending_notices,
        )
        self.sessions = SessionStore(moves, self.keys, retention_ms=retention_ms)
        self.processes = ProcessStore(moves, self.keys, lease_ms=lease_ms)
        self.doorbell = Doorbell(settings)
        self.settler = Settler(runs=self.runs, publisher=publisher, settings=settings, ids=self.ids)
        self.delegation = Delegation(
            runs=self.runs, settler=self.settler, publisher=publisher, settings=settings, process_id=self.id
        )
        self.waiting = Waiting(
            runs=self.runs, doorbell=self.doorbell, keys=self.keys, recheck_seconds=settings.lease_seconds
        )
        self.sweeper = Sweeper(
            runs=self.runs,
            processes=self.processes,
            settler=self.settler,
            publisher=publisher,
            settings=settings,
            process_id=self.id,
            ids=self.ids,
            queues=queues,
        )
        self._heartbeat: Heartbeat | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False

    @property
    def is_running(self) -> bool:
        """Whether it beats and listens."""
        return self._heartbeat is not None and not self._is_stopping

    async def start(
        self,
        *,
        on_ring: Callable[[str], None] | None = None,
        on_beat: Callable[[BeatAnswer], None] = lambda _: None,
        on_outage: Callable[[], None] = lambda: None,
        on_stall: Callable[[], None] = lambda: None,
        on_pulse: Callable[[], None] = lambda: None,
    ) -> None:
        """Prove life once, then go on proving it. Raises `BrokerUnavailable` when Redis does not answer."""
        try:
            await self.processes.beat(self.id)
            await self.doorbell.listen(
                self.keys.process_channel(self.id), lambda run_id: on_ring(run_id) if on_ring and run_id else None
            )
        except BaseException:
            await self.doorbell.close()
            await self._client.aclose()
            raise
        self._heartbeat = Heartbeat(
            self.settings,
            self.keys,
            process_id=self.id,
            on_beat=on_beat,
            on_outage=on_outage,
            on_stall=on_stall,
            on_pulse=on_pulse,
        )
        self._heartbeat.start()
        self._tasks = [
            asyncio.create_task(self.sweeper.run(), name="subagent-tasks-sweeper"),
            asyncio.create_task(self.waiting.run(), name="subagent-tasks-waiting"),
        ]

    async def stop(self) -> None:
        """Stop everything and leave; idempotent. What this process still drives is left to the sweepers."""
        self._is_stopping = True
        # While Redis can still be asked: a foreground run goes with its caller.
        await self.waiting.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self.delegation.close()
        if self._heartbeat is not None:
            await asyncio.to_thread(self._heartbeat.stop)
            self._heartbeat = None
            with contextlib.suppress(Exception):
                await self.processes.retire(self.id, on_behalf="self")
        await self.doorbell.close()
        await self._client.aclose()
