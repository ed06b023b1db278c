"""A host that does nothing, in a process of its own; `python -m benchmarks.idle_host ours|raw` prints the MiB it holds.

It imports what such a host imports and nothing of the benchmark.
"""

# Which side is imported is what is measured.
# ruff: noqa: PLC0415

from __future__ import annotations

import asyncio
import os
import sys

from benchmarks.machine import own_rss_mib


def _be_ours() -> float:
    from benchmarks.agents import app

    async def be() -> float:
        async with app.host() as host:
            session = await host.open_session("bench-memory")
            await session.call("job_list", {})
            return own_rss_mib()

    return asyncio.run(be())


def _be_raw() -> float:
    from benchmarks.raw import URL_VARIABLE, make_raw, noop_task

    noop_task(make_raw(os.environ[URL_VARIABLE])).apply_async(expires=1).forget()
    return own_rss_mib()


if __name__ == "__main__":
    print(_be_ours() if sys.argv[1] == "ours" else _be_raw())
