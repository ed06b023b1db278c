"""`python -m broker_config`: the bundled server on loopback, for a machine without Redis or Docker.

Prints the setting that names it, then serves until SIGTERM or Ctrl-C. What it runs and how is `EmbeddedServer`'s;
production runs a server of its own with the same `redis.conf`.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from broker_config.embedded import EmbeddedServer, EmbeddedServerError
from broker_config.settings import ENV_PREFIX

PROGRAM = "python -m broker_config"
CHECK_SECONDS = 0.5
"""How often it looks whether the server still lives."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C. The first line printed is the export line; errors are told on stderr, exit 1."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Run the bundled server on this machine until Ctrl-C (extra `testing`)."
    )
    parser.add_argument("--port", type=_port, help="default: any free one")
    parser.add_argument("--directory", type=Path, help="where the data is kept; default: a temporary folder")
    options = parser.parse_args(arguments)

    # Before the start: a signal while it starts must not leave the temporary folder behind.
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: ended.set())
    try:
        with EmbeddedServer(port=options.port, directory=options.directory) as server:
            where = options.directory or "a temporary folder, removed at the end"
            print(f"export {ENV_PREFIX}BROKER_URL={server.url}", flush=True)
            print(f"server {server.pid} keeps its data in {where}; Ctrl-C ends it", file=sys.stderr, flush=True)
            while not ended.wait(CHECK_SECONDS):
                if not server.is_running:
                    raise EmbeddedServerError("the server was ended from outside: start it again")
    except (EmbeddedServerError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    return 0


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: give 1 to 65535")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
