"""What the use cases need from the outside: a queue to send to, fresh ids, somebody who listens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from subagent_tasks.protocol.models import Outcome
from subagent_tasks.protocol.records import RunRecord


class Publisher(Protocol):
    """Makes and sends Celery messages."""

    def message(self, run_id: str, *, queue: str, task_id: str) -> str:
        """The message for a script to push, or empty when the broker is not the Redis that holds the state."""
        ...

    async def publish(self, run_id: str, *, queue: str, task_id: str) -> None:
        """Send the message right after the move, when the script could not; otherwise do nothing.

        Never fails: the move has accepted the work, and what could not be sent the sweeper sends.
        """
        ...

    async def is_empty(self, queue: str) -> bool | None:
        """Whether no message waits in the broker's queue; None where the queue is a list of the state's own server."""
        ...


class RunListener(Protocol):
    """Hears of attempts at runs (behaviour §9). `attempt_id` tells repeated attempts at one run apart."""

    def started(self, record: RunRecord, *, attempt_id: str) -> None: ...
    def ended(self, record: RunRecord, *, attempt_id: str, outcome: Outcome) -> None: ...


@dataclass(frozen=True, slots=True)
class Ids:
    """Where fresh ids and dates come from. `new` must be unique; `now_iso` is UTC, ISO 8601."""

    new: Callable[[], str]
    now_iso: Callable[[], str]
