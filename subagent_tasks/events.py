"""What an application may listen to: the beginning and end of every run (behaviour §9).

Listeners observe; they can neither change nor fail a run. Events carry ids, never a prompt or an output.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from subagent_tasks.logs import event_logger
from subagent_tasks.protocol.models import Outcome
from subagent_tasks.protocol.records import RunRecord

logger = event_logger(__name__)


@dataclass(frozen=True, slots=True)
class RunStarted:
    """A run began. `child_id` is the job and session id; `run_id` is new when a lost worker's run begins again."""

    run_id: str
    provider: str
    child_id: str
    parent_id: str


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run ended: one for the `RunStarted` of that `run_id`, in the worker that drove it last, over suspensions and
    handing back. A run that nobody drives when it ends (killed while it waits, its worker lost for good) has none.
    """

    run_id: str
    provider: str
    child_id: str
    parent_id: str
    stop_reason: str


Event = RunStarted | RunEnded
Listener = Callable[[Event], Awaitable[None] | None]


class Listeners:
    """The listeners of one app; it is the executor's `RunListener`. What one raises is logged, and nothing more."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._answers: set[asyncio.Task[None]] = set()

    def add(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def started(self, record: RunRecord, *, attempt_id: str) -> None:
        self._tell(RunStarted(attempt_id, record.spec.provider, record.id, record.owner))

    def ended(self, record: RunRecord, *, attempt_id: str, outcome: Outcome) -> None:
        self._tell(RunEnded(attempt_id, record.spec.provider, record.id, record.owner, outcome.stop_reason))

    def _tell(self, event: Event) -> None:
        for listener in self._listeners:
            try:
                answer = listener(event)
            except (*_ENDS_THE_WORKER, asyncio.CancelledError, Exception) as error:
                _log(error)
                continue
            if inspect.isawaitable(answer):
                # The run does not wait for it; the set keeps it from being collected before its end.
                task = asyncio.ensure_future(_contained(answer))
                self._answers.add(task)
                task.add_done_callback(self._answers.discard)


_ENDS_THE_WORKER = (SystemExit, KeyboardInterrupt)
"""Left to themselves they end the worker's event loop, and leave the child behind that the listener was told of."""


async def _contained(answer: Awaitable[None]) -> None:
    try:
        await answer
    except (*_ENDS_THE_WORKER, Exception) as error:
        _log(error)


def _log(error: BaseException) -> None:
    # The type alone: a message may quote what the run was about.
    logger.error("event listener failed", extra={"error": type(error).__name__})
