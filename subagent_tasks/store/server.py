"""What the Redis server says of itself: version, topology, eviction, persistence, clock. Read only, for `doctor`.

INFO and TIME alone are used: the shipped ACL grants them, and CONFIG to nobody.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import redis.exceptions

from broker_config import BrokerSettings, safe_url
from subagent_tasks.errors import BrokerUnavailable, OperatorError
from subagent_tasks.store.connection import Moves, connect


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One server. `redis_version` is the Redis it is compatible with; None stands for what it does not say."""

    name: str
    version: str
    redis_version: tuple[int, ...]
    mode: str
    role: str
    eviction_policy: str | None
    append_only: bool | None
    last_write_failed: bool
    time_ms: int


async def read_server(settings: BrokerSettings) -> ServerFacts:
    """Ask the server that holds the state; bounded by `redis_timeout_seconds`.

    Raises `BrokerUnavailable` when it does not answer, `OperatorError` when this user may not ask.
    """
    client = connect(settings, max_connections=1)
    moves = Moves(client, settings)
    try:
        # The client's own retries would multiply the wait for a server that hangs.
        async with asyncio.timeout(settings.redis_timeout_seconds):
            info = await moves.read(client.info())
            seconds, microseconds = await moves.read(client.time())
    except TimeoutError as error:
        raise BrokerUnavailable(
            f"Redis at {safe_url(settings.state_url)} did not answer within {settings.redis_timeout_seconds:g} s: "
            "it hangs, is overloaded or cannot be reached; look at its log"
        ) from error
    except redis.exceptions.ResponseError as error:
        raise OperatorError(
            f"the server refused INFO or TIME ({type(error).__name__}): allow both to this user"
        ) from error
    finally:
        await client.aclose()
    return facts_of(info, time_ms=int(seconds) * 1000 + int(microseconds) // 1000)


def facts_of(info: dict[str, Any], *, time_ms: int) -> ServerFacts:
    """From the fields of INFO."""
    redis_version = str(info.get("redis_version", ""))
    # Valkey reports, beside its own, the version of Redis that it stands for.
    valkey_version = info.get("valkey_version")
    append_only = info.get("aof_enabled")
    return ServerFacts(
        name="Valkey" if valkey_version else "Redis",
        version=str(valkey_version or redis_version),
        redis_version=tuple(int(part) for part in redis_version.split(".")[:3] if part.isdigit()),
        mode="cluster" if info.get("cluster_enabled") == 1 else str(info.get("redis_mode", "standalone")),
        role=str(info.get("role", "master")),
        eviction_policy=info.get("maxmemory_policy"),
        append_only=None if append_only is None else append_only == 1,
        last_write_failed=info.get("aof_last_write_status", "ok") != "ok",
        time_ms=time_ms,
    )
