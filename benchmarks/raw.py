"""The other side: plain Celery with the Redis backend and a task that does nothing. `celery -A benchmarks.raw worker`.

Its settings are Celery's defaults, so it acknowledges early and prefetches four messages per process; it has none of
the lease, the record, the notice or the kill that the other side has.
"""

from __future__ import annotations

import os
from typing import Any, cast

from celery import Celery  # pyright: ignore[reportMissingTypeStubs]

URL_VARIABLE = "BENCHMARKS_RAW_URL"
TASK = "benchmarks.noop"
QUEUE = "celery"


def make_raw(url: str) -> Celery:
    """An app with the one task `TASK`, broker and results at `url`."""
    celery = Celery("raw", broker=url, backend=url, set_as_current=False)
    celery.conf.worker_hijack_root_logger = False
    celery.task(name=TASK, lazy=False)(_noop)
    return celery


def noop_task(celery: Celery) -> Any:
    """The task, to be sent with `apply_async`."""
    return cast("Any", celery).tasks[TASK]


def _noop() -> str:
    return "done"


app = make_raw(os.environ.get(URL_VARIABLE, "redis://127.0.0.1:6379/1"))
