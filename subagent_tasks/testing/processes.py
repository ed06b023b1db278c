"""Real worker processes for tests that kill, freeze and stop them: Celery's own command line, nothing simulated.

Decides how such a process is started, watched and ended; what it runs is the application it is pointed at. However the
test ends, the process ends with it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final, Self, cast

from subagent_tasks.errors import OperatorError

READY_TIMEOUT_SECONDS: Final = 20.0
STOP_TIMEOUT_SECONDS: Final = 5.0
LOG_TAIL_LINES: Final = 40


class WorkerProcess:
    """`python -m celery -A APP worker` in a process group of its own: `with WorkerProcess("agents") as worker: …`.

    `app` is what `-A` takes, `module` or `module:attribute`, found from `directory`. `env` is added to this process's
    environment. `options` are further options of `celery worker`. Output goes to the file `log_file`, a temporary one
    unless given. Entering starts the process and does not wait, so that several start at once: see `wait_ready`.
    """

    def __init__(
        self,
        app: str,
        *,
        directory: Path | None = None,
        env: Mapping[str, str] | None = None,
        concurrency: int = 10,
        options: Sequence[str] = (),
        log_file: Path | None = None,
        log_level: str = "INFO",
    ) -> None:
        self._command = [sys.executable, "-m", "celery", "-A", app, "worker", "-n", f"{os.urandom(4).hex()}@%h"]
        self._command += ["-c", str(concurrency), "-l", log_level, *options]
        self._directory = directory
        self._env = {**os.environ, **(env or {})}
        self._owns_log = log_file is None
        self._log_file = log_file
        self._guard: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._exit_code: int | None = None

    def start(self) -> Self:
        """Start the process. Raises `OperatorError` when it runs already or cannot be run."""
        if self._guard is not None:
            raise OperatorError(f"the worker was started already, pid {self._pid}: make a new WorkerProcess")
        if self._log_file is None:
            handle, name = tempfile.mkstemp(prefix="subagent-tasks-worker-", suffix=".log")
            os.close(handle)
            self._log_file = Path(name)
        with self._log_file.open("ab") as log:
            # -S: no site-packages, so it starts in about 20 ms.
            self._guard = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    "-c",
                    _GUARD,
                    str(self._log_file) if self._owns_log else "",
                    *self._command,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self._directory,
                env=self._env,
                start_new_session=True,
            )
        self._pid = int(self._report(STOP_TIMEOUT_SECONDS) or 0)
        if not self._pid:
            self.close()
            raise OperatorError(f"the worker could not be run: {' '.join(self._command)}")
        return self

    def wait_ready(self, timeout_seconds: float = READY_TIMEOUT_SECONDS) -> Self:
        """Return once the worker consumes, as it says in its log (level INFO or below).

        Raises `OperatorError` with the end of the log when it ended, or is not ready within `timeout_seconds`.
        """
        deadline = time.monotonic() + timeout_seconds
        while " ready." not in self.log:
            if not self.is_running:
                raise OperatorError(f"the worker ended while it started. Its log ends:\n{self._tail()}")
            if time.monotonic() > deadline:
                raise OperatorError(
                    f"the worker is not ready within {timeout_seconds:g} s. Its log ends:\n{self._tail()}"
                )
            time.sleep(0.02)
        return self

    @property
    def pid(self) -> int:
        """The process id of the worker itself; also of its process group."""
        if not self._pid:
            raise OperatorError("the worker was not started: use it inside `with`, or call start()")
        return self._pid

    @property
    def is_running(self) -> bool:
        """Whether the process lives; a frozen one does."""
        return self._guard is not None and self._guard.poll() is None

    @property
    def log(self) -> str:
        """Everything the process wrote so far, to standard output and error."""
        if self._log_file is None or not self._log_file.exists():
            return ""
        return self._log_file.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL, and return once it is gone: what the out-of-memory killer does. Idempotent."""
        self._signal(signal.SIGKILL)
        self.wait(STOP_TIMEOUT_SECONDS)

    def terminate(self) -> None:
        """SIGTERM: what a supervisor sends for a warm shutdown. Returns at once; see `wait`."""
        # The worker alone: a supervisor does not signal what the worker started either.
        if self.is_running:
            os.kill(self.pid, signal.SIGTERM)

    def freeze(self) -> None:
        """SIGSTOP: it keeps its connections and does nothing, as in a long pause of its machine."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT: go on where `freeze` stopped."""
        self._signal(signal.SIGCONT)

    def wait(self, timeout_seconds: float = STOP_TIMEOUT_SECONDS) -> int:
        """Wait for its end; the exit code, negative for a signal. Raises `OperatorError` when it goes on longer."""
        if self._exit_code is None:
            if self._guard is None:
                raise OperatorError("the worker was not started: use it inside `with`, or call start()")
            try:
                self._guard.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                raise OperatorError(
                    f"the worker did not end within {timeout_seconds:g} s. Its log ends:\n{self._tail()}"
                ) from None
            self._exit_code = int(self._report(0) or self._guard.returncode)
        return self._exit_code

    def close(self) -> None:
        """End it if it still runs, at once, with everything it started; a temporary log goes with it. Idempotent."""
        if self._guard is None:
            return
        with contextlib.suppress(BrokenPipeError):
            cast("IO[bytes]", self._guard.stdin).close()
        try:
            self._guard.wait(STOP_TIMEOUT_SECONDS)
        finally:
            cast("IO[bytes]", self._guard.stdout).close()
            if self._owns_log and self._log_file is not None:
                self._log_file.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _signal(self, number: signal.Signals) -> None:
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def _report(self, timeout_seconds: float) -> bytes:
        reports = cast("IO[bytes]", cast("subprocess.Popen[bytes]", self._guard).stdout)
        waiter = select.poll()
        waiter.register(reports, select.POLLIN)
        return reports.readline().strip() if waiter.poll(timeout_seconds * 1000) else b""

    def _tail(self) -> str:
        return "\n".join(self.log.splitlines()[-LOG_TAIL_LINES:]) or "(empty)"


def kill_worker(worker: WorkerProcess) -> int:
    """SIGKILL a worker in the middle of whatever it does; its process id, once it is gone."""
    pid = worker.pid
    worker.kill()
    return pid


# The worker's parent. It holds the read end of a pipe whose write end only the test's process has: however that
# process ends, the pipe closes, the worker's group is killed and a temporary log removed. It says the worker's process
# id, and at the end its exit code.
_GUARD: Final = """
import contextlib, os, signal, subprocess, sys, threading
signal.signal(signal.SIGINT, signal.SIG_IGN)
log, *command = sys.argv[1:]
worker = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True)
def end_group():
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, signal.SIGKILL)
def end_with_the_parent():
    os.read(0, 1)
    end_group()
    if log:
        with contextlib.suppress(OSError):
            os.unlink(log)
print(worker.pid, flush=True)
threading.Thread(target=end_with_the_parent, daemon=True).start()
code = worker.wait()
end_group()
print(code, flush=True)
os._exit(0)
"""
