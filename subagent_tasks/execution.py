"""Driving: what a worker does with the runs it claims, from the claim to the settlement.

The child itself is run by an `Attempt`. What an outcome means is decided in `protocol.outcomes`, who may go on after a
loss in `protocol.leases`; here it is carried out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from broker_config import BrokerSettings
from subagent_tasks.attempt import Attempt
from subagent_tasks.drive import LeasedDrive, persist
from subagent_tasks.errors import BrokerUnavailable, DriveStopped, SubagentError
from subagent_tasks.logs import event_logger
from subagent_tasks.protocol.interfaces import ChildTools, Provider
from subagent_tasks.protocol.leases import WORKER_LOST, after_worker_loss, beat_interval_seconds
from subagent_tasks.protocol.models import Outcome
from subagent_tasks.protocol.outcomes import DEFAULT_KILL_REASON, limited, outcome_of
from subagent_tasks.protocol.ports import Ids, Publisher, RunListener
from subagent_tasks.protocol.records import RunRecord
from subagent_tasks.settling import Settler
from subagent_tasks.store.runs import Lease, RunStore

logger = event_logger(__name__)


RELEASE_SHARE = 0.8
"""How much of a worker's grace its runs get to be handed back in; the rest is for the activations to return."""

FUNCTION_SHARE = 0.6
"""How much of it a plain function may take to end; the rest is for its result and the release."""

ToolsOf = Callable[[LeasedDrive], AbstractAsyncContextManager[ChildTools]]
"""Makes the tools of the child that is driven, for as long as it is."""


class Executor:
    """Drives runs in this process, any number at once on one event loop."""

    def __init__(
        self,
        *,
        runs: RunStore,
        providers: Mapping[str, Provider],
        tools_of: ToolsOf,
        settler: Settler,
        publisher: Publisher,
        settings: BrokerSettings,
        process_id: str,
        ids: Ids,
        listener: RunListener | None = None,
    ) -> None:
        self._runs = runs
        self._providers = providers
        self._tools_of = tools_of
        self._settler = settler
        self._publisher = publisher
        self._settings = settings
        self._process_id = process_id
        self._ids = ids
        self._listener = listener
        # run id -> its drive; None while the claim is under way.
        self._drives: dict[str, LeasedDrive | None] = {}
        # Runs whose message came while they were driven here: a woken one may be back before its last drive has let go.
        self._called_again: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._releasing = False
        self._leftovers: frozenset[str] = frozenset()
        self._missed_beats: dict[str, int] = {}
        self._background: set[asyncio.Task[None]] = set()

    async def activate(self, run_id: str, queue: str) -> None:
        """Handle one Celery message: drive the run if it is there to be driven, else do nothing. Never raises."""
        # A run that was suspended, or lost and found, may be back before its last drive here has cleaned up.
        if run_id in self._drives:
            self._called_again.add(run_id)
            return
        is_called = True
        # Leaving, it takes nothing: the sweeper sends the message again.
        while is_called and not self._releasing:
            await self._activate(run_id, queue)
            is_called = run_id in self._called_again
            self._called_again.discard(run_id)

    async def _activate(self, run_id: str, queue: str) -> None:
        # Registered before the claim is sent: a beat in between must not take it for a leftover.
        self._drives[run_id] = None
        self._idle.clear()
        claim_id = self._ids.new()
        try:
            claimed = await self._claim(run_id, queue, claim_id=claim_id)
            if isinstance(claimed, RunRecord):
                await self._drive(claimed, attempt_id=claim_id)
            elif claimed not in ("settled", "driven"):
                logger.info("nothing to claim", extra={"run_id": run_id, "why": claimed})
        except BrokerUnavailable:
            logger.warning("run left to the sweeper: redis does not answer", extra={"run_id": run_id})
        except SubagentError as error:
            logger.warning("run not driven", extra={"run_id": run_id, "code": error.code})
        except Exception as error:
            # The type alone: a message may quote what the run was about.
            logger.error("drive failed", extra={"run_id": run_id, "error": type(error).__name__})
        finally:
            del self._drives[run_id]
            self._missed_beats.pop(run_id, None)
            if not self._drives:
                self._idle.set()

    def ring(self, run_id: str) -> None:
        """A kill was requested for a run that this process may drive."""
        drive = self._drives.get(run_id)
        if drive is not None:
            drive.stop("kill")

    def on_beat(self, *, flagged: frozenset[str], driven: frozenset[str]) -> None:
        """Reconcile with what a heartbeat learned: kills, runs taken away, and claims that nobody here remembers.

        Both kinds of difference must stand for two beats: a claim or a settlement may be under way.
        """
        for run_id in flagged:
            self.ring(run_id)
        for run_id, drive in self._drives.items():
            missed = self._missed_beats.get(run_id, 0) + 1 if drive is not None and run_id not in driven else 0
            self._missed_beats[run_id] = missed
            if drive is not None and missed >= 2:
                drive.stop("stale")
        leftovers = driven - self._drives.keys()
        for run_id in leftovers & self._leftovers:
            self._spawn(self._hand_back(run_id))
        self._leftovers = leftovers

    def on_outage(self) -> None:
        """No beat was answered for two leases: others may drive our runs by now, so none goes on here."""
        for drive in self._drives.values():
            if drive is not None:
                drive.stop("stale")

    async def release_all(self) -> None:
        """Hand every run back to the queue (shutdown). Bounded: what takes longer is left to the sweeper."""
        self._releasing = True
        for drive in self._drives.values():
            if drive is not None:
                drive.stop("release")
        count = len(self._drives)
        if count:
            logger.info("handing runs back to the queue", extra={"count": count})
        try:
            async with asyncio.timeout(RELEASE_SHARE * self._settings.shutdown_grace_seconds):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("runs left to the sweeper: not handed back in time", extra={"count": len(self._drives)})
        else:
            logger.info("all runs handed back", extra={"count": count})

    @property
    def _patience_seconds(self) -> float:
        return 2 * self._settings.lease_seconds

    async def _claim(self, run_id: str, queue: str, *, claim_id: str) -> RunRecord | str:
        """Claim the run, or say why there is nothing to do."""
        deadline = asyncio.get_running_loop().time() + self._patience_seconds
        while True:
            claimed = await persist(
                lambda: self._runs.claim(run_id, queue=queue, worker=self._process_id, claim_id=claim_id),
                patience_seconds=self._patience_seconds,
            )
            # After an outage a message may be here before this process's next beat. Dropped, it would be the
            # sweeper's to find, a lease later.
            if claimed != "no_heartbeat" or self._releasing or asyncio.get_running_loop().time() > deadline:
                return claimed
            await asyncio.sleep(beat_interval_seconds(self._settings.lease_seconds) / 4)

    async def _drive(self, record: RunRecord, *, attempt_id: str) -> None:
        lease = Lease(record.id, record.token, self._process_id)
        verdict = "resume"
        if record.kill is not None:
            verdict = "kill"
        elif record.attempt > 0:
            verdict = after_worker_loss(
                attempt=record.attempt - 1,
                max_attempts=self._settings.max_attempts,
                may_resume=record.spec.may_resume,
                killed=False,
            )
        match verdict:
            case "kill":
                await self._settle(
                    record, lease, outcome_of(None, kill_reason=record.kill_reason or DEFAULT_KILL_REASON)
                )
                return
            case "fail":
                await self._settle(record, lease, outcome_of(None, error=WORKER_LOST))
                return
            case _:
                pass

        drive = LeasedDrive(record, lease, runs=self._runs, settings=self._settings)
        self._drives[record.id] = drive
        if self._releasing:
            drive.stop("release")
        async with self._tools_of(drive) as tools:
            drive.tools = tools
            await self._attempt(record, lease, drive, attempt_id=attempt_id)

    async def _attempt(self, record: RunRecord, lease: Lease, drive: LeasedDrive, *, attempt_id: str) -> None:
        attempt = Attempt(
            record,
            drive,
            provider=self._providers.get(record.spec.provider),
            runs=self._runs,
            patience_seconds=self._patience_seconds,
            function_grace_seconds=FUNCTION_SHARE * self._settings.shutdown_grace_seconds,
            spawn=self._spawn,
        )
        # What was suspended or handed back goes on: its beginning was told.
        has_started = record.episode != attempt_id

        def on_start() -> None:
            nonlocal has_started
            if not has_started:
                has_started = True
                self._tell_started(record, attempt_id)

        try:
            outcome = limited(await attempt.outcome(on_start), max_output_bytes=self._settings.max_output_bytes)
        except DriveStopped as stopped:
            match stopped.reason:
                case "kill":
                    outcome = await self._end_killed(record, lease)
                case "release":
                    outcome = await self._let_go(
                        record, lease, begun=drive.has_begun, is_told=has_started, why="the worker shut down"
                    )
                case "suspend":
                    logger.info("run suspended: it waits for its own", extra={"run_id": record.id})
                    outcome = None
                case _:
                    logger.warning("run lost to another worker", extra={"run_id": record.id})
                    outcome = None
        else:
            outcome = outcome if await self._settle(record, lease, outcome) else None
        if has_started and outcome is not None:
            self._tell_ended(record, record.episode, outcome)

    async def _let_go(
        self, record: RunRecord, lease: Lease, *, begun: bool, why: str, is_told: bool = False
    ) -> Outcome | None:
        """Hand a run back. One that had begun and may not resume ends here: its effects must not be repeated (P7).

        The outcome it was settled with, or None when it goes on elsewhere.
        """
        if begun and not record.spec.may_resume:
            outcome = outcome_of(None, error=why)
            return outcome if await self._settle(record, lease, outcome) else None
        if await self._release(lease, queue=record.spec.queue, is_told=is_told) == "stop":
            return await self._end_killed(record, lease)
        return None

    async def _end_killed(self, record: RunRecord, lease: Lease) -> Outcome | None:
        now = await persist(lambda: self._runs.get(record.id), patience_seconds=self._patience_seconds)
        outcome = outcome_of(None, kill_reason=(now.kill_reason if now else None) or DEFAULT_KILL_REASON)
        return outcome if await self._settle(record, lease, outcome) else None

    async def _settle(self, record: RunRecord, lease: Lease, outcome: Outcome) -> bool:
        """Settle the run; whether this outcome is the one that counts."""
        # A task of its own: whatever cancels this drive now must not cut the settlement in half.
        settling = asyncio.ensure_future(self._settler.settle(record, lease, outcome, on_behalf="driver"))
        word = await asyncio.shield(settling)
        if word == "settled":
            fields = {"run_id": record.id, "status": outcome.status, "stop_reason": outcome.stop_reason}
            logger.info("run settled", extra={**fields, "provider": record.spec.provider})
        else:
            logger.warning("outcome refused", extra={"run_id": record.id, "why": word})
        return word == "settled"

    async def _hand_back(self, run_id: str) -> None:
        try:
            await self._hand_back_once(run_id)
        except Exception as error:
            # The next beat tries again. The type alone, as above.
            logger.warning("run not handed back", extra={"run_id": run_id, "error": type(error).__name__})

    async def _hand_back_once(self, run_id: str) -> None:
        record = await self._runs.get(run_id)
        if run_id in self._drives:
            return
        if record is None or record.worker != self._process_id:
            # Another worker's claim took it while this process was silent: only the entry here is left to clear.
            queue = record.spec.queue if record else ""
            await self._runs.reclaim(Lease(run_id, -1, self._process_id), queue=queue, message="")
            return
        lease = Lease(run_id, record.token, self._process_id)
        await self._let_go(record, lease, begun=record.seq > 0, why=f"{WORKER_LOST}: Redis was away for too long")

    async def _release(self, lease: Lease, *, queue: str, is_told: bool) -> str:
        task_id = self._ids.new()
        message = self._publisher.message(lease.run_id, queue=queue, task_id=task_id)
        word = await persist(
            lambda: self._runs.release(lease, queue=queue, message=message, is_told=is_told),
            patience_seconds=self._patience_seconds,
        )
        if word == "released":
            await self._publisher.publish(lease.run_id, queue=queue, task_id=task_id)
        return word

    def _tell_started(self, record: RunRecord, attempt_id: str) -> None:
        if self._listener is not None:
            self._listener.started(record, attempt_id=attempt_id)

    def _tell_ended(self, record: RunRecord, attempt_id: str, outcome: Outcome) -> None:
        if self._listener is not None:
            self._listener.ended(record, attempt_id=attempt_id, outcome=outcome)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
