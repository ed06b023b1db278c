"""Checks of the Redis server that holds the state (`broker_config/redis.conf` says why)."""

from __future__ import annotations

from subagent_tasks.doctor.finding import Finding
from subagent_tasks.store.server import ServerFacts

OLDEST_REDIS = (6, 2)
MAX_CLOCK_SKEW_SECONDS = 5.0
"""Leases go by the server's clock alone; Celery's backstop and the dates in results go by the machine's."""


def check_version(facts: ServerFacts) -> Finding:
    """The scripts use what Redis has since 6.2; every Valkey is newer."""
    if facts.redis_version < OLDEST_REDIS:
        oldest = ".".join(str(part) for part in OLDEST_REDIS)
        return Finding(
            "version", "failed", f"{facts.name} {facts.version or '?'} is too old", f"use Redis {oldest}+ or Valkey"
        )
    return Finding("version", "ok", f"{facts.name} {facts.version}")


def check_topology(facts: ServerFacts) -> Finding:
    """One primary (protocol §1)."""
    if facts.mode == "cluster":
        fix = (
            "use one primary; kombu has no transport for Cluster. A fleet outgrows it by namespaces on several servers"
        )
        return Finding("topology", "failed", "Redis Cluster is not supported", fix)
    if facts.mode == "sentinel":
        return Finding(
            "topology",
            "failed",
            "this is a Sentinel, which holds no data",
            "name the primary in SUBAGENT_TASKS_REDIS_URL",
        )
    if facts.role != "master":
        return Finding(
            "topology", "failed", f"this server is a {facts.role}: it cannot be written to", "name its primary"
        )
    return Finding("topology", "ok", "one primary")


def check_eviction(facts: ServerFacts) -> Finding:
    """A server that evicts forgets accepted work when its memory is full (P1)."""
    if facts.eviction_policy is None:
        return Finding(
            "eviction", "warning", "the server does not say how it evicts", "make sure that it never drops a key"
        )
    if facts.eviction_policy != "noeviction":
        return Finding(
            "eviction",
            "failed",
            f"maxmemory-policy is {facts.eviction_policy}: accepted work vanishes when memory is full",
            "set maxmemory-policy noeviction",
        )
    return Finding("eviction", "ok", "noeviction")


def check_persistence(facts: ServerFacts) -> Finding:
    """Accepted is durable only where the server writes it down (P1)."""
    if facts.append_only is None:
        return Finding(
            "persistence",
            "warning",
            "the server does not say whether it persists",
            "make sure that a restart loses nothing",
        )
    if not facts.append_only:
        return Finding(
            "persistence",
            "failed",
            "the append-only file is off: a restart of the server loses accepted work",
            "set appendonly yes (CONFIG SET appendonly yes, then CONFIG REWRITE)",
        )
    if facts.last_write_failed:
        return Finding(
            "persistence",
            "failed",
            "the last write to the append-only file failed",
            "look at the server's disk and log",
        )
    return Finding("persistence", "ok", "the append-only file is on")


def check_clock(facts: ServerFacts, *, here_ms: int) -> Finding:
    """How far this machine's clock is from the server's."""
    skew_seconds = (here_ms - facts.time_ms) / 1000
    if abs(skew_seconds) > MAX_CLOCK_SKEW_SECONDS:
        way = "ahead of" if skew_seconds > 0 else "behind"
        return Finding(
            "clock",
            "warning",
            f"this machine's clock is {abs(skew_seconds):.1f} s {way} the server's",
            "synchronise both with NTP: dates in results and Celery's redelivery go by the machines' clocks",
        )
    return Finding("clock", "ok", f"within {MAX_CLOCK_SKEW_SECONDS:g} s of the server's")
