"""A rolling restart under load (P1, P7, protocol §4): an operator upgrades every worker, and no child notices."""

from __future__ import annotations

import threading
from collections import Counter

from stage import CONCURRENCY, PROCESS_SECONDS, MakeStage, notices_of, start_job

from subagent_tasks.agents.transcript import UNKNOWN_EFFECT
from subagent_tasks.testing import call_tool, reply, wait_for, wait_until

JOBS = 20
WORKERS = 3


async def test_every_worker_is_replaced_and_no_job_is_lost_or_repeated(make_stage: MakeStage) -> None:
    """P1, P4, P7: twelve run and eight queue; the endings are told in their order.

    With one attempt for each, a single one that counted as lost would fail.
    """
    stage = make_stage(environment={"SUBAGENT_TASKS_MAX_ACTIVE_JOBS": str(JOBS), "SUBAGENT_TASKS_MAX_ATTEMPTS": "1"})
    stage.ensure(WORKERS)
    gate, names = threading.Event(), [f"roll-{number:02}" for number in range(JOBS)]
    for name in names:
        first, second = (call_tool("note", {"text": f"{name} {step}"}) for step in ("first", "second"))
        stage.model.on(name, [first, wait_for(gate), second, reply(f"{name} done")])
    async with stage.session() as session:
        jobs = [await start_job(session, name) for name in names]
        await wait_until(
            lambda: len(stage.notes("first")) == WORKERS * CONCURRENCY, description="all slots are at work"
        )
        for number, leaver in enumerate(list(stage.workers)):
            leaver.terminate()
            stage.worker()
            assert leaver.wait(PROCESS_SECONDS) == 0, leaver.log
            if number == 1:
                gate.set()
        notices = await notices_of(session, JOBS, timeout_seconds=PROCESS_SECONDS)
    records = {record["id"]: record for record in stage.tree(session.id)}
    assert {record["status"] for record in records.values()} == {"completed"}
    assert {record["attempt"] for record in records.values()} == {"0"}
    ended = [int(records[notice.sender_id]["finished_at"]) for notice in notices]
    assert (sorted(notice.sender_id for notice in notices), ended) == (sorted(jobs), sorted(ended))
    assert Counter(stage.notes("roll-")) == {f"{name} {step}": 1 for name in names for step in ("first", "second")}
    for name in names:
        assert stage.notes(name) == [f"{name} first", f"{name} second"]
        assert UNKNOWN_EFFECT not in str([request.messages for request in stage.asked(name)])
    await stage.assert_clean()
