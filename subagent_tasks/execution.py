"""Driving: what a worker does with one run, from its claim to its settlement.

Claim, take the input, let the provider run the child, release it, settle. What an outcome means is decided in
`protocol.outcomes`, who may go on after a loss in `protocol.leases`; here it is carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping
from typing import Any

from broker_config import BrokerSettings
from subagent_tasks.drive import LeasedDrive, persist
from subagent_tasks.errors import BrokerUnavailable, DriveStopped, SubagentError
from subagent_tasks.protocol.endings import EndingWriter
from subagent_tasks.protocol.interfaces import ChildTools, Provider, Run
from subagent_tasks.protocol.leases import WORKER_LOST, after_worker_loss
from subagent_tasks.protocol.models import ChildRequest, ChildResult, Outcome
from subagent_tasks.protocol.outcomes import DEFAULT_KILL_REASON, limited, outcome_of, stringified
from subagent_tasks.protocol.ports import Ids, Publisher, RunListener
from subagent_tasks.protocol.records import RunRecord
from subagent_tasks.store.runs import Lease, RunStore

logger = logging.getLogger(__name__)

CANCEL_SECONDS = 10.0
"""How long a provider may take to end after a cancel; then its task is cancelled."""

DISPOSE_SECONDS = 30.0
"""How long a provider may take to release what it holds; then the release counts as failed."""


class Executor:
    """Drives runs in this process, any number at once on one event loop."""

    def __init__(
        self,
        *,
        runs: RunStore,
        providers: Mapping[str, Provider],
        tools: ChildTools,
        publisher: Publisher,
        settings: BrokerSettings,
        process_id: str,
        ids: Ids,
        listener: RunListener | None = None,
    ) -> None:
        self._runs = runs
        self._providers = providers
        self._tools = tools
        self._publisher = publisher
        self._settings = settings
        self._process_id = process_id
        self._ids = ids
        self._endings = EndingWriter(ids.now_iso, settings.max_inline_bytes)
        self._listener = listener
        # run id -> its drive; None while the claim is under way.
        self._drives: dict[str, LeasedDrive | None] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._releasing = False
        self._leftovers: frozenset[str] = frozenset()
        self._missed_beats: dict[str, int] = {}
        self._background: set[asyncio.Task[None]] = set()

    async def activate(self, run_id: str, queue: str) -> None:
        """Handle one Celery message: drive the run if it is there to be driven, else do nothing. Never raises."""
        if run_id in self._drives or self._releasing:
            # Not ours to start: a double message, or this worker is leaving and the sweeper sends the message again.
            return
        # Registered before the claim is sent: a beat in between must not take it for a leftover.
        self._drives[run_id] = None
        self._idle.clear()
        claim_id = self._ids.new()
        try:
            claimed = await persist(
                lambda: self._runs.claim(run_id, queue=queue, worker=self._process_id, claim_id=claim_id),
                patience_seconds=self._patience_seconds,
            )
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

    async def release_all(self, *, timeout_seconds: float) -> None:
        """Hand every run back to the queue (shutdown). Bounded: what takes longer is left to the sweeper."""
        self._releasing = True
        for drive in self._drives.values():
            if drive is not None:
                drive.stop("release")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()

    @property
    def _patience_seconds(self) -> float:
        return 2 * self._settings.lease_seconds

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

        drive = LeasedDrive(record, lease, runs=self._runs, tools=self._tools, settings=self._settings)
        self._drives[record.id] = drive
        if self._releasing:
            drive.stop("release")
        has_started = False
        try:
            begun = await self._begin(record, drive)
            if isinstance(begun, Outcome):
                outcome = begun
            else:
                # Only now: a start that fails has no events (behaviour §9).
                has_started = True
                self._tell_started(record, attempt_id)
                outcome = await self._outcome(record, drive, begun)
        except DriveStopped as stopped:
            outcome = await self._give_up(record, lease, stopped.reason)
        else:
            await self._settle(record, lease, outcome)
        if has_started and outcome is not None:
            self._tell_ended(record, attempt_id, outcome)

    async def _begin(self, record: RunRecord, drive: LeasedDrive) -> Run | Outcome:
        """Start the child, or say how the run ended without one. Raises `DriveStopped` as `_outcome` does."""
        provider = self._providers.get(record.spec.provider)
        if provider is None:
            return outcome_of(
                None,
                error=f'no subagent provider registered for "{record.spec.provider}" on this worker: '
                "declare it in the app the worker runs",
            )
        request = await self._request(record, drive)
        if request is None:
            return outcome_of(None, error="the run's prompt is missing from its inbox: it was removed from outside")

        async def starting() -> Run:
            # In a task of its own, so that whatever a provider raises, at whatever moment, is an outcome.
            return await provider.start(request, drive)

        return await self._start(record, drive, starting())

    async def _start(self, record: RunRecord, drive: LeasedDrive, starting: Coroutine[Any, Any, Run]) -> Run | Outcome:
        """Await a provider's start. What stops the drive cancels it, and the provider cleans up (behaviour §2.10)."""
        start = asyncio.ensure_future(starting)
        stop = asyncio.ensure_future(drive.stop_requested.wait())
        try:
            await asyncio.wait(
                {start, stop}, timeout=record.spec.run_limit_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if not start.done():
                drive.stop("limit")  # no effect when something else stopped it
                start.cancel()
                await asyncio.wait({start}, timeout=CANCEL_SECONDS)
        except asyncio.CancelledError:
            start.cancel()
            raise
        finally:
            stop.cancel()
        error: BaseException | None
        if not start.done():
            self._spawn(_dispose_late(start))
            error = SubagentError(f"the provider did not give up its start within {CANCEL_SECONDS:g} s")
        else:
            error = asyncio.CancelledError() if start.cancelled() else start.exception()
        if error is None:
            return start.result()
        if isinstance(error, DriveStopped):
            raise error
        if drive.stopped in ("stale", "release"):
            raise DriveStopped(drive.stopped)
        if drive.stopped == "limit":
            return outcome_of(ChildResult(stop_reason="error", diagnostic=_limit_reached(record)))
        # Several errors in one, or no answer at all: the cleaning up failed, which a kill must not hide.
        left_something = not start.done() or isinstance(error, BaseExceptionGroup)
        return outcome_of(
            None,
            error=stringified(error),
            kill_reason=await self._why_stopped(record, drive),
            started=left_something,
        )

    async def _outcome(self, record: RunRecord, drive: LeasedDrive, run: Run) -> Outcome:
        """Run the started child to its end. Raises `DriveStopped` when the end is not ours to write."""
        result, error, cut_short = await self._result(record, drive, run)
        dispose_error = await _dispose(run)
        if drive.stopped in ("stale", "release") and (cut_short or result is None):
            raise DriveStopped(drive.stopped)
        kill_reason = await self._why_stopped(record, drive)
        outcome = outcome_of(result, error=error, dispose_error=dispose_error, kill_reason=kill_reason, started=True)
        if drive.stopped == "limit":
            outcome = outcome_of(
                ChildResult(
                    stop_reason="error",
                    output=result.output if result else (),
                    diagnostic=_limit_reached(record),
                    usage=result.usage if result else None,
                ),
                dispose_error=dispose_error,
            )
        return limited(outcome, max_output_bytes=self._settings.max_output_bytes)

    async def _request(self, record: RunRecord, drive: LeasedDrive) -> ChildRequest | None:
        """The request with its prompt: taken from the inbox the first time, read from the transcript after that."""
        if record.seq == 0:
            prompt = next((entry.text for entry in await drive.take("first") if entry.lane == "next-turn"), None)
        else:
            events = await drive.transcript()
            prompt = next((str(event.data["text"]) for event in events if event.kind == "input"), None)
        return None if prompt is None else record.spec.request.model_copy(update={"prompt": prompt})

    async def _result(
        self, record: RunRecord, drive: LeasedDrive, run: Run
    ) -> tuple[ChildResult | None, str | None, bool]:
        """The run's result, or why there is none; and whether it was cut short by us."""
        result = asyncio.ensure_future(run.result())
        stop = asyncio.ensure_future(drive.stop_requested.wait())
        cut_short = False
        try:
            await asyncio.wait(
                {result, stop}, timeout=record.spec.run_limit_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if not result.done():
                cut_short = True
                drive.stop("limit")  # no effect when something else stopped it
                reason = await self._why_stopped(record, drive) or str(drive.stopped)
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(CANCEL_SECONDS):
                        await run.cancel(reason)
                        await asyncio.wait({result})
        finally:
            stop.cancel()
            if not result.done():
                result.cancel()
            await asyncio.wait({result})
        try:
            return result.result(), None, cut_short
        except DriveStopped:
            return None, None, True
        except asyncio.CancelledError:
            return ChildResult(stop_reason="aborted"), None, cut_short
        except Exception as error:
            return None, stringified(error), cut_short

    async def _why_stopped(self, record: RunRecord, drive: LeasedDrive) -> str | None:
        """The reason of the kill that stopped the drive, or None when no kill did."""
        if drive.stopped != "kill":
            return None
        now = await persist(lambda: self._runs.get(record.id), patience_seconds=self._patience_seconds)
        return (now.kill_reason if now else None) or DEFAULT_KILL_REASON

    async def _give_up(self, record: RunRecord, lease: Lease, reason: str) -> Outcome | None:
        """Let go of a drive that was stopped: the outcome it was settled with, or None when it goes on elsewhere."""
        match reason:
            case "kill":
                now = await self._runs.get(record.id)
                why = (now.kill_reason if now else None) or DEFAULT_KILL_REASON
                outcome = outcome_of(None, kill_reason=why)
            case "release" if record.spec.may_resume:
                if await self._release(lease, queue=record.spec.queue) == "stop":
                    return await self._give_up(record, lease, "kill")
                return None
            case "release":
                outcome = outcome_of(None, error="the worker shut down")
            case _:
                logger.warning("run lost to another worker", extra={"run_id": record.id})
                return None
        await self._settle(record, lease, outcome)
        return outcome

    async def _settle(self, record: RunRecord, lease: Lease, outcome: Outcome) -> None:
        ending = self._endings.write(record, outcome, settle_id=f"driver:{lease.token}")
        # A task of its own: whatever cancels this drive now must not cut the settlement in half.
        settling = asyncio.ensure_future(
            persist(
                lambda: self._runs.settle(
                    lease, owner=record.owner, queue=record.spec.queue, on_behalf="driver", ending=ending
                ),
                patience_seconds=self._patience_seconds,
            )
        )
        word = await asyncio.shield(settling)
        if word != "settled":
            logger.warning("outcome refused", extra={"run_id": record.id, "why": word})

    async def _hand_back(self, run_id: str) -> None:
        record = await self._runs.get(run_id)
        if run_id in self._drives:
            return
        if record is None or record.worker != self._process_id:
            # Another worker's claim took it while this process was silent: only the entry here is left to clear.
            queue = record.spec.queue if record else ""
            await self._runs.reclaim(Lease(run_id, -1, self._process_id), queue=queue, message="")
            return
        lease = Lease(run_id, record.token, self._process_id)
        if await self._release(lease, queue=record.spec.queue) == "stop":
            await self._give_up(record, lease, "kill")

    async def _release(self, lease: Lease, *, queue: str) -> str:
        task_id = self._ids.new()
        message = self._publisher.message(lease.run_id, queue=queue, task_id=task_id)
        word = await persist(
            lambda: self._runs.release(lease, queue=queue, message=message), patience_seconds=self._patience_seconds
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


def _limit_reached(record: RunRecord) -> str:
    return f"run limit of {record.spec.run_limit_seconds:g} s reached"


async def _dispose_late(start: asyncio.Future[Run]) -> None:
    with contextlib.suppress(Exception):
        await _dispose(await start)


async def _dispose(run: Run) -> str | None:
    """Release a run; the error, stringified, when it failed."""
    try:
        async with asyncio.timeout(DISPOSE_SECONDS):
            await run.dispose()
    except TimeoutError:
        return f"not released within {DISPOSE_SECONDS:g} s"
    except Exception as error:
        return stringified(error)
    return None
