"""Our side: an app whose children do nothing, so that what is left is what the delegation itself costs.

The prompt says what a child does: `NOOP` ends at once, `STAMP` ends at once and writes down when, `HOLD` waits for its
kill and writes down when.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from broker_config import BrokerSettings
from subagent_tasks import SubagentApp
from subagent_tasks.protocol.interfaces import Drive, Provider, Run
from subagent_tasks.protocol.models import Capabilities, ChildRequest, ChildResult, text_block

NOOP, STAMP, HOLD = "noop", "stamp", "hold"
STAMPS_VARIABLE = "BENCHMARKS_STAMPS"

Moment = Literal["started", "released"]


def declare(settings: BrokerSettings | None = None) -> SubagentApp:
    """The app of workers and hosts alike; its delegation tool is `subagent`."""
    app = SubagentApp(settings)
    app.add_provider(NoopProvider(Stamps(Path(os.environ.get(STAMPS_VARIABLE, os.devnull)))))
    app.add_delegation_tool(provider=NoopProvider.name)
    app.add_job_tools()
    return app


@dataclass(frozen=True, slots=True)
class Stamps:
    """Moments in workers, as seconds since the epoch, in a file: processes of one machine share that clock."""

    path: Path

    def add(self, moment: Moment, run_id: str) -> None:
        """Append one line; short enough to be written at once beside other processes."""
        line = f"{moment} {run_id} {time.time():.6f}\n"
        with self.path.open("a") as file:
            file.write(line)

    def read(self, moment: Moment) -> dict[str, float]:
        """Run id to moment."""
        lines = (line.split() for line in self.path.read_text().splitlines())
        return {run_id: float(seconds) for name, run_id, seconds in lines if name == moment}


class NoopProvider(Provider):
    """Starts at once and has nothing to do."""

    name = "noop"
    capabilities = Capabilities(depth_limit=True)
    resumable = True

    def __init__(self, stamps: Stamps) -> None:
        self._stamps = stamps

    async def start(self, request: ChildRequest, drive: Drive) -> Run:
        stamps = None if request.prompt == NOOP else self._stamps
        if stamps is not None:
            stamps.add("started", drive.session_id)
        return cast("Run", _NoopRun(drive.session_id, stamps=stamps, is_held=request.prompt == HOLD))


class _NoopRun:
    def __init__(self, run_id: str, *, stamps: Stamps | None, is_held: bool) -> None:
        self._run_id = run_id
        self._stamps = stamps
        self._cancelled = asyncio.Event() if is_held else None

    async def result(self) -> ChildResult:
        if self._cancelled is None:
            return ChildResult(stop_reason="completed", output=(text_block("done"),))
        await self._cancelled.wait()
        return ChildResult(stop_reason="aborted")

    async def cancel(self, reason: str) -> None:
        if self._cancelled is not None:
            self._cancelled.set()

    async def dispose(self) -> None:
        if self._stamps is not None:
            self._stamps.add("released", self._run_id)
