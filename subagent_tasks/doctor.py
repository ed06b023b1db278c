"""Whether a deployment can keep the promises: server, settings, workers. Every finding that is bad says what to do.

The checks are functions from facts to findings; `examine` gathers the facts and never raises for what is wrong with the
deployment. Nothing is changed. What must hold and why: `broker_config/redis.conf`, protocol §1 and §7.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from broker_config import BrokerSettings, safe_url
from subagent_tasks.app import SubagentApp
from subagent_tasks.errors import SubagentError
from subagent_tasks.process import Process
from subagent_tasks.queue.inspection import check_broker, consumed_queues
from subagent_tasks.queue.publisher import ScriptPublisher
from subagent_tasks.store.server import ServerFacts, read_server

Level = Literal["ok", "warning", "failed"]

OLDEST_REDIS = (6, 2)
MAX_CLOCK_SKEW_SECONDS = 5.0
"""Leases go by the server's clock alone; Celery's backstop and the dates in results go by the machine's."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `fix` is empty for what is well."""

    check: str
    level: Level
    message: str
    fix: str = ""


async def examine(settings: BrokerSettings, app: SubagentApp | None = None) -> list[Finding]:
    """Look at everything; without `app` the providers' queues are unknown, and any living worker will do."""
    findings = [check_timeouts(settings)]
    try:
        facts = await read_server(settings)
        here_ms = int(time.time() * 1000)
        alive = await _alive(settings)
    except SubagentError as error:
        return [*findings, Finding("server", "failed", str(error), "start it, or correct the URL, and ask again")]
    findings += [
        Finding("server", "ok", f"answers at {safe_url(settings.state_url)}"),
        check_version(facts),
        check_topology(facts),
        check_eviction(facts),
        check_persistence(facts),
        check_clock(facts, here_ms=here_ms),
    ]
    workers = [name for name, until_ms in alive.items() if name.startswith("worker-") and until_ms > facts.time_ms]
    if app is None:
        return [*findings, check_any_worker(workers, namespace=settings.namespace)]
    try:
        await asyncio.to_thread(check_broker, app.celery)
    except SubagentError as error:
        return [*findings, Finding("broker", "failed", str(error), "start it, or correct the URL, and ask again")]
    consumed = await asyncio.to_thread(consumed_queues, app.celery)
    return [*findings, *check_workers(app.queues, consumed, living=len(workers))]


def check_timeouts(settings: BrokerSettings) -> Finding:
    """The settings could be read, so their relations hold (`BrokerSettings`); here they are for the eye."""
    return Finding(
        "timeouts",
        "ok",
        f"in order: model request {settings.model_request_timeout_seconds:g} s <= run limit "
        f"{settings.run_limit_seconds:g} s < visibility {settings.visibility_timeout_seconds:g} s <= retention "
        f"{settings.retention_seconds:g} s; a dead worker is found after {settings.lease_seconds:g} s",
    )


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


def check_any_worker(workers: Sequence[str], *, namespace: str) -> Finding:
    """Without the declaration: does anybody beat at all?"""
    if workers:
        return Finding(
            "workers", "ok", f"{len(workers)} alive in namespace {namespace!r}; name APP to check each queue"
        )
    return Finding(
        "workers", "failed", f"no worker is alive in namespace {namespace!r}", "start one: subagent-tasks worker APP"
    )


def check_workers(queues: Sequence[str], consumed: Mapping[str, frozenset[str]], *, living: int) -> list[Finding]:
    """Every declared provider's queue needs a worker. `living` is how many workers beat, whatever they answer."""
    if not queues:
        return [Finding("workers", "failed", "the app declares no provider", "call app.add_provider")]
    findings: list[Finding] = []
    for queue in queues:
        serving = sorted(worker for worker, names in consumed.items() if queue in names)
        if serving:
            findings.append(Finding("workers", "ok", f"{queue}: {', '.join(serving)}"))
            continue
        others = f" ({living} alive in the namespace, on other queues or too busy to answer)" if living else ""
        findings.append(
            Finding(
                "workers",
                "failed",
                f"{queue}: no worker consumes it{others}; its runs would wait for ever",
                f"start one: subagent-tasks worker APP --queues {queue.rpartition('.')[2]}",
            )
        )
    return findings


async def _alive(settings: BrokerSettings) -> dict[str, int]:
    # Never started: it only lends its store.
    process = Process(settings, role="command", publisher=ScriptPublisher(), queues=())
    try:
        return await process.processes.alive()
    finally:
        await process.stop()
