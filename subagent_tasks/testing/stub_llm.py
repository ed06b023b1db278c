"""A scripted model behind the real model APIs: OpenAI Chat Completions and Responses, Anthropic Messages.

Decides the bytes: every body, stream event, ending and error as the vendor's API sends it, so that real clients, agents
and worker processes can be driven. Standard library only. Which answer is next, `script.py` knows.

`serve_stub` serves one in a process of its own.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self, assert_never, cast

from subagent_tasks.errors import ConfigurationError
from subagent_tasks.testing.dialects import (
    DIALECTS,
    Content,
    Dialect,
    Event,
    Exchange,
    OpenAIChat,
    model_list,
    retry_headers,
)
from subagent_tasks.testing.script import (
    Disconnect,
    Failure,
    Reply,
    Script,
    SeenRequest,
    Stall,
    Step,
    ToolCalls,
    UnscriptedRequest,
    usage_of,
)

_CREDENTIAL_HEADERS = frozenset({"api-key", "authorization", "cookie", "proxy-authorization", "x-api-key"})
_STOP_TIMEOUT_SECONDS = 5.0


def stub_llm(script: Script | None = None, *, port: int = 0, models: Sequence[str] = ("stub-1",)) -> StubLLM:
    """A stub server for `with`: `with stub_llm(script) as stub: OpenAIProvider(base_url=stub.url, api_key="x")`."""
    return StubLLM(script, port=port, models=models)


class StubLLM:
    """An HTTP server on 127.0.0.1 that answers by a script.

    `url` is the base URL for OpenAI clients, `anthropic_url` the one for Anthropic's, which add `/v1` themselves.
    A request that no rule matches is answered 400. Leaving the `with` block ends every connection, stalled ones too.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        port: int = 0,
        models: Sequence[str] = ("stub-1",),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.script = script if script is not None else Script()
        self.models = tuple(models)
        self.stopping = threading.Event()
        self._port = port
        self._clock = clock
        self._lock = threading.Lock()
        self._bodies: list[dict[str, Any]] = []
        self._headers: list[dict[str, str]] = []
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def on(self, contains: str, steps: Step | Sequence[Step]) -> None:
        """See `Script.on`."""
        self.script.on(contains, steps)

    @property
    def url(self) -> str:
        """`http://127.0.0.1:PORT/v1`. Raises `ConfigurationError` before the server was started."""
        return f"{self.anthropic_url}/v1"

    @property
    def anthropic_url(self) -> str:
        """`http://127.0.0.1:PORT`. Raises `ConfigurationError` before the server was started."""
        if self._server is None:
            raise ConfigurationError("The stub has no URL before it runs: use `with stub_llm(script) as stub:`.")
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def requests(self) -> int:
        """How many model requests arrived, those that are held or failed among them."""
        return self.script.requests

    @property
    def seen(self) -> list[SeenRequest]:
        """The model requests in the order of their arrival, the same for every API."""
        return self.script.seen

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """The JSON bodies of the model requests, in the order of their arrival."""
        with self._lock:
            return list(self._bodies)

    @property
    def headers(self) -> list[dict[str, str]]:
        """Their headers, names in lower case, without those that hold credentials."""
        with self._lock:
            return list(self._headers)

    def start(self) -> Self:
        """Bind the port and serve in a thread of its own. Raises `OSError` if the port is taken."""
        self._server = _Server(self._port, self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="stub-llm", daemon=True
        )
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the server and every connection, at most 5 seconds later. Idempotent; the records stay readable."""
        self.stopping.set()
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._server.server_close()
        self._server.end_connections(_STOP_TIMEOUT_SECONDS)
        self._thread.join(_STOP_TIMEOUT_SECONDS)
        self._thread = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def record(self, body: dict[str, Any], headers: Mapping[str, str]) -> Exchange:
        """Write a model request down; used by the request handler."""
        kept = {name.lower(): value for name, value in headers.items() if name.lower() not in _CREDENTIAL_HEADERS}
        with self._lock:
            self._bodies.append(body)
            self._headers.append(kept)
            return Exchange(number=len(self._bodies), created=int(self._clock()), body=body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    # The default of 5 refuses connections when a few hundred children start at once.
    request_queue_size = 512

    def __init__(self, port: int, stub: StubLLM) -> None:
        self.stub = stub
        self._live: set[socket.socket] = set()
        self._changed = threading.Condition()
        super().__init__(("127.0.0.1", port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            self._live.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._changed:
            self._live.discard(request)
            self._changed.notify_all()

    def end_connections(self, timeout_seconds: float) -> None:
        with self._changed:
            for connection in self._live:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._changed.wait_for(lambda: not self._live, timeout_seconds)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that hung up is what many tests are about; anything else is a fault of the stub and must be seen.
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]  # socketserver names the base class

    def do_GET(self) -> None:
        if self._path().endswith("/models"):
            self._send_json(200, model_list(self.server.stub.models, anthropic="anthropic-version" in self.headers))
        else:
            self._send_json(404, OpenAIChat().error(404, f"no such page: {self._path()}", None))

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        dialect = next((dialect for suffix, dialect in DIALECTS if self._path().endswith(suffix)), None)
        if dialect is None:
            self._send_json(404, OpenAIChat().error(404, f"no such page: {self._path()}", None))
            return
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            self._send_json(400, dialect.error(400, "the body is not a JSON object", None))
            return
        self._answer(dialect, cast("dict[str, Any]", body))

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: requests are in `StubLLM.bodies`."""

    def _answer(self, dialect: Dialect, body: dict[str, Any]) -> None:
        stub = self.server.stub
        exchange = stub.record(body, dict(self.headers.items()))
        request = dialect.seen(body)
        if body.get("previous_response_id"):
            self._send_json(400, dialect.error(400, "the stub keeps no responses: send the whole input", None))
            return
        try:
            beat = stub.script.play(request)
        except UnscriptedRequest as error:
            self._send_json(400, dialect.error(400, str(error), None))
            return
        for wait in beat.waits:
            if not wait.passed_blocking(stopping=stub.stopping):
                self._drop()
                return
        streamed = bool(body.get("stream"))
        match beat.answer:
            case Reply() | ToolCalls() as answer:
                content = Content.of(answer, usage_of(answer, request))
                if streamed:
                    self._stream(dialect.events(exchange, content))
                elif content.finish == "error" and (failed := dialect.error_instead_of_body()):
                    self._send_json(*failed)
                else:
                    self._send_json(200, dialect.whole(exchange, content))
            case Failure() as failure:
                message = failure.message or f"scripted failure {failure.status}"
                self._send_json(
                    failure.status, dialect.error(failure.status, message, failure.error_code), retry_headers(failure)
                )
            case Disconnect(after=after, clean=clean):
                if streamed and after is not None:
                    self._stream(dialect.events(exchange, Content.partial(after)), is_complete=clean)
                if not clean:
                    self._drop()
            case Stall(after=after):
                if streamed and after is not None:
                    self._stream(dialect.events(exchange, Content.partial(after)), is_complete=False)
                self._wait_for_hangup()
            case _ as never:
                assert_never(never)

    def _send_json(self, status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, events: Iterator[Event], *, is_complete: bool = True) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("cache-control", "no-cache")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for event in events:
            data = event.encoded()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        if is_complete:
            self.wfile.write(b"0\r\n\r\n")

    def _drop(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _wait_for_hangup(self) -> None:
        # Blocks without a timer: the client's end, or the server's when it stops, makes this return nothing.
        while self.connection.recv(1024):
            pass
        self._drop()

    def _path(self) -> str:
        return self.path.partition("?")[0].rstrip("/")
