"""One attempt at one run: start the child, wait for its end or for what stops it, release it, say how it ended.

Every wait is bounded, and a child that was started is always disposed. Whether the attempt may be made, and what is
done with its outcome, the executor decides.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar, cast

from subagent_tasks.drive import LeasedDrive, persist
from subagent_tasks.errors import BrokerUnavailable, DriveStopped, SubagentError
from subagent_tasks.logs import event_logger
from subagent_tasks.protocol.interfaces import Provider, Run
from subagent_tasks.protocol.models import ChildRequest, ChildResult, Outcome
from subagent_tasks.protocol.outcomes import DEFAULT_KILL_REASON, outcome_of, stringified
from subagent_tasks.protocol.records import RunRecord
from subagent_tasks.store.runs import RunStore

logger = event_logger(__name__)

T = TypeVar("T")

CANCEL_SECONDS = 10.0
"""How long a provider may take to end after a cancel; then its task is cancelled."""

DISPOSE_SECONDS = 30.0
"""How long a provider may take to release what it holds; then the release counts as failed."""

RELEASE_SECONDS = 0.5
"""How long a tool call that runs at a shutdown may take to end, before its effect counts as unknown. Short: another
worker should go on within a second."""


class Attempt:
    """`drive` is the lease it is made under; `spawn` keeps a task that outlives the attempt."""

    def __init__(
        self,
        record: RunRecord,
        drive: LeasedDrive,
        *,
        provider: Provider | None,
        runs: RunStore,
        patience_seconds: float,
        function_grace_seconds: float,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._record = record
        self._drive = drive
        self._provider = provider
        self._runs = runs
        self._patience_seconds = patience_seconds
        self._function_grace_seconds = function_grace_seconds
        self._spawn = spawn

    async def outcome(self, on_start: Callable[[], None]) -> Outcome:
        """How the run ended; `on_start` is called once the child is there (behaviour §9: a failed start has no events).

        Raises `DriveStopped` when the end is not ours to write: another process goes on with the run.
        """
        limit = asyncio.get_running_loop().call_later(self._record.remaining_seconds, self._drive.stop, "limit")
        try:
            begun = await self._begin()
            if isinstance(begun, Outcome):
                return begun
            on_start()
            return await self._finish(begun)
        except DriveStopped as stopped:
            if stopped.reason != "limit":
                raise
            # Before the child was there; it is an ending like any other.
            return outcome_of(self._limited(None))
        finally:
            limit.cancel()

    async def _begin(self) -> Run | Outcome:
        """Start the child, or say how the run ended without one."""
        if self._provider is None:
            return outcome_of(
                None,
                error=f'no subagent provider registered for "{self._record.spec.provider}" on this worker: '
                "declare it in the app the worker runs",
            )
        limit = self._record.spec.request.max_depth
        if limit is not None and self._record.depth > limit:
            # Admission counted it; a record that says otherwise was not written by admission (P9).
            return outcome_of(None, error=f"subagent depth {self._record.depth} exceeds maxDepth {limit}")
        request = await self._request()
        if request is None:
            return outcome_of(None, error="the run's prompt is missing from its inbox: it was removed from outside")
        provider = self._provider

        async def start() -> Run:
            # A coroutine of ours around it: whatever a provider raises, at whatever moment, is an outcome.
            run = await _contained(provider.start(request, self._drive))
            if not all(callable(getattr(run, name, None)) for name in ("result", "cancel", "dispose")):
                raise SubagentError(
                    f'the provider "{provider.name}" started a {type(run).__name__}, not a run: '
                    "its `start` must return an object with result, cancel and dispose"
                )
            return run

        return await self._start(asyncio.ensure_future(start()))

    async def _request(self) -> ChildRequest | None:
        """The request with its prompt: taken from the inbox the first time, read from the transcript after that."""
        if self._record.seq == 0:
            prompt = next((entry.text for entry in await self._drive.take("first") if entry.lane == "next-turn"), None)
        else:
            events = await self._drive.transcript()
            prompt = next((str(event.data["text"]) for event in events if event.kind == "input"), None)
        return None if prompt is None else self._record.spec.request.model_copy(update={"prompt": prompt})

    async def _start(self, start: asyncio.Future[Run]) -> Run | Outcome:
        """Await the provider's start. What stops the drive cancels it, and the provider cleans up (behaviour §2.10)."""
        try:
            if not await self._ended_first(start):
                start.cancel()
                await asyncio.wait({start}, timeout=CANCEL_SECONDS)
        except asyncio.CancelledError:
            start.cancel()
            self._spawn(_dispose_late(start))
            raise
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
        if isinstance(error, BrokerUnavailable):
            # Our own trouble with Redis is no child's outcome: the run goes on from its transcript.
            self._drive.stop("stale")
        match self._drive.stopped:
            case "stale" | "release" | "suspend" as reason:
                raise DriveStopped(reason)
            case "limit":
                return outcome_of(self._limited(None))
            case _:
                # Several errors in one, or no answer at all: the cleaning up failed, which a kill must not hide.
                several = isinstance(cast("object", error), BaseExceptionGroup)
                return outcome_of(
                    None,
                    error=stringified(error),
                    kill_reason=await self._kill_reason(),
                    started=several or not start.done(),
                )

    async def _finish(self, run: Run) -> Outcome:
        """Wait for the started child's end and release it."""
        try:
            result, error, cut_short = await self._result(run)
        except BaseException:
            await _dispose(run)
            raise
        dispose_error = await _dispose(run)
        match self._drive.stopped:
            case "stale" | "release" | "suspend" as reason if cut_short or result is None:
                raise DriveStopped(reason)
            case "limit" if cut_short:
                return outcome_of(self._limited(result), dispose_error=dispose_error)
            case _:
                return outcome_of(
                    result,
                    error=error,
                    dispose_error=dispose_error,
                    kill_reason=await self._kill_reason(),
                    started=True,
                )

    async def _result(self, run: Run) -> tuple[ChildResult | None, str | None, bool]:
        """The run's result, or why there is none; and whether it was cut short by us."""

        async def ended() -> ChildResult:
            result = await _contained(run.result())
            if not isinstance(result, ChildResult):  # pyright: ignore[reportUnnecessaryIsInstance]  # untyped providers
                kind = type(cast("object", result)).__name__
                raise SubagentError(f"the provider's run ended with a {kind}, not with a ChildResult")
            return result

        result = asyncio.ensure_future(ended())
        cut_short = False
        try:
            if not await self._ended_first(result):
                cut_short = True
                await self._cut_short(run, result)
        finally:
            if not result.done():
                result.cancel()
                # A provider that swallows even this is left behind; what it writes is refused from now on.
                await asyncio.wait({result}, timeout=CANCEL_SECONDS)
        if not result.done():
            return None, f"the provider did not end within {2 * CANCEL_SECONDS:g} s of its cancel", cut_short
        try:
            return result.result(), None, cut_short
        except DriveStopped:
            return None, None, True
        except asyncio.CancelledError:
            return ChildResult(stop_reason="aborted"), None, cut_short
        except BrokerUnavailable:
            self._drive.stop("stale")
            return None, None, True
        except Exception as error:
            return None, stringified(error), cut_short

    async def _cut_short(self, run: Run, result: asyncio.Future[ChildResult]) -> None:
        if self._drive.stopped == "release":
            # No new effect starts. A tool call under way may still end: else its effect is unknown for good.
            await self._drive.calls_ended(timeout_seconds=RELEASE_SECONDS)
            if not self._drive.is_interruptible:
                seconds = self._function_grace_seconds
                logger.warning(
                    "shutdown waits for a plain function to end",
                    extra={"run_id": self._record.id, "at_most_seconds": seconds},
                )
                await self._drive.becomes_interruptible(timeout_seconds=seconds)
        reason = await self._kill_reason() or str(self._drive.stopped)
        try:
            async with asyncio.timeout(CANCEL_SECONDS):
                await _contained(run.cancel(reason))
                await asyncio.wait({result})
        except Exception as error:
            # The type alone, as everywhere: it may quote what the run was about.
            logger.warning("cancel failed", extra={"run_id": self._record.id, "error": type(error).__name__})

    async def _ended_first(self, work: asyncio.Future[T]) -> bool:
        """Wait for `work` or for the drive to be stopped; whether `work` ended."""
        stop = asyncio.ensure_future(self._drive.stop_requested.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        return work.done()

    async def _kill_reason(self) -> str | None:
        """The reason of the kill that stopped the drive, or None when no kill did."""
        if self._drive.stopped != "kill":
            return None
        now = await persist(lambda: self._runs.get(self._record.id), patience_seconds=self._patience_seconds)
        return (now.kill_reason if now else None) or DEFAULT_KILL_REASON

    def _limited(self, result: ChildResult | None) -> ChildResult:
        return ChildResult(
            stop_reason="error",
            output=result.output if result else (),
            diagnostic=f"run limit of {self._record.spec.run_limit_seconds:g} s reached",
            usage=result.usage if result else None,
        )


async def _contained(work: Awaitable[T]) -> T:
    """Await a provider's work. What would end the process, and every other child in it, is this child's failure."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise SubagentError(f"the provider raised {type(error).__name__}, which would have ended the worker") from error


async def _dispose_late(start: asyncio.Future[Run]) -> None:
    # Its start may still be refused by the drive, or give up at last.
    with contextlib.suppress(Exception, DriveStopped, asyncio.CancelledError):
        await _dispose(await start)


async def _dispose(run: Run) -> str | None:
    """Release a run; the error, stringified, when it failed."""
    try:
        async with asyncio.timeout(DISPOSE_SECONDS):
            await _contained(run.dispose())
    except TimeoutError:
        return f"not released within {DISPOSE_SECONDS:g} s"
    except Exception as error:
        return stringified(error)
    return None
