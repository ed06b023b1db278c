"""Ending runs: the settlement or kill of one, and what follows from it. Drivers, sweepers and kills all end runs here.

What an ending says is decided in `protocol.endings`, whether it counts in the scripts. What follows is written down by
the same scripts: an owner that goes on is queued already, descendants that must end are in the `cascade` set. Following
up here makes it quick; a process that dies before it has done so costs time, since every sweeper does the same.
"""

from __future__ import annotations

import contextlib
from typing import Literal, cast

from broker_config import BrokerSettings
from subagent_tasks.drive import persist
from subagent_tasks.errors import BrokerUnavailable
from subagent_tasks.logs import event_logger
from subagent_tasks.protocol.endings import EndingWriter
from subagent_tasks.protocol.models import Outcome
from subagent_tasks.protocol.outcomes import DEFAULT_KILL_REASON, OWNER_DISPOSED, outcome_of
from subagent_tasks.protocol.ports import Ids, Publisher
from subagent_tasks.protocol.records import RunRecord
from subagent_tasks.store.runs import Ended, KillWord, Lease, RunStore

logger = event_logger(__name__)


class Settler:
    """Ends runs of one namespace."""

    def __init__(self, *, runs: RunStore, publisher: Publisher, settings: BrokerSettings, ids: Ids) -> None:
        self._runs = runs
        self._publisher = publisher
        self._settings = settings
        self._ids = ids
        self._endings = EndingWriter(ids.now_iso, settings.max_inline_bytes)

    async def settle(
        self, record: RunRecord, lease: Lease, outcome: Outcome, *, on_behalf: Literal["driver", "sweeper"]
    ) -> str:
        """Settle a driven run: `settled`, `already`, `stale` or `unknown`. Waits out a short outage of Redis."""
        ending = self._endings.write(record, outcome, settle_id=f"{on_behalf}:{lease.token}")
        task_id, message = self._wake_message(record)
        ended = await persist(
            lambda: self._runs.settle(record, lease, on_behalf=on_behalf, ending=ending, wake_message=message),
            patience_seconds=2 * self._settings.lease_seconds,
        )
        await self._follow_up(record, ended, task_id=task_id)
        return ended.word

    async def kill(
        self,
        run_id: str,
        *,
        authority: str = "",
        reason: str | None,
        by_owner_model: bool = False,
        lost_caller: str = "",
    ) -> KillWord:
        """Ask a run to end, and all below it: settled at once if nobody drives it, else its driver is rung.

        `authority` is the session that must own the run; empty for an operator. `by_owner_model` says that the owner's
        model asked, so it needs no notice of the killing. `lost_caller` is the process that waited for it: the kill
        holds only if that has been silent for two leases and nobody else waits.
        """
        record = await self._runs.get(run_id)
        if record is None:
            return "unknown"
        if authority and record.owner != authority:
            return "unauthorized"
        why = reason or DEFAULT_KILL_REASON
        kill_id = self._ids.new()
        ending = self._endings.write(record, outcome_of(None, kill_reason=why), settle_id=f"kill:{kill_id}")
        task_id, message = self._wake_message(record)
        ended = await self._runs.kill(
            record,
            kill_id=kill_id,
            reason=why,
            authority=authority,
            told="kill" if by_owner_model else "",
            ending=ending,
            wake_message=message,
            lost_caller=lost_caller,
            lease_ms=int(self._settings.lease_seconds * 1000),
        )
        await self._follow_up(record, ended, task_id=task_id)
        return cast("KillWord", ended.word)

    async def cascade(self, run_id: str) -> None:
        """Kill what a run had started and is unsettled still; each kill goes on from there by itself."""
        for started in await self._runs.unsettled(run_id):
            try:
                await self.kill(started, reason=OWNER_DISPOSED)
            except BrokerUnavailable:
                raise
            except Exception as error:
                # One that only a newer process can read, or nobody, must keep neither the others from ending nor what
                # has ended from being told (P6).
                logger.warning("run not ended with its owner", extra={"run_id": started, "error": type(error).__name__})
        await self._runs.cascaded(run_id)

    def _wake_message(self, record: RunRecord) -> tuple[str, str]:
        """The id and text of the Celery message by which an owner that is a child goes on; both empty for others."""
        if record.spec.owner_queue is None:
            return "", ""
        task_id = self._ids.new()
        return task_id, self._publisher.message(record.owner, queue=record.spec.owner_queue, task_id=task_id)

    async def _follow_up(self, record: RunRecord, ended: Ended, *, task_id: str) -> None:
        if ended.wakes_owner and record.spec.owner_queue is not None:
            await self._publisher.publish(record.owner, queue=record.spec.owner_queue, task_id=task_id)
        if ended.is_held:
            # Left undone it is the sweeper's, once that caller is gone.
            with contextlib.suppress(BrokerUnavailable):
                if (now := await self._runs.get(record.id)) is not None:
                    await self._runs.unhold(record.id, caller=now.caller)
        if ended.cascades:
            # The sweepers know of it too.
            with contextlib.suppress(BrokerUnavailable):
                await self.cascade(record.id)
