"""A run's record as Python sees it, and what is written beside it when it settles.

The scripts know the fields by name; this module is the one place where Python reads and builds them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from subagent_tasks.errors import UnreadableRecord, UnsupportedVersion
from subagent_tasks.protocol.lifecycle import State, job_status
from subagent_tasks.protocol.models import ChildRequest, JobSnapshot, JobStatus, Mode, Outcome, Wire

RECORD_VERSION = 1


class RunSpec(Wire):
    """What `admit` stores of a request: everything a worker needs beside the prompt, which travels in the inbox.

    `owner_queue` is the Celery queue in which the owner waits once this ending wakes it; set when that is a child.
    """

    provider: str
    tool: str = ""
    queue: str
    label: str
    call_id: str | None = None
    request: ChildRequest
    may_resume: bool = True
    run_limit_seconds: float
    owner_queue: str | None = None

    def digest(self, *, mode: Mode) -> str:
        """What a repeated id must match: everything asked for."""
        asked = self.model_dump(mode="json", exclude_none=True)
        text = json.dumps([mode, asked], sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run's record. Times are Redis milliseconds; `attempt` counts workers lost since the last progress.

    `worker` is the process that drives it now, `driver` the one that did so last: it stays when the run has settled.
    `caller` is the process that waits for a foreground run. `episode` names what its events are told of: it stays over
    suspensions and handing back, and is new after the loss of a worker.
    """

    id: str
    owner: str
    root: str
    depth: int
    mode: Mode
    state: State
    token: int
    seq: int
    attempt: int
    spec: RunSpec
    created_at: int
    worker: str = ""
    driver: str = ""
    caller: str = ""
    episode: str = ""
    started_at: int | None = None
    claimed_at: int | None = None
    finished_at: int | None = None
    kill: str | None = None
    kill_reason: str | None = None
    outcome: Outcome | None = None
    digest: str = field(default="", repr=False)

    @property
    def is_settled(self) -> bool:
        return self.state is State.SETTLED

    @property
    def is_owned_by_child(self) -> bool:
        return self.spec.owner_queue is not None

    @property
    def limit_at_ms(self) -> int:
        """When its run limit is over, in Redis ms: it counts from the first claim on, suspensions included."""
        return (self.started_at or self.claimed_at or self.created_at) + int(self.spec.run_limit_seconds * 1000)

    @property
    def remaining_seconds(self) -> float:
        """What its last claim left of its run limit: the limit counts from the first claim, over all attempts."""
        spent_ms = (self.claimed_at or 0) - (self.started_at or 0)
        return max(0.0, self.spec.run_limit_seconds - spent_ms / 1000)

    def snapshot(self) -> JobSnapshot:
        """The public view (behaviour §3.4). Raises `UnreadableRecord` for a settled run without an outcome."""
        outcome = self.outcome
        with refusing_broken(f"run {self.id!r}"):
            status = job_status(
                self.state, outcome=outcome.status if outcome else None, kill_requested=self.kill is not None
            )
        return JobSnapshot(
            id=self.id,
            label=self.spec.label,
            status=status,
            detail=outcome.detail if outcome else None,
            started_at=self.started_at or self.created_at,
            finished_at=self.finished_at,
        )


LISTED = ("version", "id", "state", "status", "detail", "spec", "kill", "created_at", "started_at", "finished_at")
"""The fields a listing needs: all but the outcome, which may be large."""


def read_snapshot(fields: Mapping[str, str]) -> JobSnapshot:
    """The public view of a job, of its `LISTED` fields (behaviour §3.4). Raises as `read_record` does."""
    with refusing_broken(f"run {fields.get('id', '?')!r}"):
        _check_version(fields)
        spec = RunSpec.model_validate_json(fields["spec"])
        outcome = cast("JobStatus | None", fields.get("status"))
        return JobSnapshot(
            id=fields["id"],
            label=spec.label,
            status=job_status(State(fields["state"]), outcome=outcome, kill_requested="kill" in fields),
            detail=fields.get("detail") or None,
            started_at=int(fields.get("started_at") or fields["created_at"]),
            finished_at=_int(fields.get("finished_at")),
        )


def read_record(fields: Mapping[str, str]) -> RunRecord:
    """Read a record.

    One written by a newer version is refused with both versions named (`UnsupportedVersion`), one that is incomplete or
    broken as such (`UnreadableRecord`).
    """
    with refusing_broken(f"run {fields.get('id', '?')!r}"):
        _check_version(fields)
        outcome = fields.get("outcome")
        return RunRecord(
            id=fields["id"],
            owner=fields["owner"],
            root=fields["root"],
            depth=int(fields["depth"]),
            mode="background" if fields["mode"] == "background" else "foreground",
            state=State(fields["state"]),
            token=int(fields["token"]),
            seq=int(fields["seq"]),
            attempt=int(fields["attempt"]),
            spec=RunSpec.model_validate_json(fields["spec"]),
            created_at=int(fields["created_at"]),
            worker=fields.get("worker", ""),
            driver=fields.get("driver", ""),
            caller=fields.get("caller", ""),
            episode=fields.get("episode", ""),
            started_at=_int(fields.get("started_at")),
            claimed_at=_int(fields.get("claimed_at")),
            finished_at=_int(fields.get("finished_at")),
            kill=fields.get("kill"),
            kill_reason=fields.get("kill_reason"),
            outcome=Outcome.model_validate_json(outcome) if outcome else None,
            digest=fields.get("digest", ""),
        )


@contextmanager
def refusing_broken(what: str) -> Generator[None]:
    """Within it, text from the server that does not read as what it should be raises `UnreadableRecord`.

    Not chained, and without the text: that may be a prompt or an output (P14).
    """
    try:
        yield
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise UnreadableRecord(
            f"what Redis holds of {what} cannot be read ({type(error).__name__}): it is incomplete or broken, and "
            "was left as it is"
        ) from None


def _check_version(fields: Mapping[str, str]) -> None:
    version = int(fields.get("version", "0"))
    if version > RECORD_VERSION:
        raise UnsupportedVersion(
            f"run {fields.get('id', '?')!r} was written with record version {version}, this process reads up to "
            f"{RECORD_VERSION}: upgrade subagent-tasks here, nothing was changed"
        )


def _int(text: str | None) -> int | None:
    return None if text is None else int(text)


CeleryState = Literal["STARTED", "SUCCESS", "FAILURE", "REVOKED"]


def celery_result(run_id: str, *, state: CeleryState, result: Any = None, date_done: str | None = None) -> str:
    """A result in Celery's own format, so that a plain `AsyncResult(run_id)` reads it.

    `task_id` inside is required: without it a waiting `.get()` dies with a KeyError.
    """
    return json.dumps(
        {
            "status": state,
            "result": result,
            "traceback": None,
            "children": [],
            "date_done": date_done,
            "task_id": run_id,
        }
    )


def celery_failure(message: str) -> dict[str, Any]:
    """A failure as an exception any Celery process can raise. One string reads best in a traceback."""
    return {"exc_type": "SubagentFailed", "exc_message": [message], "exc_module": "subagent_tasks.errors"}


def celery_revoked(message: str) -> dict[str, Any]:
    return {"exc_type": "TaskRevokedError", "exc_message": [message], "exc_module": "celery.exceptions"}
