"""Checks of the work itself: what is left with the dead, has lost its message, was not woken, or is no work of ours.

Living processes sweep, and see to the first three within two leases (protocol §4); what is found here has waited
longer: nobody sweeps, or whoever does fails.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from broker_config import BrokerSettings
from subagent_tasks.doctor.finding import Finding
from subagent_tasks.process import Process
from subagent_tasks.protocol.leases import is_lost_in_queue
from subagent_tasks.queue.inspection import Unacknowledged
from subagent_tasks.queue.message import task_of
from subagent_tasks.queue.publisher import ACTIVATE
from subagent_tasks.terminal import spelled

MEND = "start a worker or a host of this namespace, which sweep; or once, from here: subagent-tasks doctor --fix"
MAX_SAMPLES = 100
"""How many messages of a queue are looked at."""


@dataclass(frozen=True, slots=True)
class WorkFacts:
    """What was found waiting. Times are Redis milliseconds.

    `abandoned` are processes whose heartbeat lapsed, when it did, and how many runs are in their name; `lost` the queue
    times of runs whose message is lost; `overdue` the alarms of suspended runs that nobody woke; `foreign` the names of
    tasks, not ours, whose messages lie in our queues.
    """

    now_ms: int
    abandoned: tuple[tuple[str, int, int], ...] = ()
    lost: tuple[int, ...] = ()
    overdue: tuple[int, ...] = ()
    foreign: tuple[tuple[str, str], ...] = ()


async def read_work(process: Process, queues: Sequence[str]) -> WorkFacts:
    """Look, and change nothing. Raises `BrokerUnavailable`."""
    now_ms = await process.processes.now_ms()
    lease_ms = int(process.settings.lease_seconds * 1000)
    patient_ms = now_ms - 2 * lease_ms
    abandoned: list[tuple[str, int, int]] = []
    for name, lapsed_ms in (await process.processes.alive()).items():
        driven = await process.processes.driven_by(name) if lapsed_ms < patient_ms else ()
        if driven:
            abandoned.append((name, lapsed_ms, len(driven)))
    lost: list[int] = []
    foreign: set[tuple[str, str]] = set()
    for queue in queues:
        overtaken = await process.runs.overtaken_before_ms(queue, now_ms=now_ms)
        is_empty = await process.publisher.is_empty(queue)
        if is_empty is None:
            is_empty = await process.runs.queue_length(queue) == 0
            texts = await process.runs.queue_messages(queue, count=MAX_SAMPLES)
            foreign |= {(queue, task) for task in map(task_of, texts) if task != ACTIVATE}
        lost += [
            since_ms
            for _, since_ms in await process.runs.queued(queue)
            if is_lost_in_queue(
                since_ms=since_ms,
                now_ms=now_ms,
                slack_ms=2 * lease_ms,
                overtaken_before_ms=overtaken,
                queue_is_empty=is_empty,
            )
        ]
    overdue = await process.processes.alarms_before(patient_ms)
    return WorkFacts(now_ms, tuple(abandoned), tuple(lost), tuple(overdue), tuple(sorted(foreign)))


def check_work(facts: WorkFacts) -> list[Finding]:
    """What is left lying; one finding that all is well if there is nothing."""
    findings: list[Finding] = []

    def ago(moments: Sequence[int]) -> str:
        return spelled((facts.now_ms - min(moments)) / 1000)

    if facts.abandoned:
        count = sum(driven for *_, driven in facts.abandoned)
        names = ", ".join(name for name, *_ in facts.abandoned)
        since = ago([lapsed_ms for _, lapsed_ms, _ in facts.abandoned])
        message = f"{count} runs are left with processes that are gone: {names}, silent for {since}"
        findings.append(Finding("drives", "failed", message, MEND, is_mendable=True))
    if facts.lost:
        message = f"{len(facts.lost)} runs wait whose message is lost, the first for {ago(facts.lost)}"
        findings.append(Finding("messages", "failed", message, MEND, is_mendable=True))
    if facts.overdue:
        message = (
            f"{len(facts.overdue)} suspended runs are not woken though it is time, the first for {ago(facts.overdue)}"
        )
        findings.append(Finding("alarms", "failed", message, MEND, is_mendable=True))
    for queue, task in facts.foreign:
        findings.append(
            Finding(
                "messages",
                "failed",
                f"{queue} holds messages of the task {task!r}, which is not ours: another app sends to it",
                "give that app queues, or a Redis database, of its own",
            )
        )
    return findings or [Finding("work", "ok", "none is left with the dead, without its message, or asleep")]


def check_unacknowledged(found: Unacknowledged | None, settings: BrokerSettings) -> Finding:
    """Messages are acknowledged when their run is claimed, so an old one lies with a process that hangs or is gone."""
    if found is None or not found.count:
        return Finding("unacknowledged", "ok", "no message is held without being acknowledged")
    age_seconds = time.time() - found.oldest_at
    if age_seconds < settings.loop_stall_seconds:
        return Finding("unacknowledged", "ok", f"{found.count} messages held, the oldest for {spelled(age_seconds)}")
    return Finding(
        "unacknowledged",
        "warning",
        f"{found.count} messages were fetched and never acknowledged, the oldest {spelled(age_seconds)} ago",
        "look for workers that hang, of any app of this broker. No run waits for them: sweepers send again what was "
        f"lost, and Celery delivers these again after {spelled(settings.visibility_timeout_seconds)}",
    )
