"""A stage: one namespace with its worker processes, its model and its hosts; and what every test says on it."""

from __future__ import annotations

import asyncio
import itertools
import os
import runpy
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest import mock

import redis
import redis.asyncio
from host_process import HostProcess

from broker_config import queue_name
from subagent_tasks import SubagentApp
from subagent_tasks.host import Session
from subagent_tasks.protocol.keys import Keys
from subagent_tasks.protocol.models import Notice
from subagent_tasks.testing import StubLLM, call_tool, wait_until
from subagent_tasks.testing.checks import assert_no_leaked_keys, assert_settled
from subagent_tasks.testing.faults import age_lease
from subagent_tasks.testing.processes import WorkerProcess
from subagent_tasks.testing.script import SeenRequest, ToolCalls

HERE = Path(__file__).parent
LEASE_SECONDS = 1.5
WITHIN_TWO_LEASES_SECONDS = 2 * LEASE_SECONDS
CONCURRENCY = 4
PROCESS_SECONDS = 40
"""What a process may take to start or to end on a busy machine: several start at once, and each loads libraries."""
WORKER_OPTIONS = ("--without-gossip", "--without-mingle")

_numbers = itertools.count(1)


@dataclass
class Stage:
    """One namespace on one server, the model its children talk to, and the workers started for it."""

    url: str
    model: StubLLM
    directory: Path
    environment: dict[str, str] = field(default_factory=dict[str, str])
    namespace: str = field(default_factory=lambda: f"stage-{os.getpid()}-{next(_numbers)}")
    workers: list[WorkerProcess] = field(default_factory=list[WorkerProcess])
    stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.gates.mkdir(parents=True)
        self.keys = Keys(self.namespace)
        self.environment = {
            "SUBAGENT_TASKS_BROKER_URL": self.url,
            "SUBAGENT_TASKS_NAMESPACE": self.namespace,
            "SUBAGENT_TASKS_LEASE_SECONDS": str(LEASE_SECONDS),
            "PROMISES_MODEL_URL": self.model.url,
            "PROMISES_NOTES": str(self.directory / "notes"),
            "PROMISES_GATES": str(self.gates),
            **self.environment,
        }
        self.app = self._load()
        state_url = self.app.settings.redis_py_url
        self.redis = redis.Redis.from_url(state_url, decode_responses=True, socket_timeout=5)
        self.stack.callback(self.redis.close)
        self.stack.callback(self.app.celery.close)

    def worker(
        self,
        *,
        concurrency: int = CONCURRENCY,
        providers: tuple[str, ...] = (),
        options: tuple[str, ...] = (),
        log_level: str = "INFO",
    ) -> WorkerProcess:
        """Start a worker, of these providers only if any are named; the caller waits until it is ready."""
        if providers:
            options = ("-Q", ",".join(self.queue(provider) for provider in providers), *options)
        worker = WorkerProcess(
            "agents",
            directory=HERE,
            # Celery warns where tests run as root.
            env={**self.environment, "PYTHONWARNINGS": "ignore"},
            concurrency=concurrency,
            options=(*WORKER_OPTIONS, *options),
            log_level=log_level,
        )
        self.workers.append(self.stack.enter_context(worker))
        return worker

    def ensure(
        self, count: int, *, concurrency: int = CONCURRENCY, providers: tuple[str, ...] = ()
    ) -> list[WorkerProcess]:
        """At least `count` workers that run and are ready: tests that end one leave the rest to the next test."""
        while len(self.living) < count:
            self.worker(concurrency=concurrency, providers=providers)
        for worker in self.living:
            worker.wait_ready(PROCESS_SECONDS)
        return self.living

    @property
    def living(self) -> list[WorkerProcess]:
        return [worker for worker in self.workers if worker.is_running]

    def by_pid(self, pid: int) -> WorkerProcess:
        """The worker with that process id."""
        return next(worker for worker in self.workers if worker.pid == pid)

    @asynccontextmanager
    async def session(self, session_id: str | None = None) -> AsyncGenerator[Session]:
        """A session of a host that lives as long as the block."""
        async with self.app.host() as host:
            yield await host.open_session(session_id or f"session-{next(_numbers)}")

    @property
    def gates(self) -> Path:
        return self.directory / "gates"

    def open_gate(self, name: str) -> None:
        (self.gates / name).touch()

    def notes(self, contains: str) -> list[str]:
        """The lines that tools wrote and that hold the text, without the process ids."""
        return [line.partition(" ")[2] for line in self._lines() if contains in line]

    def note_pids(self, contains: str) -> list[int]:
        """Which processes wrote them."""
        return [int(line.partition(" ")[0]) for line in self._lines() if contains in line]

    async def noted(self, text: str) -> int:
        """Wait until a tool wrote that line; the process that did."""
        await wait_until(lambda: self.notes(text), description=f"a tool wrote {text!r}")
        return self.note_pids(text)[0]

    def state(self, run_id: str) -> str | None:
        return cast("str | None", self.redis.hget(self.keys.session(run_id), "state"))

    def transcript(self, run_id: str) -> list[tuple[str, dict[str, str]]]:
        """The entries as they are stored."""
        return cast("list[tuple[str, dict[str, str]]]", self.redis.xrange(self.keys.transcript(run_id)))

    def celery_state(self, run_id: str) -> str:
        """What a plain `AsyncResult` says."""
        return str(cast("Any", self.app.celery).AsyncResult(run_id).state)

    def asked(self, prompt: str) -> list[SeenRequest]:
        """The model requests whose prompt contains the text."""
        return [request for request in self.model.seen if prompt in request.prompt]

    def heard(self, prompt: str) -> list[SeenRequest]:
        """The model requests of children that were once told this, whatever they were told later."""
        return [
            request
            for request in self.model.seen
            if any(message.role == "user" and prompt in message.text for message in request.messages)
        ]

    def driver_pid(self, run_id: str) -> int:
        """The process that drives a run, or drove it last, from its record."""
        return int(str(self.redis.hget(self.keys.session(run_id), "driver")).split("-")[1])

    def states(self) -> list[str]:
        """The states of all runs."""
        keys: Any = cast("Any", self.redis).scan_iter(match=f"{{{self.namespace}}}:session:*")
        found = [cast("str | None", self.redis.hget(str(key), "state")) for key in keys]
        return [state for state in found if state is not None]

    def tree(self, session_id: str) -> list[dict[str, str]]:
        """The records of all runs below a parent session, the oldest first."""
        keys: Any = cast("Any", self.redis).scan_iter(match=f"{{{self.namespace}}}:session:*")
        records = [cast("dict[str, str]", self.redis.hgetall(str(key))) for key in keys]
        return sorted(
            (record for record in records if record.get("root") == session_id and "owner" in record),
            key=lambda record: (int(record["depth"]), int(record["created_at"])),
        )

    async def assert_clean(self) -> None:
        """Nothing is unsettled and no key is left without a lifetime, once sweepers have struck off their walks."""
        await wait_until(lambda: not self.redis.exists(self.keys.cascade), description="all walks are struck off")
        async with redis.asyncio.Redis.from_url(self.app.settings.redis_py_url, decode_responses=True) as client:
            await assert_settled(client, self.namespace)
            await assert_no_leaked_keys(client, self.namespace)

    async def aged(self, process: str) -> None:
        """As if that process had been silent for long."""
        async with redis.asyncio.Redis.from_url(self.app.settings.redis_py_url, decode_responses=True) as client:
            await age_lease(client, self.keys, process)

    def queue(self, provider: str = "spawn") -> str:
        """The list in which the provider's messages wait."""
        return queue_name(self.namespace, provider)

    def run(self, *words: str, input_text: str | None = None, code: int = 0, timeout_seconds: float = 20) -> str:
        """A process of its own under the stage's environment that ends with `code`: what it wrote on stdout."""
        done = subprocess.run(
            [sys.executable, *words],
            input=input_text,
            cwd=HERE,
            env={**os.environ, **self.environment, "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def host(self, session_id: str, *calls: Mapping[str, Any]) -> HostProcess:
        """Start a host of its own for these calls; the caller waits until it is ready."""
        log = self.directory / f"host-{next(_numbers)}.log"
        env = {**self.environment, "PYTHONWARNINGS": "ignore"}
        return self.stack.enter_context(HostProcess(session_id, calls, directory=HERE, env=env, log=log))

    def _load(self) -> SubagentApp:
        """The declaration as a host process would import it."""
        with mock.patch.dict(os.environ, self.environment):
            return cast("SubagentApp", runpy.run_path(str(HERE / "agents.py"))["app"])

    def _lines(self) -> list[str]:
        notes = self.directory / "notes"
        return notes.read_text().splitlines() if notes.exists() else []


MakeStage = Callable[..., Stage]


def arguments(prompt: str, *, background: bool = False) -> dict[str, Any]:
    """What a model writes to delegate."""
    return {"description": "a task", "prompt": prompt, **({"run_in_background": True} if background else {})}


def delegate(prompt: str, *, tool: str = "subagent", background: bool = False, call_id: str | None = None) -> ToolCalls:
    """A model's step that delegates."""
    return call_tool(tool, arguments(prompt, background=background), call_id=call_id)


async def start_job(session: Session, prompt: str, *, tool: str = "subagent") -> str:
    """Delegate in the background; the job id."""
    result = await session.call(tool, arguments(prompt, background=True))
    assert not result.is_error, result.text
    return str(cast("dict[str, Any]", result.value)["jobId"])


async def job(session: Session, job_id: str, *, wait_ms: int | None = None) -> dict[str, Any]:
    """What `job_output` says of a job: `text` and `job`."""
    wait = {} if wait_ms is None else {"wait": True, "timeout_ms": wait_ms}
    result = await session.call("job_output", {"job_id": job_id, **wait})
    assert not result.is_error, result.text
    return cast("dict[str, Any]", result.value)


async def notices_of(session: Session, count: int, *, timeout_seconds: float = 5) -> list[Notice]:
    """The first `count` notices of the session that were not acknowledged."""
    found: list[Notice] = []
    async with asyncio.timeout(timeout_seconds):
        async for notice in session.notices():
            found.append(notice)
            if len(found) == count:
                break
    return found
