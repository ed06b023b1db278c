"""What an operator is told of a namespace, from facts alone: states, trees, and why a run is stuck."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, cast

import pytest
from click.testing import CliRunner

from subagent_tasks.cli import cli
from subagent_tasks.commands.status import picture
from subagent_tasks.overview import Overview, RunRow, overview_of
from subagent_tasks.protocol.lifecycle import State
from subagent_tasks.protocol.models import ChildRequest, JobStatus
from subagent_tasks.protocol.records import RunRecord, RunSpec
from subagent_tasks.store.overview import FIELDS, Facts, LastEvent, Omissions, ProcessFacts, QueueFacts, RunFacts
from subagent_tasks.terminal import spelled

NOW_MS = 1_800_000_000_000
WORKER = ProcessFacts("worker-12-abc", NOW_MS + 4000, 1)
DEAD_WORKER = ProcessFacts("worker-12-abc", NOW_MS - 3000, 1)
HOST = ProcessFacts("host-7-def", NOW_MS + 4000, 0)
QUEUE = "shop.subagents.spawn"


def record(run_id: str = "r1", *, state: State = State.DRIVEN, age_seconds: float = 60, **changes: Any) -> RunRecord:
    """A run of session `s1`, accepted `age_seconds` ago and claimed at once unless it is queued."""
    since_ms = NOW_MS - int(age_seconds * 1000)
    spec = RunSpec(
        provider="spawn",
        queue=QUEUE,
        label=f"label of {run_id}",
        request=ChildRequest(label="x", prompt="a secret prompt", persona="a secret persona"),
        run_limit_seconds=3600,
    )
    plain = RunRecord(
        id=run_id, owner="s1", root="s1", depth=1, mode="background", state=state, token=1, seq=1, attempt=0, spec=spec,
        created_at=since_ms,
    )  # fmt: skip
    if state is not State.QUEUED:
        plain = replace(plain, started_at=since_ms, claimed_at=since_ms)
    if state is State.DRIVEN:
        plain = replace(plain, worker=WORKER.id)
    return replace(plain, **changes)


def seen(
    *runs: RunFacts, processes: tuple[ProcessFacts, ...] = (WORKER, HOST), omissions: Omissions | None = None
) -> Overview:
    queues = (QueueFacts(QUEUE, 2, NOW_MS - 40_000),)
    return overview_of(
        Facts(NOW_MS, processes, queues, runs, omissions or Omissions()), namespace="shop", lease_seconds=6
    )


def only(overview: Overview) -> RunRow:
    return overview.sessions[0].runs[0]


def text_of(overview: Overview) -> str:
    return picture(overview).plain


def test_a_queued_run_without_any_living_worker_says_so() -> None:
    """An operator's question: why is this child stuck?"""
    overview = seen(RunFacts(record(state=State.QUEUED), "queued"), processes=(HOST, DEAD_WORKER))
    assert only(overview).note == "no worker is alive"
    assert overview.warnings == ("no worker is alive: start one with subagent-tasks worker APP",)


def test_a_run_that_waits_long_while_workers_are_alive_names_its_queue() -> None:
    """Which queues a worker serves only Celery knows; that it may be none of them can be said."""
    note = only(seen(RunFacts(record(state=State.QUEUED), "queued"))).note
    assert note == f"no worker took it yet: they are busy, or none of those alive serves the queue {QUEUE}"


def test_a_run_that_was_queued_a_moment_ago_is_not_stuck() -> None:
    """A note is for what is unusual."""
    assert only(seen(RunFacts(record(state=State.QUEUED, age_seconds=1), "queued"))).note is None


def test_a_run_that_lost_its_worker_and_waits_again_says_both() -> None:
    """protocol §3: attempts count workers lost since the last progress."""
    run = only(seen(RunFacts(record(state=State.QUEUED, attempt=1), "queued"), processes=()))
    assert (run.attempt, run.note) == (1, "its worker was lost, it is queued again; no worker is alive")


@pytest.mark.parametrize("processes", [(DEAD_WORKER, HOST), (HOST,)])
def test_a_run_whose_worker_is_gone_names_when_it_is_recovered(processes: tuple[ProcessFacts, ...]) -> None:
    """P6: its heartbeat lapsed, or it is not even known any more."""
    overview = seen(RunFacts(record(), "running"), processes=processes)
    assert only(overview).note == "its worker is gone, recovery within two leases (12 s)"
    assert "runs that lost their worker: 1; recovery within two leases (12 s)" in overview.warnings


def test_where_nobody_is_alive_nobody_recovers() -> None:
    """protocol §7: any living process sweeps; there must be one."""
    note = only(seen(RunFacts(record(), "running"), processes=(DEAD_WORKER,))).note
    assert note == "its worker is gone, no process is alive to recover it: start a worker"


def test_a_killed_run_that_has_not_ended_is_stopping() -> None:
    """protocol §2, P5."""
    run = only(seen(RunFacts(record(kill="k1"), "stopping")))
    assert (run.status, run.note) == ("stopping", "its end was asked for; its worker is ending it")


def test_a_killed_run_of_a_dead_worker_says_both() -> None:
    """Why it does not stop."""
    note = only(seen(RunFacts(record(kill="k1"), "stopping"), processes=(DEAD_WORKER, HOST))).note
    assert note == "its end was asked for; its worker is gone, recovery within two leases (12 s)"


@pytest.mark.parametrize(
    ("last", "note"),
    [
        (LastEvent("tool_call", NOW_MS - 40_000, "read_file"), "in the tool read_file for 40 s"),
        (LastEvent("input", NOW_MS - 2500), "waits for its model for 2.5 s"),
        (
            LastEvent("tool_result", NOW_MS - 90_000, "rm"),
            "the tool rm returned 1 min 30 s ago; its model or another tool is at work",
        ),
        (LastEvent("response", NOW_MS + 5), "between two steps for 0 ms"),
        (None, None),
    ],
)
def test_a_driven_run_says_what_it_is_at(last: LastEvent | None, note: str | None) -> None:
    """The newest event of its transcript tells what it waits for."""
    assert only(seen(RunFacts(record(), "running", last))).note == note


def test_a_run_over_its_limit_says_so() -> None:
    """A worker that does not end it has a fault."""
    note = only(seen(RunFacts(record(age_seconds=4000), "running", LastEvent("input", NOW_MS - 1000)))).note
    assert note == "over its limit of 1 h; waits for its model for 1.0 s"


def test_a_suspended_run_waits_for_its_own() -> None:
    """P11: it is running, and no worker holds it."""
    run = only(seen(RunFacts(record(state=State.SUSPENDED), "running")))
    assert (run.worker, run.note) == (None, "waits for the runs it started; holds no worker")


@pytest.mark.parametrize("status", ["completed", "killed", "failed"])
def test_a_settled_run_says_how_it_ended_and_how_long_it_took(status: JobStatus) -> None:
    """From its first claim to its end."""
    run = only(seen(RunFacts(record(state=State.SETTLED, finished_at=NOW_MS - 20_000), status)))
    assert (run.status, run.seconds, run.note) == (status, 40.0, None)


def test_runs_hang_below_the_run_that_started_them() -> None:
    """design §2: the tree, by the records' owners."""
    overview = seen(
        RunFacts(record("child", owner="top", depth=2, age_seconds=30), "running"),
        RunFacts(record("top"), "running"),
        RunFacts(record("grandchild", owner="child", depth=3, age_seconds=10), "running"),
        RunFacts(record("other", owner="s2", root="s2", age_seconds=5), "running"),
    )
    session, other = overview.sessions
    assert (session.id, other.id) == ("s1", "s2")
    assert [run.id for run in session.runs] == ["top"]
    assert [run.id for run in session.runs[0].runs] == ["child"]
    assert [run.id for run in session.runs[0].runs[0].runs] == ["grandchild"]


def test_sessions_with_open_runs_come_first() -> None:
    """What has ended is what one reads last."""
    overview = seen(
        RunFacts(record("old", owner="a", state=State.SETTLED, finished_at=NOW_MS), "completed"),
        RunFacts(record("new", owner="b", age_seconds=1), "running"),
    )
    assert [session.id for session in overview.sessions] == ["b", "a"]


def test_processes_and_queues_are_told_with_their_times() -> None:
    """Redis time judges who is alive (protocol §4)."""
    told = text_of(seen(RunFacts(record(), "running"), processes=(DEAD_WORKER, HOST)))
    assert "worker-12-abc  dead for 3.0 s, drives 1 run\n" in told
    assert "host-7-def     alive, drives 0 runs\n" in told
    assert f"{QUEUE}  2 waiting, the oldest for 40 s; 1 driven\n" in told
    assert [(row.role, row.pid) for row in seen().processes] == [("worker", 12), ("host", 7)]


def test_what_is_left_out_is_said() -> None:
    """A part must not pass for the whole."""
    warnings = seen(omissions=Omissions(unsettled=3, ended=4, unread=5, unreadable=6, keys=True)).warnings
    assert [warning.split()[0] for warning in warnings] == ["3", "4", "5", "6", "the"]


def test_labels_alone_are_shown() -> None:
    """P14: no prompt and no persona, neither for people nor as JSON."""
    overview = seen(RunFacts(record(), "running"))
    assert "label of r1" in text_of(overview)
    assert "secret" not in text_of(overview) + overview.to_json()


def test_a_label_is_shown_as_it_is_and_drives_nothing() -> None:
    """A model writes labels: markup, escape sequences and line breaks in them are text."""
    plain = record()
    label = "[red]a[/] :warning: \x1b[2J b\nc"
    told = text_of(seen(RunFacts(replace(plain, spec=plain.spec.model_copy(update={"label": label})), "running")))
    assert "[red]a[/] :warning: \N{REPLACEMENT CHARACTER}[2J b c" in told


def test_nothing_to_show_is_said() -> None:
    """An empty namespace is an answer."""
    overview = overview_of(Facts(NOW_MS, (), (), ()), namespace="shop", lease_seconds=6)
    assert "No run is unsettled, and none ended lately." in text_of(overview)
    assert overview.warnings == ()


def test_the_help_names_every_field_of_the_document() -> None:
    """What a script reads is documented where it is asked for."""
    named = set(re.findall(r"\w+", CliRunner().invoke(cli, ["status", "--help"]).output))
    schema = Overview.model_json_schema()
    models = [schema, *cast("dict[str, dict[str, Any]]", schema["$defs"]).values()]
    assert {field for model in models for field in model["properties"]} <= named


def test_no_outcome_is_asked_for() -> None:
    """An outcome may be 16 MiB."""
    assert "outcome" not in FIELDS


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-1, "0 ms"),
        (0.0312, "31 ms"),
        (9.99, "9.9 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (185, "3 min 5 s"),
        (7260, "2 h 1 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_time_spans_are_spelled(seconds: float, words: str) -> None:
    """Two units at most, and never more than have passed."""
    assert spelled(seconds) == words


@pytest.mark.parametrize(
    ("words", "reason"), [(["--watch", "--json"], "exclude each other"), (["--watch"], "terminal")]
)
def test_a_watch_that_nobody_could_see_is_refused(words: list[str], reason: str) -> None:
    """P13: exit code 2, with what to do instead."""
    result = CliRunner().invoke(cli, ["status", *words])
    assert (result.exit_code, reason in result.output) == (2, True)
