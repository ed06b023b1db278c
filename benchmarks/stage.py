"""One server, the two apps on it, and their worker processes: real ones, started with the same flags.

Both sides use the same server, each its own database, so that their remote control and their results do not mix.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import redis
from celery import Celery  # pyright: ignore[reportMissingTypeStubs]

from benchmarks.gate import GATE_VARIABLE
from benchmarks.noop import NOOP, STAMPS_VARIABLE, Stamps, declare
from benchmarks.raw import URL_VARIABLE, make_raw
from broker_config import ENV_PREFIX, EmbeddedServer, load_settings
from subagent_tasks import SubagentApp
from subagent_tasks.host import Session
from subagent_tasks.testing.processes import WorkerProcess

ROOT = Path(__file__).parents[1]
OUR_DATABASE, RAW_DATABASE = 0, 1
WORKER_OPTIONS = ("--without-gossip", "--without-mingle")
OUR_CONCURRENCY = 1000
RAW_CONCURRENCY = 2
READY_SECONDS = 30.0
CALL_SECONDS = 60.0
"""How long one call may take before the benchmark gives up."""

_numbers = itertools.count(1)


@dataclass
class Stage:
    """Everything a measurement needs."""

    server: EmbeddedServer
    app: SubagentApp
    raw: Celery
    stamps: Stamps
    gate_path: Path
    redis: redis.Redis
    raw_redis: redis.Redis
    environment: dict[str, str] = field(default_factory=dict[str, str])

    @contextmanager
    def workers(self, *, ours: int = 0, raw: int = 0) -> Generator[tuple[list[WorkerProcess], list[WorkerProcess]]]:
        """Start that many worker processes of ours, and that many of raw Celery (prefork, `-c 2`); ended afterwards.

        They may still be starting: see `wait_ready`.
        """
        with ExitStack() as stack:
            our_workers = [stack.enter_context(self.worker()) for _ in range(ours)]
            raw_workers = [stack.enter_context(self._raw_worker()) for _ in range(raw)]
            yield our_workers, raw_workers

    def worker(self, app: str = "benchmarks.agents") -> WorkerProcess:
        """One worker process of ours, for `with`; `app` is the module it is pointed at."""
        return self._worker(app, concurrency=OUR_CONCURRENCY, options=WORKER_OPTIONS)

    async def wait_ready(self, *, ours: int = 0, raw: int = 0) -> None:
        """Return once so many workers of each side consume. Raises `RuntimeError` when they do not come up."""
        for celery, count in ((self.app.celery, ours), (self.raw, raw)):
            deadline = time.monotonic() + READY_SECONDS
            while count and await asyncio.to_thread(_count_workers, celery) < count:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{count} worker(s) of {celery.main} did not answer within {READY_SECONDS:g} s")

    @asynccontextmanager
    async def sessions(self, count: int = 1, *, app: SubagentApp | None = None) -> AsyncGenerator[list[Session]]:
        """That many fresh sessions of one host in this process; of the no-op app unless another one is given."""
        async with AsyncExitStack() as stack:
            host = await stack.enter_async_context((app or self.app).host())
            yield [await host.open_session(f"bench-{next(_numbers)}") for _ in range(count)]

    def _raw_worker(self) -> WorkerProcess:
        return self._worker(
            "benchmarks.raw", concurrency=RAW_CONCURRENCY, options=("--pool", "prefork", *WORKER_OPTIONS)
        )

    def _worker(self, app: str, *, concurrency: int, options: tuple[str, ...]) -> WorkerProcess:
        return WorkerProcess(
            app,
            directory=ROOT,
            env=self.environment,
            concurrency=concurrency,
            options=options,
            # Celery's default, which is what a deployment without options runs with.
            log_level="WARNING",
        )


@contextmanager
def open_stage() -> Generator[Stage]:
    """A stage on the bundled server. The caller's own `SUBAGENT_TASKS_*` variables do not reach it."""
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        del os.environ[name]
    with tempfile.TemporaryDirectory(prefix="subagent-tasks-bench-") as directory, EmbeddedServer() as server:
        stamps, gate_path = Path(directory) / "stamps", Path(directory) / "gate"
        stamps.touch()
        environment = {
            f"{ENV_PREFIX}BROKER_URL": server.url,
            f"{ENV_PREFIX}NAMESPACE": "bench",
            # The whole backlog belongs to a few sessions.
            f"{ENV_PREFIX}MAX_ACTIVE_JOBS": "100000",
            STAMPS_VARIABLE: str(stamps),
            GATE_VARIABLE: str(gate_path),
            URL_VARIABLE: server.url.removesuffix("/0") + f"/{RAW_DATABASE}",
            # Celery warns where a benchmark runs as root.
            "PYTHONWARNINGS": "ignore",
        }
        os.environ.update(environment)
        client = redis.Redis.from_url(server.url, decode_responses=True)
        raw_client = redis.Redis.from_url(environment[URL_VARIABLE], decode_responses=True)
        app, raw = declare(load_settings()), make_raw(environment[URL_VARIABLE])
        try:
            yield Stage(server, app, raw, Stamps(stamps), gate_path, client, raw_client, environment)
        finally:
            app.celery.close()
            raw.close()
            client.close()
            raw_client.close()


async def call(session: Session, prompt: str = NOOP, *, timeout_seconds: float = CALL_SECONDS) -> str:
    """A foreground call, from the arguments to the child's text; the run id."""
    result = await session.call("subagent", {"description": "a task", "prompt": prompt}, timeout=timeout_seconds)
    if result.is_error:
        raise RuntimeError(f"a delegation failed: {result.text}")
    return str(cast("dict[str, Any]", result.value)["runId"])


async def start_job(session: Session, prompt: str = NOOP) -> str:
    """A background call; the job id."""
    result = await session.call(
        "subagent",
        {"description": "a task", "prompt": prompt, "run_in_background": True},
        timeout=CALL_SECONDS,
    )
    if result.is_error:
        raise RuntimeError(f"a delegation failed: {result.text}")
    return str(cast("dict[str, Any]", result.value)["jobId"])


async def collect(session: Session, job_id: str) -> None:
    """Wait for a job and read it."""
    result = await session.call("job_output", {"job_id": job_id, "wait": True, "timeout_ms": 60_000})
    if result.is_error or "[status: completed" not in result.text:
        raise RuntimeError(f"a job failed: {result.text}")


def _count_workers(celery: Celery) -> int:
    return len(cast("list[object]", cast("Any", celery.control).ping(timeout=0.5)))
