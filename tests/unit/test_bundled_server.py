"""`python -m broker_config`: from its first line to its end, as a reader of the README would run it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

import broker_config.__main__ as command
from broker_config import EmbeddedServerError

WAIT_SECONDS = 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_it_is_asked_to_end(number: signal.Signals, tmp_path: Path) -> None:
    """README, Run workers: the first line is the setting; after the end nobody listens and the data is kept."""
    process = subprocess.Popen(
        [sys.executable, "-m", "broker_config", "--directory", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert process.stdout is not None
        try:
            name, _, url = process.stdout.readline().strip().partition("=")
            assert name == "export SUBAGENT_TASKS_BROKER_URL"
            with redis.Redis.from_url(url, socket_timeout=WAIT_SECONDS) as client:
                assert client.ping()
            process.send_signal(number)
            assert process.wait(WAIT_SECONDS) == 0
        finally:
            process.kill()
    assert any(tmp_path.iterdir())
    address = urlsplit(str(url))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.hostname or "", address.port or 0), timeout=WAIT_SECONDS)


def test_without_the_server_it_says_what_to_install_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """P13: no traceback for what is merely not installed."""

    def no_handler(*_: object) -> None: ...

    def missing(**_: object) -> None:
        raise EmbeddedServerError("the server is not installed: do this")

    monkeypatch.setattr(command, "EmbeddedServer", missing)
    monkeypatch.setattr(signal, "signal", no_handler)
    assert command.main([]) == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "python -m broker_config: the server is not installed: do this\n")


@pytest.mark.parametrize("port", ["0", "70000", "x", "-1"])
def test_a_port_that_is_none_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    """P13: the value and what would do."""
    with pytest.raises(SystemExit) as ended:
        command.main(["--port", port])
    assert ended.value.code == 2
    assert "1 to 65535" in capsys.readouterr().err
