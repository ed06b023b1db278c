"""The heartbeat: one thread, one command per beat, whatever the event loop is busy with.

It beats only while the loop ticks: a process whose loop hangs drives nothing, so it must not hold its leases. Nothing
but `stop` ends it: a process that goes on without beating would be alive and found dead.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import redis
import redis.exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from broker_config import BrokerSettings
from subagent_tasks.logs import event_logger
from subagent_tasks.protocol.keys import Keys
from subagent_tasks.protocol.leases import beat_interval_seconds
from subagent_tasks.protocol.scripts import BEAT
from subagent_tasks.store.processes import BeatAnswer

logger = event_logger(__name__)


class Heartbeat:
    """Beats for one process from a thread of its own.

    Callbacks run on the loop, but for `on_stall`, and `on_pulse`, which tells at each beat that the thread still runs.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        keys: Keys,
        *,
        process_id: str,
        on_beat: Callable[[BeatAnswer], None],
        on_outage: Callable[[], None],
        on_stall: Callable[[], None],
        on_pulse: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._process_id = process_id
        self._on_beat = on_beat
        self._on_outage = on_outage
        self._on_stall = on_stall
        self._on_pulse = on_pulse
        self._loop = asyncio.get_running_loop()
        self._unticked_seconds = 0.0
        self._stop = threading.Event()
        timeout_seconds = min(settings.redis_timeout_seconds, settings.lease_seconds / 3)
        self._client = redis.Redis.from_url(
            settings.redis_py_url,
            decode_responses=True,
            socket_timeout=timeout_seconds,
            socket_connect_timeout=timeout_seconds,
            retry=Retry(NoBackoff(), 1),
            client_name="subagent-tasks-heartbeat",
        )
        self._thread = threading.Thread(target=self._run, name="subagent-tasks-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop beating. Call it off the loop: it waits for a beat under way."""
        self._stop.set()
        self._thread.join(self._settings.lease_seconds)
        self._client.close()

    def _run(self) -> None:
        self._on_pulse()
        interval_seconds = beat_interval_seconds(self._settings.lease_seconds)
        answered_at = time.monotonic()
        outage_told = stall_told = False
        pause_seconds = interval_seconds
        while not self._stop.wait(pause_seconds):
            # In pauses of this thread, not by the clock: while the whole process was frozen no loop could tick.
            self._on_pulse()
            self._unticked_seconds += pause_seconds
            self._tell_loop(self._tick)
            if self._unticked_seconds > self._settings.loop_stall_seconds:
                if not stall_told:
                    stall_told = True
                    logger.critical(
                        "event loop stalled: this process stops beating until it ticks again",
                        extra={"stall_seconds": self._settings.loop_stall_seconds, "process_id": self._process_id},
                    )
                    self._on_stall()
                continue
            stall_told = False
            try:
                answer = self._beat()
            except Exception as error:
                silent_seconds = time.monotonic() - answered_at
                if pause_seconds == interval_seconds:
                    logger.warning("heartbeat not answered", extra={"error": type(error).__name__})
                # Sooner than usual: a short outage must not cost this process its lease (beat.lua counts on it).
                pause_seconds = interval_seconds / 4
                if silent_seconds > 2 * self._settings.lease_seconds and not outage_told:
                    outage_told = True
                    self._tell_loop(self._on_outage)
                continue
            answered_at, outage_told, pause_seconds = time.monotonic(), False, interval_seconds
            self._tell_loop(self._on_beat, answer)

    def _tick(self) -> None:
        self._unticked_seconds = 0.0

    def _tell_loop(self, callback: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed: the process is ending
            self._stop.set()

    def _beat(self) -> BeatAnswer:
        keys = BEAT.key_list(
            {
                "processes": self._keys.processes,
                "driven": self._keys.driven(self._process_id),
                "flagged": self._keys.flagged,
                "clock": self._keys.clock,
            }
        )
        args = BEAT.arg_list({"process": self._process_id, "lease_ms": int(self._settings.lease_seconds * 1000)})
        try:
            answer = self._client.evalsha(BEAT.sha, len(keys), *keys, *(str(arg) for arg in args))
        except redis.exceptions.NoScriptError:
            answer = self._client.eval(BEAT.source, len(keys), *keys, *(str(arg) for arg in args))
        _, flagged, driven = cast("list[Any]", answer)
        return BeatAnswer(flagged=frozenset(flagged), driven=frozenset(driven))
