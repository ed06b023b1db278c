"""A small Celery app on our pool: `toy(url)` for a worker in this process, `app` for worker processes.

Its activations do what the first word of their run id says. A `Stage` is the pool's lifecycle and the test's window:
counters and gates in this process, `toy:*` keys in Redis where the worker is another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any, cast

import redis
import redis.asyncio
from celery import Celery
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff

from subagent_tasks.errors import OperatorError
from subagent_tasks.queue.activation import LIFECYCLE_ATTRIBUTE, ActivationTask
from subagent_tasks.queue.consumer import consumer_path
from subagent_tasks.queue.message import activation_message
from subagent_tasks.queue.pool_guard import use_asyncio_pool

QUEUE = "toy"
TASK = "toy.activate"
WAIT_SECONDS = 5.0


class Stage:
    """What the toy tasks leave behind, and what they wait for."""

    shutdown_grace_seconds = 1.5

    def __init__(self, url: str, *, complaint: str | None = None) -> None:
        self._url = url
        self._complaint = complaint
        self.counts: Counter[str] = Counter()
        self.calls: list[str] = []
        self.threads: set[str] = set()
        self.most_at_once = 0
        self.gate = asyncio.Event()
        self.releasing = asyncio.Event()
        self.loop: asyncio.AbstractEventLoop

    async def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.calls.append("start")
        if self._complaint is not None:
            raise OperatorError(self._complaint)
        self._redis = redis.asyncio.Redis.from_url(self._url, retry=Retry(ConstantBackoff(0.1), 20))
        await self._redis.set("toy:pid", os.getpid())

    async def release(self) -> None:
        self.calls.append("release")
        self.releasing.set()
        await self._redis.rpush("toy:calls", "release")

    async def stop(self) -> None:
        self.calls.append("stop")
        await self._redis.rpush("toy:calls", "stop")
        await self._redis.aclose()

    def open_gate(self) -> None:
        self.loop.call_soon_threadsafe(self.gate.set)

    async def play(self, run_id: str) -> None:
        kind = run_id.partition("-")[0]
        self.counts[f"{kind} started"] += 1
        running = sum(n if what.endswith("started") else -n for what, n in self.counts.items())
        self.most_at_once = max(self.most_at_once, running)
        self.threads.add(threading.current_thread().name)
        try:
            if kind == "hold":
                await self.gate.wait()
            elif kind == "drive":
                await self._redis.incr("toy:driving")
                await self.releasing.wait()
            elif kind == "stubborn":
                await self._redis.incr("toy:driving")
                await asyncio.sleep(60)
            elif kind == "mark":
                await self._redis.incr("toy:marks")
            elif kind == "raise":
                raise ValueError("secret of the child")
        finally:
            self.counts[f"{kind} ended"] += 1


def toy(url: str, *, stage: Stage | None = None, **settings: Any) -> Celery:
    """The app. `stage` becomes its lifecycle."""
    stage = stage or Stage(url)
    app = Celery("toy", broker=url, backend=url, set_as_current=False)
    app.conf.update(
        task_default_queue=QUEUE,
        worker_prefetch_multiplier=1,
        worker_consumer=consumer_path(),
        worker_cancel_long_running_tasks_on_connection_loss=False,
        broker_connection_retry_on_startup=True,
        # A closing channel waits for the end of its last blocking pop: by default, a second.
        broker_transport_options={"socket_timeout": 5.0, "polling_interval": 0.1},
        result_expires=60,
        result_backend_thread_safe=True,  # else each thread of a task opens a connection that nobody closes
        worker_hijack_root_logger=False,
        **settings,
    )
    setattr(app, LIFECYCLE_ATTRIBUTE, stage)
    use_asyncio_pool(app)

    class Activate(ActivationTask):
        name = TASK

        async def run(self, run_id: str, queue: str) -> None:
            await stage.play(run_id)

    app.register_task(Activate())

    task = partial(cast("Any", app).task, shared=False)

    @task(name="toy.add")
    def add(x: int, y: int) -> int:
        return x + y

    @task(name="toy.add_async")
    async def add_async(x: int, y: int) -> int:
        await asyncio.sleep(0)
        stage.threads.add(threading.current_thread().name)
        return x + y

    @task(name="toy.flaky", autoretry_for=(KeyError,), max_retries=2, default_retry_delay=0)
    async def flaky() -> int:
        stage.counts["flaky"] += 1
        if stage.counts["flaky"] < 2:
            raise KeyError("first time")
        return stage.counts["flaky"]

    @task(name="toy.long", acks_late=True)
    async def long(seconds: float) -> str:
        client = redis.asyncio.Redis.from_url(url)
        await client.incr("toy:long")
        await client.aclose()
        stage.counts["long started"] += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            stage.counts["long ended"] += 1
        return "slept"

    @task(name="toy.leave")
    async def leave() -> None:
        raise SystemExit(3)

    return app


def push(client: redis.Redis, *run_ids: str) -> None:
    client.lpush(QUEUE, *(activation_message(task=TASK, task_id=r, run_id=r, queue=QUEUE) for r in run_ids))


@contextlib.contextmanager
def worker_process(url: str, log: Path, *options: str, **environment: str) -> Generator[subprocess.Popen[bytes]]:
    """`celery -A toy_app worker` as an operator starts it."""
    command = [sys.executable, "-m", "celery", "-A", "toy_app", "worker", "--without-gossip", "--without-mingle"]
    variables = {**os.environ, "TOY_REDIS_URL": url, "PYTHONPATH": str(Path(__file__).parent), **environment}
    variables["PYTHONWARNINGS"] = "ignore"  # Celery warns where tests run as root
    with log.open("wb") as output:
        process = subprocess.Popen([*command, *options], env=variables, stdout=output, stderr=output)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(WAIT_SECONDS)


def wait_until(condition: Callable[[], object], *, description: str, seconds: float = WAIT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {description}")
        time.sleep(0.01)


_url = os.environ.get("TOY_REDIS_URL", "redis://127.0.0.1:1/0")
app = toy(_url, stage=Stage(_url, complaint=os.environ.get("TOY_COMPLAINT")))
if "TOY_CONSUMER" in os.environ:
    app.conf.worker_consumer = os.environ["TOY_CONSUMER"]
