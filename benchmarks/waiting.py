"""What a thousand children cost that all wait for a model at once: in one worker process, and in a bare event loop.

Both run the same agent, tool and model (`child`), and both are measured from outside by the same code: the time from
the first start to the last answer, the CPU time of the process in it, and how much it had grown when all waited.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

from benchmarks.child import prompt_of
from benchmarks.gate import Gate
from benchmarks.machine import group_cpu_seconds, group_rss_mib
from benchmarks.spawn import declare
from benchmarks.stage import ROOT, Stage, call
from broker_config import load_settings
from subagent_tasks.protocol.keys import Keys

IDLE_SECONDS = 1.0
"""How long an idle process gets to come to rest before its memory is read."""

ARRIVAL_SECONDS = 60.0
"""After this long the gate opens, whether all wait or not."""

CALL_SECONDS = 150.0
FIRST_TOKEN = 1


@dataclass(frozen=True, slots=True)
class Cost:
    """One side. What a child costs is its share of the process's; `waited` is how many waited at once."""

    waited: int
    wall_seconds: float
    cpu_ms_per_child: float
    mib_per_child: float
    waiting_cpu_percent: float
    """CPU of the process while all waited, in percent of one core."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Both sides with `count` children each; of ours, how many answered, and how many were begun more than once."""

    count: int
    ours: Cost
    bare: Cost
    answered: int
    begun_again: int


async def measure_waiting(stage: Stage, *, count: int, hold_seconds: float) -> Waits:
    """`count` children on each side, one side after the other; all of them wait for `hold_seconds`."""
    async with _bare_process(stage, count=count) as (pid, run_bare):
        bare = await _measure(stage, pid, run_bare, count=count, hold_seconds=hold_seconds)
    app = declare(load_settings())
    answered: list[str] = []
    try:
        with stage.worker("benchmarks.spawn_agents") as worker:
            await stage.wait_ready(ours=1)
            async with stage.sessions(app=app) as (session,):

                async def run_ours() -> None:
                    calls = (call(session, prompt_of(number), timeout_seconds=CALL_SECONDS) for number in range(count))
                    ended = await asyncio.gather(*calls, return_exceptions=True)
                    answered.extend(run_id for run_id in ended if isinstance(run_id, str))

                ours = await _measure(stage, worker.pid, run_ours, count=count, hold_seconds=hold_seconds)
    finally:
        app.celery.close()
    begun_again = sum(token > FIRST_TOKEN for token in _tokens(stage, answered))
    return Waits(count, ours=ours, bare=bare, answered=len(answered), begun_again=begun_again)


async def _measure(
    stage: Stage, pid: int, run: Callable[[], Awaitable[None]], *, count: int, hold_seconds: float
) -> Cost:
    """`run` starts the children in the process `pid` and returns when all have answered."""
    await asyncio.sleep(IDLE_SECONDS)
    idle_mib, idle_seconds = group_rss_mib(pid), group_cpu_seconds(pid)
    begun = time.perf_counter()
    async with Gate(stage.gate_path) as gate:
        running = asyncio.ensure_future(run())
        arrival = asyncio.ensure_future(gate.until_arrived(count))
        await asyncio.wait({running, arrival}, timeout=ARRIVAL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        arrival.cancel()
        waited, waiting_from_seconds = gate.arrived, group_cpu_seconds(pid)
        await asyncio.sleep(hold_seconds)
        waiting_mib, waiting_to_seconds = group_rss_mib(pid), group_cpu_seconds(pid)
        gate.open()
        await running
    return Cost(
        waited=waited,
        wall_seconds=time.perf_counter() - begun,
        cpu_ms_per_child=(group_cpu_seconds(pid) - idle_seconds) * 1000 / count,
        mib_per_child=(waiting_mib - idle_mib) / max(waited, 1),
        waiting_cpu_percent=(waiting_to_seconds - waiting_from_seconds) / hold_seconds * 100,
    )


def _tokens(stage: Stage, run_ids: Sequence[str]) -> list[int]:
    """The fencing tokens of runs: raised by each claim, and by each taking away."""
    keys = Keys(stage.app.settings.namespace)
    pipeline = stage.redis.pipeline(transaction=False)
    for run_id in run_ids:
        pipeline.hget(keys.session(run_id), "token")
    return [int(cast("str", token)) for token in pipeline.execute()]


@asynccontextmanager
async def _bare_process(stage: Stage, *, count: int) -> AsyncGenerator[tuple[int, Callable[[], Awaitable[None]]]]:
    """A process with the bare loop, ready to start: its id, and what runs its children."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.bare_loop",
        str(count),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, **stage.environment},
        # A process group of its own, which is what is measured.
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    commands, answers = process.stdin, process.stdout

    async def expect(word: str) -> None:
        said = (await answers.readline()).decode().strip()
        if said != word:
            raise RuntimeError(f"the bare loop ended before it was {word}")

    async def run() -> None:
        commands.write(b"go\n")
        await expect("done")

    try:
        await expect("ready")
        yield process.pid, run
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
