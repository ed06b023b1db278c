"""What must be true when a chaos run is over. Each check names the runs for which it is not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from load import Entry, Ledger
from plan import acts_of

from subagent_tasks.protocol.leases import CALLER_LOST, WORKER_LOST
from subagent_tasks.protocol.models import TranscriptEvent
from subagent_tasks.protocol.records import RunRecord

CELERY = {"completed": "SUCCESS", "failed": "FAILURE", "killed": "REVOKED"}
MAX_DEPTH = 3


@dataclass(frozen=True, slots=True)
class Facts:
    """What there is when all is over: records, Celery states and transcripts by run, and how often each effect was."""

    records: Mapping[str, RunRecord]
    celery: Mapping[str, str]
    transcripts: Mapping[str, list[TranscriptEvent]]
    notes: Counter[str]
    kept_notices: Counter[str] = field(default_factory=Counter[str])
    """How many notices of each run its owner's stream holds."""


def lost(ledger: Ledger, facts: Facts) -> Iterator[str]:
    """P1, P3: every accepted run settled, and plain Celery says the same."""
    for entry in ledger.entries:
        if entry.accepted and entry.run_id not in facts.records:
            yield f"{entry.run_id} ({entry.delegation.id}): accepted, and there is no record of it"
    for run_id, record in facts.records.items():
        if not record.is_settled or record.outcome is None:
            yield f"{run_id}: it is {record.state}"
        elif facts.celery.get(run_id) != CELERY[record.outcome.status]:
            yield f"{run_id}: it ended {record.outcome.status}, and Celery says {facts.celery.get(run_id)}"


def untold(ledger: Ledger, facts: Facts) -> Iterator[str]:
    """P4: every ending was told."""
    for entry in ledger.entries:
        record = facts.records.get(entry.run_id)
        if not entry.accepted or record is None or entry.delegation.purpose == "wait":
            continue
        was_killed = entry.killed_by_model and _status(record) == "killed"
        if not ledger.notices[entry.run_id] and not entry.reads and not was_killed:
            yield f"{entry.run_id} ({entry.delegation.purpose}): its end, {_status(record)}, was told to nobody"


def told_wrongly(ledger: Ledger, facts: Facts) -> Iterator[str]:
    """P3, P4: what was said is what the record says, and no ending was announced twice."""
    for entry in ledger.entries:
        record = facts.records.get(entry.run_id)
        if record is None:
            continue
        status = _status(record)
        yield from _told_twice(entry, record, ledger, facts)
        said = ledger.announced.get(entry.run_id)
        if said is not None and f"[status: {status}" not in said:
            yield f"{entry.run_id}: it ended {status}, its notice said {said!r}"
        if entry.reads and entry.reads != {status}:
            yield f"{entry.run_id}: it ended {status}, job_output said {entry.reads}"
        if entry.result is not None:
            yield from _wrong_result(entry, record)


def _told_twice(entry: Entry, record: RunRecord, ledger: Ledger, facts: Facts) -> Iterator[str]:
    announced = ledger.notices[entry.run_id]
    if announced > 1:
        yield f"{entry.run_id}: announced {announced} times"
    if announced and entry.killed_by_model and _status(record) == "killed":
        yield f"{entry.run_id}: its owner's model killed it, and was told so again by a notice"
    if announced and entry.result is not None:
        yield f"{entry.run_id}: its caller was given a result, and told so again by a notice"
    for run_id, seconds in ledger.announced_late:
        if run_id == entry.run_id:
            yield f"{run_id}: job_output told its end, and a notice told it again {seconds * 1000:.1f} ms later"
    # Kept: by a session's stream, from which a report withdraws the notice.
    kept = facts.kept_notices[entry.run_id]
    if kept > 1 or (kept and entry.reads):
        yield f"{entry.run_id}: {kept} notices of it are kept, job_output told {sorted(entry.reads)}"


def told_wrongly_to_children(facts: Facts) -> Iterator[str]:
    """P3, P4, inside the trees: each call of a child has one result, which is the one of its run."""
    runs_of: dict[str, list[RunRecord]] = {}
    for record in facts.records.values():
        runs_of.setdefault(record.owner, []).append(record)
    for owner_id, events in facts.transcripts.items():
        results: dict[str, list[str]] = {}
        for event in events:
            if event.kind == "tool_result":
                results.setdefault(str(event.data["tool_call_id"]), []).append(json.dumps(event.data.get("content")))
        for call_id, given in results.items():
            if len(given) > 1:
                yield f"{owner_id}: its call {call_id} has {len(given)} results"
        heard = Counter(str(event.data.get("message_id")) for event in events if event.kind == "input")
        for run in runs_of.get(owner_id, []):
            if heard[run.id] > 1:
                yield f"{owner_id}: told {heard[run.id]} times that {run.id} had ended"
            if run.mode == "foreground" and _status(facts.records[owner_id]) == "completed":
                yield from _wrong_for_child(run, results.get(run.spec.call_id or "", []))


def _wrong_for_child(run: RunRecord, given: list[str]) -> Iterator[str]:
    is_right = f"done {run.spec.label}" in "".join(given)
    if not given or is_right != (_status(run) == "completed"):
        yield f"{run.id}: it ended {_status(run)}, and the child that had called it was given {given}"


def ended_without_a_reason(ledger: Ledger, facts: Facts) -> Iterator[str]:
    """P1, P5: nothing is killed but by a kill, its own or one above it, by its owner's end, or with its caller; and
    nothing fails but by losing its workers.
    """
    killed = {entry.run_id for entry in ledger.entries if entry.delegation.purpose.startswith("kill")}
    for run_id, record in facts.records.items():
        outcome, owner = record.outcome, facts.records.get(record.owner)
        if outcome is None or outcome.status == "completed" or outcome.detail in (WORKER_LOST, CALLER_LOST):
            continue
        ended_with_owner = owner is not None and (
            owner.kill is not None or (owner.finished_at or 0) <= (record.finished_at or 0)
        )
        if outcome.status == "failed" or not (run_id in killed or ended_with_owner):
            yield f"{run_id} ({record.spec.label}): {outcome.status}, {outcome.detail or outcome.stop_reason}"


def _wrong_result(entry: Entry, record: RunRecord) -> Iterator[str]:
    result = entry.result
    if result is None:
        return
    if (not result.is_error) != (_status(record) == "completed"):
        yield f"{entry.run_id}: it ended {_status(record)}, and its caller was told {result.code or 'success'}"
    if not result.is_error and result.text != f"done {entry.delegation.id}":
        yield f"{entry.run_id}: its caller was given {result.text[:80]!r}"


def doubled(facts: Facts) -> Iterator[str]:
    """P7: no effect happened twice."""
    for text, times in facts.notes.items():
        if times > 1:
            yield f"the call {text} was carried out {times} times"


def skipped(facts: Facts) -> Iterator[str]:
    """A run that completed had every effect of its plan, but for calls whose effect is unknown."""
    for run_id, record in facts.records.items():
        events = facts.transcripts.get(run_id, [])
        if _status(record) != "completed" or any(event.data.get("effect") == "unknown" for event in events):
            continue
        plan: dict[str, Any] = json.loads(str(events[0].data["text"]))
        if missing := [text for text in acts_of(plan) if not facts.notes[text]]:
            yield f"{run_id}: completed without {missing}"


def too_deep(facts: Facts) -> Iterator[str]:
    """P9: depth."""
    for run_id, record in facts.records.items():
        if record.depth > MAX_DEPTH:
            yield f"{run_id}: at depth {record.depth}"


def _status(record: RunRecord) -> str:
    return record.outcome.status if record.outcome else record.state
