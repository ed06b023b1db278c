"""Resident memory of processes that do nothing: workers, and hosts in processes of their own.

`python -m benchmarks.memory ours|raw` is such a host: it says how much it holds once it is idle.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass

from benchmarks.machine import group_rss_mib, own_rss_mib
from benchmarks.raw import TASK, URL_VARIABLE, make_raw
from benchmarks.stage import ROOT, Stage

SETTLE_SECONDS = 3.0
HOST_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Memory:
    """MiB. A prefork worker is its parent and two children; pages they share count in each."""

    our_worker: float
    raw_worker: float
    our_host: float
    raw_host: float


async def measure_memory(stage: Stage) -> Memory:
    """One idle worker of each side, then one idle host of each."""
    with stage.workers(ours=1, raw=1) as (ours, raw):
        await stage.wait_ready(ours=1, raw=1)
        await asyncio.sleep(SETTLE_SECONDS)
        our_worker, raw_worker = group_rss_mib(ours[0].pid), group_rss_mib(raw[0].pid)
    our_host, raw_host = [await asyncio.to_thread(_host_rss_mib, side) for side in ("ours", "raw")]
    return Memory(our_worker=our_worker, raw_worker=raw_worker, our_host=our_host, raw_host=raw_host)


def _host_rss_mib(side: str) -> float:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", side],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HOST_SECONDS,
        check=True,
    )
    return float(done.stdout)


async def _be_our_host() -> float:
    # The import is what is measured.
    from benchmarks.agents import app  # noqa: PLC0415

    async with app.host() as host:
        session = await host.open_session("bench-memory")
        await session.call("job_list", {})
        return own_rss_mib()


def _be_raw_host() -> float:
    raw = make_raw(os.environ[URL_VARIABLE])
    result = raw.tasks[TASK].apply_async()
    result.forget()
    return own_rss_mib()


if __name__ == "__main__":
    print(asyncio.run(_be_our_host()) if sys.argv[1] == "ours" else _be_raw_host())
