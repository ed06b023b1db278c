"""Queue names: one queue per provider, so that heavy external agents never crowd light children (design §8).

Which providers a worker consumes is decided by the worker; how a message is built, in `subagent_tasks.queue`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kombu.entity import Exchange, Queue


def queue_name(namespace: str, provider_queue: str) -> str:
    """The Celery queue, and so the Redis list, in which the runs of a provider wait.

    Raises ValueError if either part could be mistaken for something else in a key or a command line.
    """
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", namespace):
        raise ValueError(f"namespace {namespace!r}: expected 1 to 64 letters, digits, '.', '_' or '-'")
    # No dot: two namespaces could otherwise spell the same queue.
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", provider_queue):
        raise ValueError(f"queue {provider_queue!r} of a provider: expected 1 to 64 letters, digits, '_' or '-'")
    return f"{namespace}.subagents.{provider_queue}"


def kombu_queues(namespace: str, provider_queues: Iterable[str]) -> tuple[Queue, ...]:
    """The declarations for Celery's `task_queues`, in the order given, each once.

    Raises ValueError as `queue_name` does.
    """
    names = dict.fromkeys(queue_name(namespace, name) for name in provider_queues)
    return tuple(kombu_queue(namespace, name) for name in names)


def kombu_queue(namespace: str, name: str) -> Queue:
    """The declaration of the queue that `queue_name` names."""
    # An exchange of our own: with the default one we would share a binding table with every other Celery application.
    exchange = Exchange(f"{namespace}.subagents", type="direct", durable=True)
    return Queue(name, exchange, routing_key=name, durable=True)
