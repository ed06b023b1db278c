"""Resident memory of processes that do nothing: workers, and hosts in processes of their own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import dataclass

from benchmarks.machine import group_rss_mib
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
        [sys.executable, "-m", "benchmarks.idle_host", side],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HOST_SECONDS,
        check=True,
    )
    return float(done.stdout)
