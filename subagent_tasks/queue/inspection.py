"""What the broker and the living workers say through Celery. Bounded, read only, for `doctor`; blocks its thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from celery import Celery

from subagent_tasks.errors import BrokerUnavailable

REPLY_SECONDS = 2.0
"""How long the workers have to answer; a busy main thread may take a second."""


def check_broker(celery: Celery) -> None:
    """Connect to Celery's broker once. Raises `BrokerUnavailable`."""
    try:
        with cast("Any", celery).connection_for_write() as connection:
            connection.connect()
    except Exception as error:
        # Every transport has its own errors; their texts may quote the URL with its password.
        raise BrokerUnavailable(
            f"Celery's broker did not answer ({type(error).__name__}): check that it runs and that "
            "SUBAGENT_TASKS_BROKER_URL names it"
        ) from None


def consumed_queues(celery: Celery, *, reply_seconds: float = REPLY_SECONDS) -> dict[str, frozenset[str]]:
    """Worker name -> the queues it consumes, as the workers themselves answer within `reply_seconds`."""
    inspect = cast("Any", celery).control.inspect(timeout=reply_seconds)
    answers = cast("dict[str, list[dict[str, Any]]]", inspect.active_queues() or {})
    return {worker: frozenset(str(queue["name"]) for queue in queues) for worker, queues in answers.items()}


def known_tasks(celery: Celery, *, reply_seconds: float = REPLY_SECONDS) -> dict[str, frozenset[str]]:
    """Worker name -> the tasks it knows, as the workers themselves answer within `reply_seconds`."""
    inspect = cast("Any", celery).control.inspect(timeout=reply_seconds)
    answers = cast("dict[str, list[str]]", inspect.registered() or {})
    return {worker: frozenset(name.partition(" ")[0] for name in names) for worker, names in answers.items()}


@dataclass(frozen=True, slots=True)
class Unacknowledged:
    """How many messages were fetched and not acknowledged, and when the oldest was, by the clock of who fetched it."""

    count: int
    oldest_at: float


def unacknowledged(celery: Celery) -> Unacknowledged | None:
    """What kombu keeps in Redis of messages under way; None with another broker, or where this user may not look."""
    try:
        with cast("Any", celery).connection_for_read() as connection:
            channel = connection.default_channel
            index, client = channel.unacked_index_key, channel.client
            oldest = client.zrange(index, 0, 0, withscores=True)
            return Unacknowledged(int(client.zcard(index)), float(oldest[0][1])) if oldest else Unacknowledged(0, 0)
    except Exception:
        # Each transport, and each way of refusing, has errors of its own; the broker itself was checked before.
        return None
