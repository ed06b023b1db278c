"""What must be true when a chaos run is over. Each check names the runs for which it is not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from load import Entry, Ledger
from plan import acts_of

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
        if ledger.notices[entry.run_id] > 1:
            yield f"{entry.run_id}: announced {ledger.notices[entry.run_id]} times"
        if entry.killed_by_model and status == "killed" and ledger.notices[entry.run_id]:
            yield f"{entry.run_id}: its owner's model killed it, and was told so again by a notice"
        if entry.reads and entry.reads != {status}:
            yield f"{entry.run_id}: it ended {status}, job_output said {entry.reads}"
        if entry.result is not None:
            yield from _wrong_result(entry, record)


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
