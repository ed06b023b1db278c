"""The demo's processes: how they are started, known to be ready, and ended however the demo ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from subagent_tasks.errors import OperatorError

MODEL_START_SECONDS = 60.0
WORKER_START_SECONDS = 30.0
STOP_SECONDS = 15.0
LOG_TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class Child:
    """One started process and where its output goes."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def raise_if_ended(self) -> None:
        """Raise `OperatorError` with the end of its log when it is gone."""
        code = self.process.poll()
        if code is not None:
            raise OperatorError(f"the {self.name} ended with exit code {code}. Its log ends:\n{self.log_tail()}")

    def log_tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:]) or "(empty)"

    def terminate(self, *, timeout_seconds: float = STOP_SECONDS) -> int:
        """SIGTERM, after a while SIGKILL; the exit code. Idempotent."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_seconds)
        except BaseException as error:
            # Also on a second Ctrl-C: nothing may be left behind.
            self.process.kill()
            code = self.process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return code
            raise


@contextlib.contextmanager
def local_model(weights: Path, *, directory: Path) -> Generator[Child]:
    """The model's server, started; `model_url` waits until it is ready."""
    command = [sys.executable, "-m", "subagent_tasks.demo.model_server", str(weights)]
    # Its threads wait for each other after every layer. By default they spin, and where any other process wants a core
    # one of them spins in vain: seen five times slower on two cores.
    environment = {"OMP_WAIT_POLICY": "passive"}
    # It ends when its stdin does, so it cannot outlive a demo that was killed.
    with _running(
        "model server", command, directory=directory, environment=environment, stdin=subprocess.PIPE, answers=True
    ) as child:
        yield child


def model_url(child: Child) -> str:
    """Where the model's server listens, once it does. Raises `OperatorError` with the end of its log."""
    output = cast("IO[bytes]", child.process.stdout)
    waiter = select.poll()
    waiter.register(output, select.POLLIN)
    line = output.readline() if waiter.poll(MODEL_START_SECONDS * 1000) else b""
    if not line.strip():
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(1)
        child.raise_if_ended()
        raise OperatorError(f"the model was not ready within {MODEL_START_SECONDS:g} s. Log:\n{child.log_tail()}")
    return line.decode().strip()


@contextlib.contextmanager
def worker(app: str, *, directory: Path, environment: Mapping[str, str]) -> Generator[Child]:
    """`subagent-tasks worker APP`, started."""
    command = [sys.executable, "-m", "subagent_tasks", "worker", app]
    with _running("worker", command, directory=directory, environment=environment) as child:
        yield child


@contextlib.contextmanager
def _running(
    name: str,
    command: Sequence[str],
    *,
    directory: Path,
    environment: Mapping[str, str],
    stdin: int = subprocess.DEVNULL,
    answers: bool = False,
) -> Generator[Child]:
    path = directory / f"{name.replace(' ', '-')}.log"
    with path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE if answers else log,
            stderr=log,
            # Handed on, not read: the user's API keys and proxies are the worker's to know.
            env={**os.environ, "PYDANTIC_AI_NO_BANNER": "1", **environment},
            # Ctrl-C in the terminal is for the demo, which then ends its processes in order.
            start_new_session=True,
        )
    child = Child(name, process, path)
    try:
        yield child
    finally:
        child.terminate()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
