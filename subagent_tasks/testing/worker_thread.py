"""A real Celery worker in a thread of the test's process: real messages, real consumer, our pool."""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import Any, Self

from celery import Celery
from celery._state import _set_task_join_will_block  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]  # as Celery does
from celery.utils.nodenames import anon_nodename
from celery.worker import WorkController, state

from subagent_tasks.queue.pool import POOL_PATH

START_SECONDS = 10.0
STOP_SECONDS = 15.0


class WorkerThread:
    """`with WorkerThread(celery): ...`. One at a time in a process: Celery keeps the wish to stop in a global."""

    def __init__(self, celery: Celery, *, concurrency: int = 100) -> None:
        # Closing a channel waits for its last BRPOP to return: a test should not wait a second for that.
        celery.conf.broker_transport_options = {**celery.conf.broker_transport_options, "polling_interval": 0.1}
        self._celery = celery
        self._concurrency = concurrency
        self._ready = threading.Event()
        self._controller: Any = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        self._celery.finalize()
        self._controller = WorkController(
            app=self._celery,
            concurrency=self._concurrency,
            hostname=anon_nodename(),
            pool=POOL_PATH,
            loglevel=logging.WARNING,
            ready_callback=self._on_ready,
            without_heartbeat=True,
            without_mingle=True,
            without_gossip=True,
        )
        self._thread = threading.Thread(target=self._run, name="celery-worker", daemon=True)
        self._thread.start()
        if not self._ready.wait(START_SECONDS) or self._failure is not None:
            raise RuntimeError("the worker thread did not start") from self._failure
        # A worker forbids `AsyncResult.get()` in its process; the test that shares it may want to read results.
        _set_task_join_will_block(False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        state.should_stop = 0
        # The hub sleeps up to a second; a call wakes it.
        hub = getattr(self._controller, "hub", None)
        if hub is not None:
            hub.call_soon(lambda: None)
        self._thread.join(STOP_SECONDS)
        state.should_stop = None
        if self._thread.is_alive():
            raise RuntimeError(f"the worker thread did not stop within {STOP_SECONDS:g} s")

    def _on_ready(self, _consumer: object) -> None:
        self._ready.set()

    def _run(self) -> None:
        try:
            self._controller.start()
        except BaseException as failure:
            self._failure = failure
            self._ready.set()
