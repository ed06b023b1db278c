"""A stub of the model APIs in a process of its own: `python -m subagent_tasks.testing.serve_stub --script script.json`.

Serves a script that `Script.to_json` wrote, prints its address first, and ends on SIGTERM or SIGINT.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from subagent_tasks.errors import ConfigurationError
from subagent_tasks.testing.script import Script
from subagent_tasks.testing.stub_llm import stub_llm


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve a script file until SIGTERM or SIGINT. The first line printed is the base URL."""
    parser = argparse.ArgumentParser(prog="python -m subagent_tasks.testing.serve_stub", description=__doc__)
    parser.add_argument("--script", type=Path, required=True, help="file that Script.to_json wrote")
    parser.add_argument("--port", type=int, default=0, help="0 (the default): any free one")
    options = parser.parse_args(arguments)
    try:
        script = Script.from_json(options.script.read_bytes())
    except (OSError, ConfigurationError) as error:
        print(f"Error: {options.script}: {_reason(error)}", file=sys.stderr)
        return 2
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: ended.set())
    with stub_llm(script, port=options.port) as stub:
        print(stub.url, flush=True)
        ended.wait()
    return 0


def _reason(error: OSError | ConfigurationError) -> str:
    """What is wrong with the file, in one line."""
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror}"
    cause = error.__cause__
    if not isinstance(cause, ValidationError):
        return str(error)
    first, *others = cause.errors(include_url=False, include_input=False, include_context=False)
    place = ".".join(str(part) for part in first["loc"])
    more = f" (and {len(others)} more)" if others else ""
    return f"no script as Script.to_json writes it: {place + ': ' if place else ''}{first['msg']}{more}"


if __name__ == "__main__":
    sys.exit(main())
