"""A run's record: what the scripts write is what Python reads, and what Celery reads of a result."""

from __future__ import annotations

import json

import pytest

from subagent_tasks.errors import UnsupportedVersion
from subagent_tasks.protocol.lifecycle import State
from subagent_tasks.protocol.models import ChildRequest, Mode, Outcome, text_block
from subagent_tasks.protocol.records import (
    RECORD_VERSION,
    RunSpec,
    celery_failure,
    celery_result,
    celery_revoked,
    read_record,
)


def a_spec(**changes: object) -> RunSpec:
    request = ChildRequest(label="a task", prompt="do it")
    values = {"provider": "spawn", "queue": "q", "label": "a task", "request": request, "run_limit_seconds": 60.0}
    return RunSpec.model_validate({**values, **changes})


def fields(**changes: str) -> dict[str, str]:
    """A record as Redis returns it."""
    return {
        "version": str(RECORD_VERSION),
        "kind": "one-shot",
        "id": "run-1",
        "owner": "parent",
        "root": "parent",
        "depth": "1",
        "digest": "d",
        "mode": "background",
        "state": "queued",
        "token": "0",
        "seq": "0",
        "attempt": "0",
        "created_at": "1700000000000",
        "spec": a_spec().to_json(),
        **changes,
    }


def test_a_new_record_is_read() -> None:
    """What `admit` writes."""
    record = read_record(fields())
    assert (record.id, record.owner, record.depth, record.mode) == ("run-1", "parent", 1, "background")
    assert (record.state, record.token, record.attempt, record.worker) == (State.QUEUED, 0, 0, "")
    assert record.spec == a_spec()
    assert record.outcome is None


def test_a_settled_record_is_read() -> None:
    """What `settle` adds."""
    outcome = Outcome(status="completed", stop_reason="completed", output=(text_block("done"),))
    record = read_record(fields(state="settled", outcome=outcome.to_json(), finished_at="1700000000009"))
    assert record.is_settled
    assert record.outcome == outcome
    assert record.finished_at == 1_700_000_000_009


def test_a_newer_record_is_refused_with_both_versions() -> None:
    """P13: the operator learns what to upgrade, and that nothing was changed."""
    newer = RECORD_VERSION + 1
    with pytest.raises(UnsupportedVersion) as refused:
        read_record(fields(version=str(newer)))
    assert f"version {newer}" in str(refused.value)
    assert f"up to {RECORD_VERSION}" in str(refused.value)
    assert "run-1" in str(refused.value)


def test_a_newer_record_is_refused_even_if_it_looks_different() -> None:
    """The version is read before anything else: a newer record need not have today's fields."""
    with pytest.raises(UnsupportedVersion):
        read_record({"version": str(RECORD_VERSION + 1)})


def test_a_spec_survives_its_record() -> None:
    """Stored as JSON, read as JSON."""
    spec = a_spec(tool="subagent", callId="c1", mayResume=False, ownerQueue="q")
    assert RunSpec.model_validate_json(spec.to_json()) == spec


def test_the_same_request_has_the_same_digest() -> None:
    """protocol §3: a repeated call id re-attaches."""
    assert a_spec().digest(mode="background") == a_spec().digest(mode="background")


@pytest.mark.parametrize(
    "changes",
    [
        {"request": ChildRequest(label="a task", prompt="do something else")},
        {"label": "another task"},
        {"provider": "fork"},
        {"tool": "subagent_fork"},
        {"run_limit_seconds": 61.0},
        {"may_resume": False},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_request_has_another_digest(changes: dict[str, object]) -> None:
    """protocol §3: other arguments under a used call id are a conflict."""
    assert a_spec(**changes).digest(mode="background") != a_spec().digest(mode="background")


def test_the_other_mode_has_another_digest() -> None:
    """A job is not the answer to a foreground call."""
    assert a_spec().digest(mode="background") != a_spec().digest(mode="foreground")


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, "queued"),
        ({"state": "driven"}, "running"),
        ({"state": "driven", "kill": "k"}, "stopping"),
        ({"state": "suspended"}, "running"),
        ({"state": "settled", "outcome": Outcome(status="failed", stop_reason="error").to_json()}, "failed"),
    ],
)
def test_a_snapshot_shows_the_public_word(changes: dict[str, str], status: str) -> None:
    """protocol §2."""
    assert read_record(fields(**changes)).snapshot().status == status


def test_a_job_that_nobody_claimed_started_when_it_was_accepted() -> None:
    """behaviour §3.4: `startedAt` is always there."""
    assert read_record(fields()).snapshot().started_at == 1_700_000_000_000


def test_a_claimed_job_started_when_it_was_claimed() -> None:
    """behaviour §3.4."""
    assert read_record(fields(state="driven", started_at="1700000000005")).snapshot().started_at == 1_700_000_000_005


@pytest.mark.parametrize("mode", ["foreground", "background"])
def test_the_mode_is_kept(mode: Mode) -> None:
    """It decides whether an ending is announced."""
    assert read_record(fields(mode=mode)).mode == mode


def test_a_result_names_its_task() -> None:
    """facts-core §A: without `task_id` a waiting `.get()` dies with a KeyError."""
    stored = json.loads(celery_result("run-1", state="SUCCESS", result={"a": 1}, date_done="2030-01-01T00:00:00+00:00"))
    assert stored["task_id"] == "run-1"
    assert (stored["status"], stored["result"], stored["date_done"]) == (
        "SUCCESS",
        {"a": 1},
        "2030-01-01T00:00:00+00:00",
    )


def test_a_failure_is_one_string() -> None:
    """facts-core §A: the message is the exception's only argument."""
    assert celery_failure("worker lost")["exc_message"] == ["worker lost"]


def test_a_kill_is_what_celery_raises_for_revoked_tasks() -> None:
    """protocol §2: killed is REVOKED."""
    assert celery_revoked("killed")["exc_type"] == "TaskRevokedError"
