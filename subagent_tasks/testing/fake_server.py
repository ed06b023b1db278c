"""fakeredis behind a socket: what Celery and redis-py connect to in tests that need no real server."""

from __future__ import annotations

import io
import select
import socket
import threading
from types import TracebackType
from typing import Any, Self

from subagent_tasks.errors import OperatorError

SEND_SECONDS = 5.0
"""How long a client may read nothing while a reply to it is on the way."""


class FakeServer:
    """A fake Redis on a free loopback port, in this process: `with FakeServer() as server: server.url`.

    It keeps nothing and knows no persistence; scripts, streams and pub/sub work as on a real server.
    """

    def __init__(self) -> None:
        self._server: Any = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        if self._server is None:
            raise OperatorError("the fake server is not running: use it inside `with`")
        return f"redis://127.0.0.1:{self._server.server_address[1]}/0"

    def __enter__(self) -> Self:
        try:
            # A private path of fakeredis: it has no public one for the handler's socket option.
            from fakeredis._clients import (  # noqa: PLC0415 - an extra
                _tcp_server as tcp,  # pyright: ignore[reportPrivateUsage]  # as said above
            )
        except ImportError as error:
            raise OperatorError(
                "the test kit needs fakeredis with Lua: pip install 'subagent-tasks[testing]'"
            ) from error

        class Handler(tcp.TCPFakeRequestHandler):
            # Without it each reply waits for the client's delayed acknowledgement, about 40 ms.
            disable_nagle_algorithm = True

            def setup(self) -> None:
                # kombu sets the process's default timeout while it waits for messages; a connection accepted just then
                # would inherit it and be answered `timed out` as soon as it is idle.
                self.request.settimeout(None)
                super().setup()
                self.writer.writer = _WholeWriter(self.connection)

        class Server(tcp.TcpFakeServer):
            def __init__(self) -> None:
                super().__init__(("127.0.0.1", 0))
                self.RequestHandlerClass = Handler
                self.daemon_threads = True

        self._server = Server()
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, name="fake-redis", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        if self._thread is not None:
            self._thread.join(5)
        self._server = None


class _WholeWriter(io.BufferedIOBase):
    """Sends all of a reply: fakeredis makes its sockets non-blocking, where a large one would break off."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        # Replies and published messages come from different threads.
        self._lock = threading.Lock()

    def write(self, data: Any, /) -> int:
        rest = memoryview(data)
        count = rest.nbytes
        with self._lock:
            while rest:
                try:
                    rest = rest[self._connection.send(rest) :]
                except BlockingIOError:
                    # One that reads nothing must not hold up whoever publishes to it.
                    if not select.select([], [self._connection], [], SEND_SECONDS)[1]:
                        raise
        return count
