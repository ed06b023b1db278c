"""Starts the worker of an app in this process; what it does then is the pool's and the driver's."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any, cast

from celery import Celery
from celery.utils.nodenames import nodename

from subagent_tasks.queue.pool import POOL_PATH


def run_worker(celery: Celery, *, concurrency: int, queues: Sequence[str], log_level: int) -> int:
    """Serve `queues` until told to stop; the exit code of the process.

    SIGTERM and the first Ctrl-C are warm shutdowns: no new message, and every drive is handed back.
    """
    worker = cast("Any", celery).Worker(
        # A name of its own: with Celery's default two workers on one machine answer `inspect` as one.
        hostname=nodename(f"subagents-{os.getpid()}", socket.gethostname()),
        pool_cls=POOL_PATH,
        concurrency=concurrency,
        queues=list(queues),
        loglevel=log_level,
        quiet=True,
        # Workers learn nothing from each other: state is in Redis. Mingle alone would cost a second at every start.
        without_gossip=True,
        without_mingle=True,
    )
    worker.start()
    return int(worker.exitcode or 0)
