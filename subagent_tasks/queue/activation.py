"""What an activation is to Celery: a task that keeps no result, a request that nobody revokes, and what serves both.

The pool runs activations (`queue.pool`); what they do is the driver's, which the pool knows as a `Lifecycle`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, cast

from celery import Task
from celery.worker.request import Request

LIFECYCLE_ATTRIBUTE = "subagent_lifecycle"
"""Where the Celery app carries its `Lifecycle`."""


class Lifecycle(Protocol):
    """What lives on the pool's event loop for as long as the worker does.

    Set it on the Celery app as `app.subagent_lifecycle`. All three coroutines run on the pool's loop.
    """

    @property
    def shutdown_grace_seconds(self) -> float:
        """How long `release`, and after it the activations, may take together at shutdown."""
        ...

    async def start(self) -> None:
        """Runs before the first message. A `SubagentError` stops the worker with its message as the one log line."""
        ...

    async def release(self) -> None:
        """Hand every drive back, so that other workers go on with them (protocol §4). No message starts after it."""
        ...

    async def stop(self) -> None:
        """Stop beating and close connections. Nothing of the pool runs any more."""
        ...


class ActivationRequest(Request):
    """Celery's view of an activation message: it may not be revoked, retried or given a result by Celery.

    A kill is a durable flag which the claim reads (protocol §2). Celery's own ways would store REVOKED or RETRY over
    the result of a run which another worker may be driving.
    """

    def revoked(self) -> bool:
        return False

    def terminate(self, pool: object, signal: object = None) -> None:
        """Nothing: `revoke` is replaced (`queue.control`), and a kill rings the driver instead."""

    def cancel(self, pool: object, signal: object = None, emit_retry: bool = True) -> None:
        """Nothing: at a cold shutdown the pool's `on_stop` releases the drive, which queues the run again."""

    def info(self, safe: bool = False) -> dict[str, Any]:
        """What `inspect active` answers: with the hidden arguments of the message, whatever was asked for."""
        return cast("dict[str, Any]", super().info(safe=True))


class ActivationTask(Task):
    """Base of our tasks: `async def run(self, ...)` returns None and never raises; its scripts write the result."""

    abstract = True
    is_activation: ClassVar[bool] = True
    typing = True
    ignore_result = True
    store_errors_even_if_ignored = False  # True would let Celery write FAILURE over a settled run
    acks_late = False
    Request = ActivationRequest
