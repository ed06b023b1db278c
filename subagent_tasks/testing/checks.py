"""What must hold after every test: nothing unsettled, no key without a lifetime."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import redis.asyncio

from subagent_tasks.protocol.keys import Keys

LIVING = ("processes", "clock", "sweeper", "expiring", "overtaken")
"""Kinds that belong to the running processes or bound themselves; they may be there while a process is."""

ENDING = (
    "inbox", "driven", "queued", "flagged", "active", "unsettled", "awaited", "alarms", "cascade", "held",
)  # fmt: skip
"""Kinds that are gone once nothing is unsettled."""


async def assert_settled(client: redis.asyncio.Redis, namespace: str) -> None:
    """No run of the namespace is queued, driven or suspended, and nothing waits for its descendants to be ended."""
    open_runs: list[str] = []
    async for key in cast("AsyncIterator[str]", client.scan_iter(match=f"{{{namespace}}}:session:*")):
        state = await cast("Any", client.hget(key, "state"))
        if state is not None and state != "settled":
            open_runs.append(f"{key} is {state}")
    walks = await cast("Any", client.smembers(Keys(namespace).cascade))
    open_runs += [f"what {run_id} had started is still to be ended" for run_id in sorted(walks)]
    assert not open_runs, f"unsettled runs: {open_runs}"


async def assert_no_leaked_keys(client: redis.asyncio.Redis, namespace: str) -> None:
    """Every key of the namespace, and every Celery result, has a lifetime; nothing that belongs to live work is left.

    Call it once all runs are settled.
    """
    keys = Keys(namespace)
    leaked: list[str] = []
    async for name in cast("AsyncIterator[str]", client.scan_iter(match="*")):
        if keys.is_ours(name):
            kind = name.partition("}:")[2].partition(":")[0]
            if kind in LIVING:
                continue
            if kind in ENDING:
                leaked.append(f"{name} is left")
            elif await client.ttl(name) == -1:
                leaked.append(f"{name} has no lifetime")
        elif name.startswith("celery-task-meta-") and await client.ttl(name) == -1:
            leaked.append(f"{name} has no lifetime")
    assert not leaked, "leaked keys: " + "; ".join(sorted(leaked))
