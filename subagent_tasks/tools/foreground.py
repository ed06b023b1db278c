"""How a host waits for a run in the foreground: until it ends or the caller gives up (behaviour §2.8, §2.10).

The one place that withdraws what a caller no longer waits for, and attaches again to a run that a repeated call names.
What the ending means to the caller is for the caller to say.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from subagent_tasks.errors import BrokerUnavailable, CallerError
from subagent_tasks.protocol.ids import run_id_for_call
from subagent_tasks.protocol.models import Outcome
from subagent_tasks.protocol.records import RunSpec
from subagent_tasks.tools.calls import ANSWER_SECONDS, CallContext, ToolServices, within

PARTIAL_SECONDS = 1.0
"""How long a caller that gives up still waits for the child to say how far it came."""


@dataclass(frozen=True, slots=True)
class ForegroundEnding:
    """How the wait ended. `timed_out_seconds` is the time the caller gave, when that was over first."""

    outcome: Outcome
    timed_out_seconds: float | None = None


def run_id_of(services: ToolServices, context: CallContext) -> str:
    """The id of the run that a call starts: the same for the same call id, else a new one."""
    key = context.key or context.call_id
    if key is None:
        return services.new_id()
    return run_id_for_call(namespace=services.settings.namespace, session_id=context.session_id, call_id=key)


async def foreground_ending(
    services: ToolServices, context: CallContext, run_id: str, spec: RunSpec
) -> ForegroundEnding:
    """Start the run, or find it again, and wait for its ending. Raises as `Delegation.start`, and `BrokerUnavailable`.

    A caller that gives up, by its signal, its time or its cancelled task, takes the child with it.
    """
    # Expected before it is admitted: a child that ends at once is not missed.
    ending = services.waiting.expect(run_id)
    starting = asyncio.ensure_future(
        services.delegation.start(run_id, owner=context.session_id, mode="foreground", spec=spec)
    )
    try:
        timeout_seconds = min(context.timeout_seconds or spec.run_limit_seconds, spec.run_limit_seconds)
        deadline = time.monotonic() + timeout_seconds
        try:
            known = await within(asyncio.shield(starting), wait_seconds=timeout_seconds)
            if known:
                services.waiting.look(run_id)
            outcome = await _first(ending, context.signal, timeout_seconds=deadline - time.monotonic())
        except asyncio.CancelledError:
            # The caller's task is cancelled: the child goes with it, and the cancellation goes on.
            await asyncio.shield(_withdraw(services, context, run_id, starting))
            raise
        except BrokerUnavailable:
            # It may have been admitted all the same: the caller repeats the call, or nobody waits for the run.
            services.delegation.withdraw(
                run_id,
                owner=context.session_id,
                starting=starting,
                unless=lambda: services.waiting.is_expected(run_id),
            )
            raise
        except CallerError:
            # The host stops, and the call with it.
            services.delegation.withdraw(run_id, owner=context.session_id, starting=starting)
            raise
        if outcome is not None:
            return ForegroundEnding(outcome)
        asked = await _withdraw(services, context, run_id, starting)
        # Whoever could not be asked has nothing to say.
        outcome = await _first(ending, None, timeout_seconds=PARTIAL_SECONDS if asked else 0)
        outcome = outcome or Outcome(status="killed", stop_reason="aborted")
        was_told = context.signal is not None and context.signal.is_set()
        return ForegroundEnding(outcome, None if was_told else timeout_seconds)
    finally:
        services.waiting.forget(run_id)


async def _withdraw(services: ToolServices, context: CallContext, run_id: str, starting: asyncio.Future[bool]) -> bool:
    """The caller gave up: ask the child to end. Whether it was asked by now; if not, the asking goes on (P8)."""
    withdrawal = services.delegation.withdraw(run_id, owner=context.session_id, starting=starting)
    await asyncio.wait({withdrawal}, timeout=ANSWER_SECONDS)
    return withdrawal.done()


async def _first(
    ending: asyncio.Future[Outcome], signal: asyncio.Event | None, *, timeout_seconds: float
) -> Outcome | None:
    """The outcome, or None when the signal was set or the time was over first. An outcome that is there wins."""
    watched: set[asyncio.Future[Any]] = {ending}
    watcher = None if signal is None else asyncio.ensure_future(signal.wait())
    if watcher is not None:
        watched.add(watcher)
    try:
        await asyncio.wait(watched, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if watcher is not None:
            watcher.cancel()
    return ending.result() if ending.done() else None
