"""One pub/sub connection per process: channels in, callbacks out.

A message is only a doorbell: whoever hears it reads the truth from its key. What was published while the connection was
down is gone, so after each reconnection every listener is told to look again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, cast

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from broker_config import BrokerSettings
from subagent_tasks.errors import BrokerUnavailable
from subagent_tasks.logs import event_logger
from subagent_tasks.store.connection import UNREACHABLE

logger = event_logger(__name__)

Listener = Callable[[str | None], None]
"""Called with a message's text, or with None after a reconnection: look again."""


class Doorbell:
    """Listens on any number of channels. Callbacks run on the loop and must not block."""

    def __init__(self, settings: BrokerSettings) -> None:
        self._timeout_seconds = settings.redis_timeout_seconds
        # A connection of its own: a pub/sub connection is held for ever and read without a deadline. A peer that
        # vanished is noticed by what is sent to it now and then; until then everybody's periodic look stands in.
        self._client = redis.asyncio.Redis.from_url(
            settings.redis_py_url,
            decode_responses=True,
            # As in `connect`: a cancellation must not be swallowed. Subscribing and reading have bounds of their own.
            socket_timeout=None,
            socket_connect_timeout=settings.redis_timeout_seconds,
            socket_keepalive=not settings.redis_py_url.startswith("unix:"),
            health_check_interval=max(1, int(settings.redis_timeout_seconds)),
            # A reconnection inside redis-py would be one that nobody is told of.
            retry=Retry(NoBackoff(), 0),
            client_name="subagent-tasks-doorbell",
        )
        self._pubsub = self._client.pubsub()
        self._listeners: dict[str, Listener] = {}
        self._confirmed: dict[str, asyncio.Event] = {}
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    async def listen(self, channel: str, listener: Listener) -> None:
        """Call `listener` for each message; returns once the server confirmed, so nothing sent after this is missed."""
        self._listeners[channel] = listener
        confirmed = self._confirmed.setdefault(channel, asyncio.Event())
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await self._pubsub.subscribe(channel)
                if self._task is None:
                    self._task = asyncio.create_task(self._run(), name="subagent-tasks-doorbell")
                await confirmed.wait()
        except (TimeoutError, *UNREACHABLE) as error:
            raise BrokerUnavailable(
                f"Redis did not confirm a subscription within {self._timeout_seconds:g} s "
                f"({type(error).__name__}): check that it runs"
            ) from error

    async def leave(self, channel: str) -> None:
        """Stop listening on a channel; bounded."""
        self._listeners.pop(channel, None)
        self._confirmed.pop(channel, None)
        if self._is_closed:
            return  # redis-py would connect again to unsubscribe
        with contextlib.suppress(*UNREACHABLE):
            async with asyncio.timeout(self._timeout_seconds):
                await self._pubsub.unsubscribe(channel)

    async def close(self) -> None:
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        with contextlib.suppress(*UNREACHABLE):
            await cast("Any", self._pubsub).aclose()
        with contextlib.suppress(*UNREACHABLE):
            await self._client.aclose()

    async def _run(self) -> None:
        pause_seconds = 0.05
        lost = False
        while True:
            try:
                # Beyond its own second only when it connects again, to a server that accepts and then says nothing.
                async with asyncio.timeout(1.0 + self._timeout_seconds):
                    message = cast("dict[str, Any] | None", await self._pubsub.get_message(timeout=1.0))
            except Exception as error:
                # Whatever it is: a process that no longer listens, and does not know, is worse off than one that tries.
                if not lost:
                    logger.warning("doorbell lost its connection", extra={"error": type(error).__name__})
                lost = True
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(pause_seconds * 2, 1.0)
                continue
            if message is None:
                continue
            pause_seconds = 0.05
            channel = str(message["channel"])
            if lost:
                # What a new connection says first is that redis-py has subscribed again; what was published meanwhile
                # is gone.
                lost = False
                for listener in list(self._listeners.values()):
                    self._call(listener, None)
            if message["type"] == "subscribe":
                if channel in self._confirmed:
                    self._confirmed[channel].set()
            elif message["type"] == "message":
                listener = self._listeners.get(channel)
                if listener is not None:
                    self._call(listener, str(message["data"]))

    def _call(self, listener: Listener, text: str | None) -> None:
        try:
            listener(text)
        except Exception as error:
            # The type alone: an error quotes what it could not read, which may be an outcome.
            logger.error("doorbell listener failed", extra={"error": type(error).__name__})
