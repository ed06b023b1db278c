"""What an operator sees of a namespace: from facts to processes, queues and trees of runs, each with why it waits.

Pure. The models are also the JSON document of `subagent-tasks status --json`; their fields are named in its help.
Labels alone stand for prompts (P14).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from subagent_tasks.protocol.lifecycle import State
from subagent_tasks.protocol.models import JobStatus, Mode, Wire
from subagent_tasks.store.overview import Facts, LastEvent, Omissions, RunFacts
from subagent_tasks.terminal import spelled

UNCLAIMED_SECONDS = 5.0
"""How long a run may wait while workers are alive before the operator is asked whether one serves its queue."""


class ProcessRow(Wire):
    """A worker or host. `lapses_at_ms` is when its heartbeat lapses, or lapsed; `pid` counts on its own machine."""

    id: str
    role: str
    pid: int | None = None
    alive: bool
    lapses_at_ms: int
    driven: int


class QueueRow(Wire):
    """A queue: how many runs wait in it, since when the first does, and how many of its runs are driven."""

    name: str
    waiting: int
    oldest_since_ms: int | None = None
    driven: int


class RunRow(Wire):
    """A run and those it owns. `seconds` is how long it took, runs or, before its first claim, waits.

    `attempt` counts the workers it lost since its last progress; `note` says what it is at or why it is stuck.
    """

    id: str
    label: str
    status: JobStatus
    provider: str
    mode: Mode
    queue: str
    attempt: int
    worker: str | None = None
    created_at_ms: int
    started_at_ms: int | None = None
    finished_at_ms: int | None = None
    seconds: float
    note: str | None = None
    runs: tuple[RunRow, ...] = ()


class SessionRow(Wire):
    """A parent session and the runs it owns."""

    id: str
    runs: tuple[RunRow, ...]


class Overview(Wire):
    """One look at a namespace, at the Redis time `now_ms`; `warnings` ask an operator to do something."""

    namespace: str
    now_ms: int
    warnings: tuple[str, ...]
    processes: tuple[ProcessRow, ...]
    queues: tuple[QueueRow, ...]
    sessions: tuple[SessionRow, ...]


def overview_of(facts: Facts, *, namespace: str, lease_seconds: float) -> Overview:
    """What the facts mean. A driver is gone when its heartbeat lapsed by Redis time, or it is not known at all."""
    processes = tuple(
        ProcessRow(
            id=process.id,
            role=process.id.partition("-")[0],
            pid=_pid(process.id),
            alive=process.lapses_at_ms > facts.now_ms,
            lapses_at_ms=process.lapses_at_ms,
            driven=process.driven,
        )
        for process in facts.processes
    )
    driven = [run.record.spec.queue for run in facts.runs if run.record.state is State.DRIVEN]
    queues = tuple(
        QueueRow(
            name=queue.name,
            waiting=queue.waiting,
            oldest_since_ms=queue.oldest_since_ms,
            driven=driven.count(queue.name),
        )
        for queue in facts.queues
    )
    alive = frozenset(process.id for process in processes if process.alive)
    reader = _Reader(now_ms=facts.now_ms, alive=alive, lease_seconds=lease_seconds)
    return Overview(
        namespace=namespace,
        now_ms=facts.now_ms,
        warnings=tuple(_warnings(facts, reader)),
        processes=tuple(sorted(processes, key=lambda row: (row.role != "worker", not row.alive, row.id))),
        queues=queues,
        sessions=tuple(_sessions(facts.runs, reader)),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """What each run is judged by."""

    now_ms: int
    alive: frozenset[str]
    lease_seconds: float

    @property
    def has_worker(self) -> bool:
        return any(process.startswith("worker-") for process in self.alive)

    def seconds_since(self, since_ms: int) -> float:
        # A run may have moved on after the time was read.
        return max(0, self.now_ms - since_ms) / 1000

    def lost_its_worker(self, run: RunFacts) -> bool:
        return run.record.state is State.DRIVEN and run.record.worker not in self.alive

    def note(self, run: RunFacts) -> str | None:
        """What it is at, or why nothing happens."""
        record = run.record
        match record.state:
            case State.QUEUED:
                return self._why_queued(run)
            case State.SUSPENDED:
                return "waits for the runs it started; holds no worker"
            case State.DRIVEN if self.lost_its_worker(run):
                ending = "its end was asked for; " if run.status == "stopping" else ""
                return f"{ending}its worker is gone, {self.recovery()}"
            case State.DRIVEN if run.status == "stopping":
                return "its end was asked for; its worker is ending it"
            case State.DRIVEN:
                return self._doing(run)
            case State.SETTLED:
                return None

    def _why_queued(self, run: RunFacts) -> str | None:
        again = "its worker was lost, it is queued again; " if run.record.attempt else ""
        if not self.has_worker:
            return f"{again}no worker is alive"
        if self.seconds_since(run.record.created_at) < UNCLAIMED_SECONDS:
            return again.removesuffix("; ") or None
        queue = run.record.spec.queue
        return f"{again}no worker took it yet: they are busy, or none of those alive serves the queue {queue}"

    def recovery(self) -> str:
        if not self.alive:
            return "no process is alive to recover it: start a worker"
        return f"recovery within two leases ({spelled(2 * self.lease_seconds)})"

    def _doing(self, run: RunFacts) -> str | None:
        record = run.record
        spent_seconds = self.seconds_since(record.started_at or record.created_at)
        over = f"over its limit of {spelled(record.spec.run_limit_seconds)}"
        notes = [over] if spent_seconds > record.spec.run_limit_seconds else []
        if run.last is None:
            notes += ["no step yet"] if record.seq == 0 else []
        else:
            notes.append(_activity(run.last, for_seconds=self.seconds_since(run.last.at_ms)))
        return "; ".join(notes) or None


def _activity(last: LastEvent, *, for_seconds: float) -> str:
    span = spelled(for_seconds)
    match last.kind:
        case "tool_call":
            return f"in the tool {last.tool_name} for {span}"
        case "tool_result":
            # Tools run side by side: that one returned does not mean that all did.
            return f"the tool {last.tool_name} returned {span} ago; its model or another tool is at work"
        case "input" | "request":
            return f"waits for its model for {span}"
        case _:
            return f"between two steps for {span}"


def _sessions(runs: Iterable[RunFacts], reader: _Reader) -> list[SessionRow]:
    by_owner: dict[str, list[RunFacts]] = {}
    known: set[str] = set()
    for run in sorted(runs, key=lambda run: (run.record.created_at, run.record.id)):
        by_owner.setdefault(run.record.owner, []).append(run)
        known.add(run.record.id)
    # Below its session, or, should its owner's record be gone, below that owner's id.
    tops = [owner for owner in by_owner if owner not in known]
    sessions = [SessionRow(id=owner, runs=_rows(owner, by_owner, reader)) for owner in tops]
    return sorted(sessions, key=lambda session: not any(_is_open(run) for run in session.runs))


def _rows(owner: str, by_owner: Mapping[str, list[RunFacts]], reader: _Reader) -> tuple[RunRow, ...]:
    rows: list[RunRow] = []
    for run in by_owner.get(owner, ()):
        record = run.record
        since_ms = record.started_at or record.created_at
        until_ms = record.finished_at or reader.now_ms
        rows.append(
            RunRow(
                id=record.id,
                label=record.spec.label,
                status=run.status,
                provider=record.spec.provider,
                mode=record.mode,
                queue=record.spec.queue,
                attempt=record.attempt,
                worker=record.worker or None,
                created_at_ms=record.created_at,
                started_at_ms=record.started_at,
                finished_at_ms=record.finished_at,
                seconds=max(0, until_ms - since_ms) / 1000,
                note=reader.note(run),
                runs=_rows(record.id, by_owner, reader),
            )
        )
    return tuple(rows)


def _is_open(run: RunRow) -> bool:
    return run.finished_at_ms is None or any(_is_open(child) for child in run.runs)


def _warnings(facts: Facts, reader: _Reader) -> list[str]:
    warnings: list[str] = []
    if not reader.has_worker and any(run.record.state is not State.SETTLED for run in facts.runs):
        warnings.append("no worker is alive: start one with subagent-tasks worker APP")
    if lost := sum(reader.lost_its_worker(run) for run in facts.runs):
        warnings.append(f"runs that lost their worker: {lost}; {reader.recovery()}")
    return [*warnings, *_omitted(facts.omissions)]


def _omitted(omissions: Omissions) -> list[str]:
    """What is not shown: an operator must not take a part for the whole."""
    numbers = (
        (omissions.unsettled, "newer unsettled runs are left out; the queues count them"),
        (omissions.ended, "more runs ended lately and are left out"),
        (omissions.unread, "records were not looked at: ended runs may be missing"),
        (omissions.unreadable, "records are of a newer version, or damaged, and left out: upgrade subagent-tasks here"),
    )
    said = [f"{number} {what}" for number, what in numbers if number]
    return [*said, "the server holds too many keys to look at all: runs may be missing"] if omissions.keys else said


def _pid(process_id: str) -> int | None:
    number = process_id.split("-")[1:2]
    return int(number[0]) if number and number[0].isdigit() else None
