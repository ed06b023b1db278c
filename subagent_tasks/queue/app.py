"""The Celery app: configured for the promises, with the one task that drives runs.

`celery -A agents worker`, Flower and `celery inspect` work on it like on any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from celery import Celery

from broker_config import BrokerSettings, celery_settings, kombu_queues
from subagent_tasks.queue.activation import LIFECYCLE_ATTRIBUTE, ActivationTask, Lifecycle
from subagent_tasks.queue.consumer import consumer_path
from subagent_tasks.queue.pool_guard import use_asyncio_pool
from subagent_tasks.queue.publisher import ACTIVATE, BrokerPublisher, ScriptPublisher

CONCURRENCY = 1000
"""How many children a worker holds unless it is told otherwise (`-c`, `--concurrency`)."""


class Driver(Lifecycle, Protocol):
    """What runs on the worker's loop: the pool starts and stops it, the task hands it runs."""

    async def activate(self, run_id: str, queue: str) -> None: ...


def make_celery(settings: BrokerSettings, *, queues: Sequence[str], driver: Driver) -> Celery:
    """The Celery app of one declaration. `queues` are the queues of its providers, without the namespace."""
    celery = Celery("subagent_tasks", set_as_current=False)
    celery.conf.update(celery_settings(settings))
    celery.conf.worker_consumer = consumer_path()
    celery.conf.task_queues = kombu_queues(settings.namespace, queues)
    celery.conf.task_default_queue = f"{settings.namespace}.subagents"
    # Children are coroutines: the number of cores, Celery's default, says nothing about how many a worker can hold.
    celery.conf.worker_concurrency = CONCURRENCY
    use_asyncio_pool(celery)

    async def activate(run_id: str, queue: str) -> None:
        await driver.activate(run_id, queue)

    # Not shared: Celery would add it to every other app of this process, the deployment's own among them.
    celery.task(name=ACTIVATE, base=ActivationTask, lazy=False, shared=False)(activate)
    setattr(celery, LIFECYCLE_ATTRIBUTE, driver)
    return celery


def make_publisher(settings: BrokerSettings, celery: Celery) -> ScriptPublisher | BrokerPublisher:
    """The publisher that fits the deployment."""
    return ScriptPublisher() if settings.broker_holds_state else BrokerPublisher(celery, namespace=settings.namespace)


def command_publisher(settings: BrokerSettings) -> ScriptPublisher | BrokerPublisher:
    """The same for a command, which has no declaration and runs no task: it only sends."""
    celery = Celery("subagent_tasks", set_as_current=False)
    celery.conf.update(celery_settings(settings))
    return make_publisher(settings, celery)
