"""How a run's Celery message gets to its queue: inside the admitting script, or right after it.

Where the broker is the Redis that holds the state, the script pushes the message and nothing can come between. With
another broker it is sent after the move; what is lost in between, the sweeper finds.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

from celery import Celery

from broker_config import kombu_queue
from subagent_tasks.queue.message import activation_message

logger = logging.getLogger(__name__)

ACTIVATE = "subagent_tasks.activate"
"""The name of the one task: drive this run if it is there to be driven."""


class ScriptPublisher:
    """The broker holds the state: scripts push."""

    def message(self, run_id: str, *, queue: str, task_id: str) -> str:
        return activation_message(task=ACTIVATE, task_id=task_id, run_id=run_id, queue=queue)

    async def publish(self, run_id: str, *, queue: str, task_id: str) -> None:
        """Nothing: the script has pushed it."""

    async def is_empty(self, queue: str) -> bool | None:
        return None


class BrokerPublisher:
    """Another broker: Celery sends, after the move."""

    def __init__(self, celery: Celery, *, namespace: str) -> None:
        self._celery = celery
        self._namespace = namespace

    def message(self, run_id: str, *, queue: str, task_id: str) -> str:
        return ""

    async def publish(self, run_id: str, *, queue: str, task_id: str) -> None:
        # Celery's producer blocks: it gets a thread.
        try:
            await asyncio.to_thread(self._send, run_id, queue, task_id)
        except Exception as error:
            # Each transport has errors of its own, and the move has accepted the work already.
            logger.warning(
                "message not sent, the sweeper will", extra={"run_id": run_id, "error": type(error).__name__}
            )

    async def is_empty(self, queue: str) -> bool | None:
        return await asyncio.to_thread(self._count, queue) == 0

    def _send(self, run_id: str, queue: str, task_id: str) -> None:
        # Once: whoever admitted waits for this, and the sweeper tries again anyway.
        self._celery.send_task(
            ACTIVATE,
            (run_id, queue),
            task_id=task_id,
            # Declared as workers declare it, also by a process that knows of no provider.
            queue=kombu_queue(self._namespace, queue),
            ignore_result=True,
            argsrepr="-",
            kwargsrepr="-",
            retry=False,
        )

    def _count(self, queue: str) -> int:
        connection: Any
        with cast("Any", self._celery).connection_for_read() as connection:
            try:
                return int(connection.default_channel.queue_declare(queue, passive=True).message_count)
            except connection.channel_errors:
                return 0  # on Redis a queue without messages does not exist
