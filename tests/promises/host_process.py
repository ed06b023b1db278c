"""A host in a process of its own, for tests that kill one or let two race: it makes its calls when it is told to.

However the test ends, the process ends with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

from subagent_tasks.testing import wait_until

READY_TIMEOUT_SECONDS = 40
ANSWER_TIMEOUT_SECONDS = 10


class HostProcess:
    """Opens `session_id`, says that it is ready, makes all `calls` at once when told, and writes their results down."""

    def __init__(
        self, session_id: str, calls: Sequence[Mapping[str, Any]], *, directory: Path, env: Mapping[str, str], log: Path
    ) -> None:
        self._log, self._errors = log, log.with_suffix(".errors")
        with log.open("wb") as output, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SCRIPT, session_id, json.dumps(calls)],
                cwd=directory,
                env={**os.environ, **env},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
            )

    async def wait_ready(self) -> Self:
        """Return once its session is open."""
        await wait_until(
            lambda: self._said or self._process.poll() is not None,
            description="the host is ready",
            timeout_seconds=READY_TIMEOUT_SECONDS,
        )
        assert self._said == ["ready"], self._errors.read_text()
        return self

    def call(self) -> None:
        """Let it make its calls."""
        self._orders.write(b"call\n")
        self._orders.flush()

    async def results(self) -> list[dict[str, Any]]:
        """What its calls gave, in their order, once all have."""
        await wait_until(
            lambda: len(self._said) > 1, description="the host answered", timeout_seconds=ANSWER_TIMEOUT_SECONDS
        )
        return json.loads(self._said[1])

    def kill(self) -> None:
        """SIGKILL, and return once it is gone."""
        self._process.kill()
        self._process.wait(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._orders.close()
        self.kill()

    @property
    def _orders(self) -> IO[bytes]:
        return cast("IO[bytes]", self._process.stdin)

    @property
    def _said(self) -> list[str]:
        """The whole lines it wrote; what its sweeper or a traceback has to say goes elsewhere."""
        return self._log.read_text().split("\n")[:-1]


_SCRIPT = """
import asyncio, json, os, sys, threading
from agents import app

def end_with_the_test():
    sys.stdin.read()
    os._exit(1)

async def main(session_id, calls):
    async with app.host() as host:
        session = await host.open_session(session_id)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        threading.Thread(target=end_with_the_test, daemon=True).start()
        results = await asyncio.gather(*(session.call(**call) for call in calls))
        print(json.dumps([result.model_dump(mode="json") for result in results]), flush=True)

asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
"""
