"""Finding what was lost: runs of silent workers and of lost callers, messages nobody will ever receive, descendants of
what ended, alarms that are due, indexes of what expired.

One loop, one testable step. Every process sweeps, one at a time; each finding is a move of its own that checks again,
so a sweeper that dies or is late changes nothing wrongly.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from broker_config import BrokerSettings
from subagent_tasks.errors import BrokerUnavailable, UnsupportedVersion
from subagent_tasks.logs import event_logger
from subagent_tasks.protocol.leases import CALLER_LOST, WORKER_LOST, after_worker_loss, is_lost_in_queue
from subagent_tasks.protocol.models import Outcome
from subagent_tasks.protocol.outcomes import outcome_of
from subagent_tasks.protocol.ports import Ids, Publisher
from subagent_tasks.protocol.records import RunRecord
from subagent_tasks.settling import Settler
from subagent_tasks.store.processes import ProcessStore, Sweep
from subagent_tasks.store.runs import Lease, RunStore

logger = event_logger(__name__)


@dataclass(slots=True)
class Swept:
    """What one sweep did. `ran` is False when another process sweeps, or the server was away a moment ago."""

    ran: bool = False
    requeued: int = 0
    settled: int = 0
    republished: int = 0
    abandoned: int = 0
    woken: int = 0
    forgotten: int = 0


class Sweeper:
    """Sweeps one namespace. `queues` are the queues whose work this process knows of."""

    def __init__(
        self,
        *,
        runs: RunStore,
        processes: ProcessStore,
        settler: Settler,
        publisher: Publisher,
        settings: BrokerSettings,
        process_id: str,
        ids: Ids,
        queues: Sequence[str],
    ) -> None:
        self._runs = runs
        self._processes = processes
        self._settler = settler
        self._publisher = publisher
        self._settings = settings
        self._process_id = process_id
        self._ids = ids
        self._queues = tuple(queues)

    async def run(self) -> None:
        """Sweep every third of a lease, for ever. A sweep that fails is logged and the next one tries again."""
        interval_seconds = self._settings.lease_seconds / 3
        while True:
            await asyncio.sleep(interval_seconds)
            try:
                await self.sweep_once()
            except BrokerUnavailable:
                continue
            except Exception as error:
                logger.error("sweep failed", extra={"error": type(error).__name__})

    async def sweep_once(self) -> Swept:
        """Look once at everything that may have been lost."""
        swept = Swept()
        # Half a lease: a sweeper that dies must not keep the others from finding the dead within two leases.
        sweep = await self._processes.guard(self._process_id, hold_ms=int(self._settings.lease_seconds * 500))
        if sweep is None:
            return swept
        swept.ran = True
        for process in sweep.dead:
            for run_id in await self._processes.driven_by(process):
                await self._each(self._recover(run_id, process, swept), run_id=run_id)
            for run_id in await self._runs.held_by(process):
                await self._each(self._abandon(run_id, process, swept), run_id=run_id)
            await self._processes.retire(process, on_behalf="sweeper")
        for run_id in sweep.cascading:
            await self._each(self._settler.cascade(run_id), run_id=run_id)
        for run_id, alarm_ms in sweep.alarms:
            await self._each(self._wake(run_id, alarm_ms, swept), run_id=run_id)
        for queue in self._queues:
            await self._each(self._republish(queue, sweep, swept), queue=queue)
        if swept.republished:
            logger.warning("messages were lost and sent again", extra={"count": swept.republished})
        for expiry in sweep.expired:
            await self._each(self._forget(expiry, swept), expiry=expiry)
        return swept

    async def _each(self, finding: Coroutine[Any, Any, None], **what: str) -> None:
        """One finding: what is wrong with it must not keep the others from being recovered (P6)."""
        try:
            await finding
        except BrokerUnavailable:
            raise
        except UnsupportedVersion:
            logger.warning("run left to a newer process", extra=what)
        except Exception as error:
            logger.error("sweeping this one failed", extra={**what, "error": type(error).__name__})

    async def _recover(self, run_id: str, process: str, swept: Swept) -> None:
        record = await self._runs.get(run_id)
        queue = record.spec.queue if record else ""
        if record is None or record.worker != process:
            # Left behind by a claim that took the run over: this only clears the leftover.
            await self._runs.reclaim(Lease(run_id, -1, process), queue=queue, message="")
            return
        verdict = after_worker_loss(
            attempt=record.attempt,
            max_attempts=self._settings.max_attempts,
            may_resume=record.spec.may_resume,
            killed=record.kill is not None,
        )
        lease = Lease(run_id, record.token, process)
        match verdict:
            case "resume":
                task_id = self._ids.new()
                message = self._publisher.message(run_id, queue=queue, task_id=task_id)
                if await self._runs.reclaim(lease, queue=queue, message=message) == "requeued":
                    await self._publisher.publish(run_id, queue=queue, task_id=task_id)
                    swept.requeued += 1
                    logger.warning("run requeued: its worker is gone", extra={"run_id": run_id, "worker": process})
            case "kill":
                await self._settle(record, lease, outcome_of(None, kill_reason=record.kill_reason), swept)
            case "fail":
                await self._settle(record, lease, outcome_of(None, error=WORKER_LOST), swept)

    async def _settle(self, record: RunRecord, lease: Lease, outcome: Outcome, swept: Swept) -> None:
        if await self._settler.settle(record, lease, outcome, on_behalf="sweeper") == "settled":
            swept.settled += 1
            logger.warning("run settled: its worker is gone", extra={"run_id": record.id, "status": outcome.status})

    async def _abandon(self, run_id: str, process: str, swept: Swept) -> None:
        """A foreground run belongs to its caller: end it once that has been silent for two leases."""
        record = await self._runs.get(run_id)
        is_asked = record is not None and record.kill is not None
        word = "" if is_asked else await self._settler.kill(run_id, reason=CALLER_LOST, lost_caller=process)
        if word in ("killed", "requested"):
            swept.abandoned += 1
            logger.warning("run ended: its caller is gone", extra={"run_id": run_id, "caller": process})
        await self._runs.unhold(run_id, caller=process)

    async def _wake(self, run_id: str, alarm_ms: int, swept: Swept) -> None:
        record = await self._runs.get(run_id)
        queue = record.spec.queue if record else ""
        task_id = self._ids.new()
        message = self._publisher.message(run_id, queue=queue, task_id=task_id)
        if await self._runs.wake(run_id, queue=queue, alarm_ms=alarm_ms, message=message) == "woken":
            await self._publisher.publish(run_id, queue=queue, task_id=task_id)
            swept.woken += 1

    async def _forget(self, expiry: str, swept: Swept) -> None:
        owner, run_id = json.loads(expiry)
        await self._runs.forget(run_id, owner=owner, expiry=expiry)
        swept.forgotten += 1

    async def _republish(self, queue: str, sweep: Sweep, swept: Swept) -> None:
        waiting = await self._runs.queued(queue)
        if not waiting:
            return
        overtaken = await self._runs.overtaken_before_ms(queue, now_ms=sweep.now_ms)
        is_empty = await self._publisher.is_empty(queue)
        if is_empty is None:
            is_empty = await self._runs.queue_length(queue) == 0
        for run_id, since_ms in waiting:
            if not is_lost_in_queue(
                since_ms=since_ms,
                now_ms=sweep.now_ms,
                slack_ms=int(self._settings.lease_seconds * 1000),
                overtaken_before_ms=overtaken,
                queue_is_empty=is_empty,
            ):
                continue
            task_id = self._ids.new()
            message = self._publisher.message(run_id, queue=queue, task_id=task_id)
            word = await self._runs.republish(run_id, queue=queue, since_ms=since_ms, message=message)
            if word == "republished":
                await self._publisher.publish(run_id, queue=queue, task_id=task_id)
                swept.republished += 1
                logger.info("message sent again", extra={"run_id": run_id, "queue": queue})
