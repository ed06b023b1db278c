"""Whether a deployment can keep the promises: declaration, settings, server, workers. A bad finding says what to do.

The checks are functions from facts to findings; `examine` gathers the facts and never raises for what is wrong with the
deployment. Nothing is changed. What must hold and why: `broker_config/redis.conf`, protocol §1 and §7.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from broker_config import BrokerSettings, safe_url
from subagent_tasks.app import SubagentApp
from subagent_tasks.errors import ConfigurationError, SubagentError
from subagent_tasks.process import Process
from subagent_tasks.protocol.interfaces import Provider
from subagent_tasks.queue.inspection import REPLY_SECONDS, check_broker, consumed_queues
from subagent_tasks.queue.publisher import ScriptPublisher
from subagent_tasks.store.server import ServerFacts, read_server

Level = Literal["ok", "warning", "failed"]

OLDEST_REDIS = (6, 2)
MAX_CLOCK_SKEW_SECONDS = 5.0
"""Leases go by the server's clock alone; Celery's backstop and the dates in results go by the machine's."""
PREPARE_SECONDS = 30.0
"""How long a provider may take to prepare; the import of a model's client takes one or two."""


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
    declared = check_app(app) if app is not None else None
    if app is not None and declared is not None:
        # A provider that prepares nothing offers nothing to check.
        preparing = [each for each in app.providers.values() if type(each).prepare is not Provider.prepare]
        findings += [declared, *[await check_provider(provider) for provider in preparing]]
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
    workers = _beating(alive, now_ms=facts.time_ms)
    if app is None:
        return [*findings, check_any_worker(workers, namespace=settings.namespace)]
    if declared is not None and declared.level == "failed":
        return findings
    try:
        await asyncio.to_thread(check_broker, app.celery)
    except SubagentError as error:
        return [*findings, Finding("broker", "failed", str(error), "start it, or correct the URL, and ask again")]
    consumed = await asyncio.to_thread(consumed_queues, app.celery)
    findings += check_workers(app.queues, consumed, living=len(workers))
    if not consumed:
        return findings
    pids = await asyncio.to_thread(_worker_pids, app)
    try:
        # Once more: whoever began or ended while the consumers were asked is in one of the two.
        workers = {*workers, *_beating(await _alive(settings), now_ms=facts.time_ms)}
    except SubagentError as error:
        return [*findings, Finding("server", "failed", str(error), "start it, or correct the URL, and ask again")]
    return [*findings, *check_heartbeats(app.queues, consumed, pids=pids, beating=workers)]


def check_app(app: SubagentApp) -> Finding:
    """Whether the declaration is whole, which shows only when it is used."""
    try:
        _ = app.celery
    except SubagentError as error:
        return Finding("app", "failed", str(error), "correct the declaration and ask again")
    return Finding("app", "ok", f"declares the providers {', '.join(app.providers) or '(none)'}")


async def check_provider(provider: Provider, *, timeout_seconds: float = PREPARE_SECONDS) -> Finding:
    """Whether a child could be started here; what it needs may be set where the workers run, and only there."""
    check = f"provider {provider.name}"
    try:
        async with asyncio.timeout(timeout_seconds):
            await provider.prepare()
    except ConfigurationError as error:
        return Finding(check, "failed", str(error), "correct the declaration and ask again")
    except SubagentError as error:
        reason = str(error)
    except TimeoutError:
        reason = f"it was not prepared within {timeout_seconds:g} s"
    except Exception as error:
        # Whatever a provider of the deployment's own raises; its text may quote anything.
        reason = f"its prepare raised {type(error).__name__}"
    else:
        return Finding(check, "ok", "can be prepared in this environment")
    return Finding(
        check,
        "warning",
        f"it cannot run a child in this environment: {reason}",
        "see that the environment of the workers has what is missing; ask there again: subagent-tasks doctor APP",
    )


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


def check_heartbeats(
    queues: Sequence[str],
    consumed: Mapping[str, frozenset[str]],
    *,
    pids: Mapping[str, int],
    beating: Iterable[str],
) -> list[Finding]:
    """Whoever consumes a declared queue must beat: what it takes is else soon taken from it again (P6).

    Celery knows a worker by its name and `pids` by its process id; a heartbeat knows the process id alone. Machines may
    use the same one, so heartbeats are counted for each; too few of them leave all its workers suspect.
    """
    consumers = sorted(worker for worker, names in consumed.items() if not names.isdisjoint(queues))
    beats = Counter(process_id.split("-")[1] for process_id in beating)
    findings: list[Finding] = []
    for pid in sorted({pids[worker] for worker in consumers if worker in pids}):
        same = [worker for worker in consumers if pids.get(worker) == pid]
        missing = len(same) - beats[str(pid)]
        if missing <= 0:
            continue
        who = same[0] if len(same) == 1 else f"{missing} of {', '.join(same)}"
        findings.append(
            Finding(
                "heartbeats",
                "failed",
                f"{who} (process {pid}) consumes but does not beat: the runs it takes will not stay with it",
                "restart it: subagent-tasks worker APP",
            )
        )
    untold = [worker for worker in consumers if worker not in pids]
    if untold:
        findings.append(
            Finding(
                "heartbeats",
                "warning",
                f"{', '.join(untold)} did not say the process id in time, so no heartbeat could be looked for",
                "ask again when it is less busy",
            )
        )
    if consumers and not findings:
        findings.append(Finding("heartbeats", "ok", f"all {len(consumers)} workers that consume beat"))
    return findings


def _beating(alive: Mapping[str, int], *, now_ms: int) -> list[str]:
    """The ids of the worker processes, `worker-<pid>-<random>`, whose heartbeat has not lapsed."""
    return [name for name, until_ms in alive.items() if name.startswith("worker-") and until_ms > now_ms]


def _worker_pids(app: SubagentApp) -> dict[str, int]:
    """Worker name -> process id, as the workers themselves answer within `REPLY_SECONDS`; blocks its thread."""
    answers: dict[str, dict[str, Any]] = cast("Any", app.celery).control.inspect(timeout=REPLY_SECONDS).stats() or {}
    return {worker: int(stats["pid"]) for worker, stats in answers.items() if "pid" in stats}


async def _alive(settings: BrokerSettings) -> dict[str, int]:
    # Never started: it only lends its store.
    process = Process(settings, role="command", publisher=ScriptPublisher(), queues=())
    try:
        return await process.processes.alive()
    finally:
        await process.stop()
