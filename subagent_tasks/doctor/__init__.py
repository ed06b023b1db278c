"""Whether a deployment can keep the promises: declaration, settings, server, workers, and the work that lies there.

The checks are functions from facts to findings, one module for each kind of facts; `examine` gathers the facts and
never raises for what is wrong with the deployment. Every finding that is bad says what to do. Nothing is changed but by
`mend`. What must hold and why: `broker_config/redis.conf`, protocol §1, §4 and §7.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from broker_config import BrokerSettings, safe_url
from subagent_tasks.app import SubagentApp
from subagent_tasks.doctor.declaration import check_app, check_celery, check_provider, check_timeouts
from subagent_tasks.doctor.finding import Finding, Level
from subagent_tasks.doctor.server import check_clock, check_eviction, check_persistence, check_topology, check_version
from subagent_tasks.doctor.work import WorkFacts, check_unacknowledged, check_work, read_work
from subagent_tasks.doctor.workers import check_any_worker, check_heartbeats, check_tasks, check_workers
from subagent_tasks.errors import SubagentError
from subagent_tasks.process import Process
from subagent_tasks.protocol.interfaces import Provider
from subagent_tasks.queue.app import command_publisher
from subagent_tasks.queue.inspection import (
    REPLY_SECONDS,
    check_broker,
    consumed_queues,
    known_tasks,
    unacknowledged,
)
from subagent_tasks.queue.publisher import ScriptPublisher
from subagent_tasks.store.overview import open_overview
from subagent_tasks.store.server import read_server

__all__ = ["Finding", "Level", "examine", "mend"]


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
        work = check_work(await _look(settings, declared=() if app is None else app.queues))
    except SubagentError as error:
        return [*findings, Finding("server", "failed", str(error), "start it, or correct the URL, and ask again")]
    findings += [
        Finding("server", "ok", f"answers at {safe_url(settings.state_url)}"),
        check_version(facts),
        check_topology(facts),
        check_eviction(facts),
        check_persistence(facts),
        check_clock(facts, here_ms=here_ms),
        *work,
    ]
    workers = _beating(alive, now_ms=facts.time_ms)
    if app is None:
        return [*findings, check_any_worker(workers, namespace=settings.namespace)]
    if declared is not None and declared.level == "failed":
        return findings
    findings.append(check_celery(cast("Mapping[str, Any]", app.celery.conf), settings))
    try:
        await asyncio.to_thread(check_broker, app.celery)
    except SubagentError as error:
        return [*findings, Finding("broker", "failed", str(error), "start it, or correct the URL, and ask again")]
    findings.append(check_unacknowledged(await asyncio.to_thread(unacknowledged, app.celery), settings))
    consumed = await asyncio.to_thread(consumed_queues, app.celery)
    findings += check_workers(app.queues, consumed, living=len(workers))
    if not consumed:
        return findings
    findings += check_tasks(app.queues, consumed, tasks=await asyncio.to_thread(known_tasks, app.celery))
    pids = await asyncio.to_thread(_worker_pids, app)
    try:
        # Once more: whoever began or ended while the consumers were asked is in one of the two.
        workers = {*workers, *_beating(await _alive(settings), now_ms=facts.time_ms)}
    except SubagentError as error:
        return [*findings, Finding("server", "failed", str(error), "start it, or correct the URL, and ask again")]
    return [*findings, *check_heartbeats(app.queues, consumed, pids=pids, beating=workers)]


async def mend(settings: BrokerSettings) -> bool:
    """Sweep from here until nothing is left lying that a sweep can see to; whether so much time sufficed.

    Safe at any time: it is what every worker and host does, one at a time, each finding a move that checks again.
    Raises `BrokerUnavailable`.
    """
    deadline = time.monotonic() + 5 * settings.lease_seconds
    queues = await _waiting_queues(settings)
    process = Process(settings, role="doctor", publisher=command_publisher(settings), queues=queues)
    await process.start()
    try:
        while time.monotonic() < deadline:
            if not any(finding.is_mendable for finding in check_work(await read_work(process, queues))):
                return True
            await asyncio.sleep(settings.lease_seconds / 3)
    finally:
        await process.stop()
    return False


def _beating(alive: Mapping[str, int], *, now_ms: int) -> list[str]:
    """The ids of the worker processes, `worker-<pid>-<random>`, whose heartbeat has not lapsed."""
    return [name for name, until_ms in alive.items() if name.startswith("worker-") and until_ms > now_ms]


def _worker_pids(app: SubagentApp) -> dict[str, int]:
    """Worker name -> process id, as the workers themselves answer within `REPLY_SECONDS`; blocks its thread."""
    answers: dict[str, dict[str, Any]] = cast("Any", app.celery).control.inspect(timeout=REPLY_SECONDS).stats() or {}
    return {worker: int(stats["pid"]) for worker, stats in answers.items() if "pid" in stats}


async def _look(settings: BrokerSettings, *, declared: Sequence[str]) -> WorkFacts:
    queues = sorted({*declared, *await _waiting_queues(settings)})
    # Never started: it only lends its stores, here and below.
    process = Process(settings, role="command", publisher=command_publisher(settings), queues=queues)
    try:
        return await read_work(process, queues)
    finally:
        await process.stop()


async def _waiting_queues(settings: BrokerSettings) -> list[str]:
    async with open_overview(settings) as overview:
        return await overview.waiting_queues()


async def _alive(settings: BrokerSettings) -> dict[str, int]:
    process = Process(settings, role="command", publisher=ScriptPublisher(), queues=())
    try:
        return await process.processes.alive()
    finally:
        await process.stop()
