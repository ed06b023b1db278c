"""Everything that is written when a run ends, made of its record and its outcome.

Pure, so that driver, sweeper and kill agree. The script stores it in one step; here it is decided what it says.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import JsonValue

from subagent_tasks.protocol.models import InboxEntry, JobSnapshot, Outcome, text_block
from subagent_tasks.protocol.outcomes import (
    abandoned_text,
    canonical_value,
    completion_summary,
    completion_text,
    failure_message,
)
from subagent_tasks.protocol.records import RunRecord, celery_failure, celery_result, celery_revoked


@dataclass(frozen=True, slots=True)
class Ending:
    """The texts a settling script stores and publishes; the names are its arguments."""

    settle_id: str
    status: str
    detail: str
    outcome: str
    event: str
    result: str
    notice: str
    announcement: str
    expiry: str


@dataclass(frozen=True, slots=True)
class EndingWriter:
    """Writes endings. `now_iso` gives `date_done` as Celery stores it: UTC, ISO 8601.

    An announcement carries the outcome only up to `max_inline_bytes`: a subscriber whose buffer overflows is cut off by
    the server, so a large one is read from the record instead.
    """

    now_iso: Callable[[], str]
    max_inline_bytes: int

    def write(self, run: RunRecord, outcome: Outcome, *, settle_id: str) -> Ending:
        """`settle_id` makes a repeated settlement recognisable: it names the settler and its token."""
        stored = outcome.to_json()
        inline = stored if len(stored.encode()) <= self.max_inline_bytes else "null"
        event: dict[str, JsonValue] = {"status": outcome.status, "stopReason": outcome.stop_reason}
        if outcome.detail is not None:
            event["detail"] = outcome.detail
        return Ending(
            settle_id=settle_id,
            status=outcome.status,
            detail=outcome.detail or "",
            outcome=stored,
            event=json.dumps(event),
            result=_result(run.id, outcome, date_done=self.now_iso()),
            notice=_notice(run, outcome),
            announcement=f'{{"settled":{json.dumps(run.id)},"outcome":{inline}}}',
            expiry=json.dumps([run.owner, run.id]),
        )


def _result(run_id: str, outcome: Outcome, *, date_done: str) -> str:
    match outcome.status:
        case "completed":
            return celery_result(run_id, state="SUCCESS", result=canonical_value(run_id, outcome), date_done=date_done)
        case "failed":
            failure = celery_failure(failure_message(outcome) or "subagent run failed")
            return celery_result(run_id, state="FAILURE", result=failure, date_done=date_done)
        case "killed":
            revoked = celery_revoked(outcome.detail or "subagent run was cancelled")
            return celery_result(run_id, state="REVOKED", result=revoked, date_done=date_done)


def _notice(run: RunRecord, outcome: Outcome) -> str:
    """What tells the owner, should nobody have been told: of a foreground run, that its caller is gone."""
    job = JobSnapshot(
        id=run.id, label=run.spec.label, status=outcome.status, detail=outcome.detail, started_at=run.created_at
    )
    if run.mode == "foreground" and run.is_owned_by_child:
        # Its caller cannot be lost: it would be the child.
        return ""
    text = abandoned_text(job) if run.mode == "foreground" else completion_text(job)
    if run.is_owned_by_child:
        # A child has no stream of notices: it reads them at its next step.
        return InboxEntry(message_id=run.id, lane="next-step", text=text, source="job-completed").to_json()
    # Without an id: that is the entry's place in the stream, which the script and the readers add.
    notice: dict[str, JsonValue] = {
        "kind": "job-completed" if run.mode == "background" else "run-abandoned",
        "sessionId": run.owner,
        "senderId": run.id,
        "text": text,
        "blocks": [text_block(text)],
        "summary": completion_summary(job),
        "source": "job-completed",
    }
    if outcome.usage is not None:
        notice["usage"] = outcome.usage.model_dump(mode="json")
    return json.dumps(notice)
