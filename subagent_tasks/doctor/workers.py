"""Checks of the workers: each queue has one, each one beats, and whoever consumes our queues knows our task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from subagent_tasks.doctor.finding import Finding
from subagent_tasks.queue.publisher import ACTIVATE


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


def check_tasks(
    queues: Sequence[str], consumed: Mapping[str, frozenset[str]], *, tasks: Mapping[str, frozenset[str]]
) -> list[Finding]:
    """Whoever consumes a queue of ours must have our task: a foreign app's worker throws our messages away."""
    return [
        Finding(
            "workers",
            "failed",
            f"{worker} consumes {', '.join(sorted(names & set(queues)))} and does not know the task {ACTIVATE}: "
            "it is a worker of another app, and throws away the messages it takes",
            "give that app queues, or a Redis database, of its own; what it took is sent again by the sweepers",
        )
        for worker, names in sorted(consumed.items())
        if worker in tasks and not names.isdisjoint(queues) and ACTIVATE not in tasks[worker]
    ]
