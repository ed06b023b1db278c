"""What an application may listen to: the beginning and end of every attempt at a run (behaviour §9).

Listeners observe; they can neither change nor fail a run. Events carry ids, never a prompt or an output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from subagent_tasks.logs import event_logger
from subagent_tasks.protocol.models import Outcome
from subagent_tasks.protocol.records import RunRecord

logger = event_logger(__name__)


@dataclass(frozen=True, slots=True)
class RunStarted:
    """An attempt began. `run_id` is new for each attempt; `child_id` is the job and session id."""

    run_id: str
    provider: str
    child_id: str
    parent_id: str


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The attempt ended; exactly one per `RunStarted` of the process that settled."""

    run_id: str
    provider: str
    child_id: str
    parent_id: str
    stop_reason: str


Event = RunStarted | RunEnded
Listener = Callable[[Event], None]


class Listeners:
    """The listeners of one app; it is the executor's `RunListener`."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def add(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def started(self, record: RunRecord, *, attempt_id: str) -> None:
        self._tell(RunStarted(attempt_id, record.spec.provider, record.id, record.owner))

    def ended(self, record: RunRecord, *, attempt_id: str, outcome: Outcome) -> None:
        self._tell(RunEnded(attempt_id, record.spec.provider, record.id, record.owner, outcome.stop_reason))

    def _tell(self, event: Event) -> None:
        for listener in self._listeners:
            try:
                listener(event)
            except Exception as error:
                logger.error("event listener failed", extra={"error": type(error).__name__})
