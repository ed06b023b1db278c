"""The checks at the end of a chaos run find what they are there for: one fault each, and none in a sound run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import checks  # the chaos run is a program of its own
import pytest
from load import Entry, Ledger
from plan import Delegation, acts_of, delegations

from subagent_tasks.protocol.lifecycle import State
from subagent_tasks.protocol.models import ChildRequest, Outcome, ToolResult, TranscriptEvent
from subagent_tasks.protocol.records import RunRecord, RunSpec

FOREGROUND, JOB, KILLED = "foreground", "job", "killed"
GRANDCHILD = "grandchild"
"""A foreground run of the foreground run."""


def a_run(
    run_id: str,
    status: Any = "completed",
    *,
    owner: str = "owner",
    mode: Any = "background",
    call_id: str | None = None,
) -> RunRecord:
    request = ChildRequest(label=run_id, prompt="")
    spec = RunSpec(provider="spawn", queue="q", label=run_id, call_id=call_id, request=request, run_limit_seconds=60)
    outcome = Outcome(status=status, stop_reason="completed" if status == "completed" else "aborted")
    return RunRecord(run_id, owner, "owner", 1, mode, State.SETTLED, 1, 3, 0, spec, created_at=0, outcome=outcome)


def an_entry(run_id: str, purpose: Any, **fields: Any) -> Entry:
    return Entry(Delegation(run_id, purpose, a_plan(run_id), 0), "owner", run_id, accepted=True, **fields)


def a_plan(run_id: str) -> dict[str, Any]:
    return {"id": run_id, "think_seconds": 0, "steps": [[["act", {"text": f"{run_id}:0:0", "seconds": 0}]]]}


def sound() -> tuple[Ledger, checks.Facts]:
    """A run of each kind, all well."""
    ledger = Ledger(
        [
            an_entry(FOREGROUND, "wait", result=ToolResult(text=f"done {FOREGROUND}")),
            an_entry(JOB, "hear"),
            an_entry(KILLED, "kill by model", killed_by_model=True),
        ],
        notices=Counter({JOB: 1}),
    )
    child = a_run(GRANDCHILD, owner=FOREGROUND, mode="foreground", call_id="c")
    records = {FOREGROUND: a_run(FOREGROUND), JOB: a_run(JOB), KILLED: a_run(KILLED, "killed"), GRANDCHILD: child}
    transcripts = {
        name: [TranscriptEvent(seq=0, kind="input", data={"text": json.dumps(a_plan(name))})] for name in records
    }
    transcripts[FOREGROUND].append(child_result(f"done {GRANDCHILD}"))
    return ledger, checks.Facts(
        records,
        {FOREGROUND: "SUCCESS", JOB: "SUCCESS", KILLED: "REVOKED", GRANDCHILD: "SUCCESS"},
        transcripts,
        Counter(f"{name}:0:0" for name in records),
    )


def child_result(content: str) -> TranscriptEvent:
    return TranscriptEvent(seq=1, kind="tool_result", data={"tool_call_id": "c", "content": content})


def found(ledger: Ledger, facts: checks.Facts) -> dict[str, list[str]]:
    return {
        "lost": list(checks.lost(ledger, facts)),
        "untold": list(checks.untold(ledger, facts)),
        "told wrongly": [*checks.told_wrongly(ledger, facts), *checks.told_wrongly_to_children(facts)],
        "no reason": list(checks.ended_without_a_reason(ledger, facts)),
        "doubled": list(checks.doubled(facts)),
        "skipped": list(checks.skipped(facts)),
        "too deep": list(checks.too_deep(facts)),
    }


def test_a_sound_run_breaks_nothing() -> None:
    assert not any(found(*sound()).values())


def without_record(ledger: Ledger, facts: checks.Facts) -> checks.Facts:
    return replace(facts, records={name: run for name, run in facts.records.items() if name != JOB})


def unsettled(ledger: Ledger, facts: checks.Facts) -> checks.Facts:
    return replace(facts, records={**facts.records, "own": replace(a_run("own"), state=State.DRIVEN, outcome=None)})


def celery_disagrees(ledger: Ledger, facts: checks.Facts) -> checks.Facts:
    return replace(facts, celery={**facts.celery, JOB: "REVOKED"})


def told_to_nobody(ledger: Ledger, facts: checks.Facts) -> None:
    ledger.notices.clear()


def announced_twice(ledger: Ledger, facts: checks.Facts) -> None:
    ledger.notices[JOB] = 2


def killer_told_again(ledger: Ledger, facts: checks.Facts) -> None:
    ledger.notices[KILLED] = 1


def read_otherwise(ledger: Ledger, facts: checks.Facts) -> None:
    ledger.entries[1].reads = {"completed", "killed"}


def caller_told_otherwise(ledger: Ledger, facts: checks.Facts) -> None:
    ledger.entries[0].result = ToolResult(text="Error", is_error=True, code="CHILD_FAILED")


def caller_given_another_s(ledger: Ledger, facts: checks.Facts) -> None:
    ledger.entries[0].result = ToolResult(text=f"done {JOB}")


def notice_says_otherwise(ledger: Ledger, facts: checks.Facts) -> None:
    ledger.announced[JOB] = "finished [status: failed]"


def told_again_later(ledger: Ledger, facts: checks.Facts) -> None:
    ledger.entries[1].read("completed")
    ledger.announced_late.append((JOB, 0.1))


def notice_not_withdrawn(ledger: Ledger, facts: checks.Facts) -> checks.Facts:
    ledger.entries[1].read("completed")
    return replace(facts, kept_notices=Counter({JOB: 1}))


def caller_told_by_notice_too(ledger: Ledger, facts: checks.Facts) -> None:
    ledger.notices[FOREGROUND] = 1


def child_given_two_results(ledger: Ledger, facts: checks.Facts) -> None:
    facts.transcripts[FOREGROUND].append(child_result(f"done {GRANDCHILD}"))


def child_given_another_s(ledger: Ledger, facts: checks.Facts) -> None:
    del facts.transcripts[FOREGROUND][-1]
    facts.transcripts[FOREGROUND].append(child_result("done other"))


def child_given_nothing(ledger: Ledger, facts: checks.Facts) -> None:
    del facts.transcripts[FOREGROUND][-1]


def child_told_twice(ledger: Ledger, facts: checks.Facts) -> None:
    told = TranscriptEvent(seq=2, kind="input", data={"message_id": GRANDCHILD, "text": ""})
    facts.transcripts[FOREGROUND].extend([told, told])


def killed_by_nobody(ledger: Ledger, facts: checks.Facts) -> checks.Facts:
    return replace(
        facts,
        records={**facts.records, JOB: a_run(JOB, "killed")},
        celery={**facts.celery, JOB: "REVOKED"},
    )


def carried_out_twice(ledger: Ledger, facts: checks.Facts) -> None:
    facts.notes[f"{JOB}:0:0"] += 1


def not_carried_out(ledger: Ledger, facts: checks.Facts) -> None:
    del facts.notes[f"{JOB}:0:0"]


def deep(ledger: Ledger, facts: checks.Facts) -> checks.Facts:
    return replace(facts, records={**facts.records, JOB: replace(a_run(JOB), depth=4)})


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        (without_record, "lost", "there is no record"),
        (unsettled, "lost", "own: it is driven"),
        (celery_disagrees, "lost", "Celery says REVOKED"),
        (told_to_nobody, "untold", "told to nobody"),
        (announced_twice, "told wrongly", "announced 2 times"),
        (killer_told_again, "told wrongly", "told so again"),
        (read_otherwise, "told wrongly", "job_output said"),
        (caller_told_otherwise, "told wrongly", "its caller was told CHILD_FAILED"),
        (caller_given_another_s, "told wrongly", "was given"),
        (notice_says_otherwise, "told wrongly", "its notice said"),
        (told_again_later, "told wrongly", "told it again"),
        (notice_not_withdrawn, "told wrongly", "are kept"),
        (caller_told_by_notice_too, "told wrongly", "told so again"),
        (child_given_two_results, "told wrongly", "has 2 results"),
        (child_given_another_s, "told wrongly", "was given"),
        (child_given_nothing, "told wrongly", "was given"),
        (child_told_twice, "told wrongly", "told 2 times"),
        (killed_by_nobody, "no reason", "killed"),
        (carried_out_twice, "doubled", "carried out 2 times"),
        (not_carried_out, "skipped", "completed without"),
        (deep, "too deep", "at depth 4"),
    ],
)
def test_each_fault_is_found(
    fault: Callable[[Ledger, checks.Facts], checks.Facts | None], kind: str, says: str
) -> None:
    """By its own check alone."""
    ledger, facts = sound()
    facts = fault(ledger, facts) or facts
    by_kind = found(ledger, facts)
    assert [name for name, broken in by_kind.items() if broken] == [kind]
    assert says in by_kind[kind][0]


def test_a_call_of_unknown_effect_may_be_missing() -> None:
    """P7: the child was told so."""
    ledger, facts = sound()
    not_carried_out(ledger, facts)
    facts.transcripts[JOB].append(
        TranscriptEvent(seq=1, kind="tool_result", data={"tool_call_id": "c", "effect": "unknown"})
    )
    assert found(ledger, facts)["skipped"] == []


def test_a_seed_plans_the_same_again() -> None:
    """So that a run that failed can be repeated."""
    first, second = (
        [next_delegation for next_delegation, _ in zip(delegations("seed"), range(50), strict=False)] for _ in range(2)
    )
    assert first == second


def test_no_two_effects_of_a_plan_have_one_name() -> None:
    """Otherwise a doubled effect could not be told from two."""
    texts: list[str] = []
    for delegation, _ in zip(delegations("seed"), range(100), strict=False):
        texts += [text for each in plans_of(delegation.plan) for text in acts_of(each)]
    assert len(set(texts)) == len(texts)


def plans_of(whole: dict[str, Any]) -> list[dict[str, Any]]:
    """A plan and those of its children."""
    own = [json.loads(arguments["prompt"]) for step in whole["steps"] for tool, arguments in step if tool == "subagent"]
    return [whole, *(each for child in own for each in plans_of(child))]
