"""P6: work of a killed worker resumes or fails visibly within two leases, whoever is left."""

from __future__ import annotations

import asyncio
import time

import pytest
from stage import WITHIN_TWO_LEASES_SECONDS, MakeStage, Stage, arguments, job, notices_of, start_job

from subagent_tasks.agents.transcript import UNKNOWN_EFFECT
from subagent_tasks.testing import call_tool, reply, wait_until
from subagent_tasks.testing.processes import kill_worker


@pytest.fixture(scope="module")
def stage(make_stage: MakeStage) -> Stage:
    return make_stage(environment={"SUBAGENT_TASKS_MAX_ATTEMPTS": "2"})


async def test_another_worker_finishes_the_run_of_a_killed_one(stage: Stage) -> None:
    """P6, P7, field fault 12: kill -9 with a tool call in flight; one effect, one notice, and the model knows."""
    stage.ensure(2)
    stage.model.on("p6-a", [call_tool("hold", {"text": "p6-a"}), reply("finished elsewhere")])
    async with stage.session() as session:
        job_id = await start_job(session, "p6-a")
        kill_worker(stage.by_pid(await stage.noted("p6-a begun")))
        killed_at = time.monotonic()
        [notice] = await notices_of(session, 1)
        assert time.monotonic() - killed_at < WITHIN_TWO_LEASES_SECONDS
        assert (notice.sender_id, "[status: completed]" in notice.text) == (job_id, True)
        assert stage.redis.xlen(stage.keys.notices(session.id)) == 1
        assert stage.notes("p6-a") == ["p6-a begun"]
        assert UNKNOWN_EFFECT in stage.asked("p6-a")[-1].messages[-1].text
        assert (await job(session, job_id))["text"] == "finished elsewhere"


async def test_a_worker_that_is_asked_to_end_hands_its_runs_on_at_once(stage: Stage) -> None:
    """Protocol §4, shutdown: no lease has to lapse for it."""
    stage.ensure(2)
    stage.model.on("p6-e", [call_tool("note", {"text": "p6-e"}), call_tool("hold", {"text": "p6-e2"}), reply("done")])
    async with stage.session() as session:
        job_id = await start_job(session, "p6-e")
        leaver = stage.by_pid(await stage.noted("p6-e2 begun"))
        leaver.terminate()
        asked_at = time.monotonic()
        await wait_until(lambda: stage.state(job_id) == "settled", description="the other worker finished it")
        assert time.monotonic() - asked_at < 1.5
        assert stage.notes("p6-e") == ["p6-e", "p6-e2 begun"]
        assert leaver.wait() == 0, leaver.log


async def test_a_host_left_alone_queues_what_the_only_worker_drove(make_stage: MakeStage) -> None:
    """P6, P7: within two leases; the next worker goes on, and the tool that ran is not run again."""
    stage = make_stage()
    [worker] = stage.ensure(1)
    stage.model.on("p6-alone", [call_tool("hold", {"text": "p6-alone"}), reply("went on")])
    async with stage.session() as session:
        job_id = await start_job(session, "p6-alone")
        await stage.noted("p6-alone begun")
        worker.kill()
        await wait_until(
            lambda: stage.state(job_id) == "queued",
            description="the host's sweeper has queued it",
            timeout_seconds=WITHIN_TWO_LEASES_SECONDS,
        )
        stage.ensure(1)
        [notice] = await notices_of(session, 1)
        assert (notice.sender_id, notice.kind) == (job_id, "job-completed")
        assert stage.redis.xlen(stage.keys.notices(session.id)) == 1
    assert stage.notes("p6-alone") == ["p6-alone begun"]
    assert UNKNOWN_EFFECT in stage.model.seen[-1].messages[-1].text
    await stage.assert_clean()


async def test_what_was_given_up_goes_on_when_it_is_requeued_by_hand(make_stage: MakeStage) -> None:
    """P6, P7: from the steps it had recorded; the call of unknown effect is not repeated, and both ends are told."""
    stage = make_stage(environment={"SUBAGENT_TASKS_MAX_ATTEMPTS": "1"})
    [worker] = stage.ensure(1)
    stage.model.on("p6-again", [call_tool("hold", {"text": "p6-again"}), reply("done after all")])
    async with stage.session() as session:
        given_up = await start_job(session, "p6-again")
        await stage.noted("p6-again begun")
        worker.kill()
        await wait_until(lambda: stage.state(given_up) == "settled", description="it is given up")
        stage.ensure(1)
        said = await asyncio.to_thread(stage.run, "-m", "subagent_tasks", "requeue", given_up)
        first, second = await notices_of(session, 2)
        assert (first.sender_id, second.sender_id) == (given_up, said.split()[-1])
        assert "done after all" in (await session.call("job_output", {"job_id": second.sender_id})).text
    assert stage.notes("p6-again") == ["p6-again begun"]
    assert UNKNOWN_EFFECT in stage.model.seen[-1].messages[-1].text
    again = await asyncio.to_thread(stage.run, "-m", "subagent_tasks", "requeue", given_up)
    assert again.split() == ["requeued", "run", given_up, "before,", "as", second.sender_id]
    await stage.assert_clean()


@pytest.mark.parametrize("tool", ["hang", "keep_the_gil"])
async def test_a_worker_that_stands_still_ends_and_another_goes_on(make_stage: MakeStage, tool: str) -> None:
    """Protocol §4: its loop does not tick, or no thread of Python runs; what hung it is not run again."""
    stage = make_stage(environment={"SUBAGENT_TASKS_LOOP_STALL_SECONDS": "1"})
    [first] = stage.ensure(1)
    stage.model.on("p6-still", [call_tool(tool, {"text": "p6-still"}), reply("went on")])
    async with stage.session() as session:
        job_id = await start_job(session, "p6-still")
        await stage.noted("p6-still begun")
        stage.ensure(2)
        await wait_until(lambda: not first.is_running, description="it ended", timeout_seconds=20)
        await wait_until(lambda: stage.state(job_id) == "settled", description="the other worker finished it")
    assert stage.notes("p6-still") == ["p6-still begun"]
    assert UNKNOWN_EFFECT in stage.model.seen[-1].messages[-1].text
    assert f" in {tool}" in first.log
    assert "p6-still" not in first.log


async def test_with_no_worker_left_a_host_ends_what_may_not_resume(stage: Stage) -> None:
    """P6: a sweeper that lives in the dead worker helps nobody, so hosts sweep too. A job and a call that waits."""
    stage.ensure(1)
    for name in ("p6-job", "p6-call"):
        stage.model.on(name, [call_tool("hold", {"text": name}), reply("never")])
    async with stage.session() as session:
        job_id = await start_job(session, "p6-job", tool="subagent_once")
        call = asyncio.ensure_future(session.call("subagent_once", arguments("p6-call"), timeout=30))
        await stage.noted("p6-job begun")
        await stage.noted("p6-call begun")
        for worker in stage.living:
            worker.kill()
        killed_at = time.monotonic()
        [notice] = await notices_of(session, 1)
        result = await call
        assert time.monotonic() - killed_at < WITHIN_TWO_LEASES_SECONDS
        assert (notice.sender_id, "worker lost" in notice.text) == (job_id, True)
        assert (result.is_error, "worker lost" in result.text) == (True, True), result


async def test_work_that_kills_its_workers_is_given_up(stage: Stage) -> None:
    """Field fault 13: an attempt counter, no crash loop. Two attempts, two workers, no third."""
    stage.ensure(2)
    async with stage.session() as session:
        job_id = await start_job(session, "p6-poison", tool="subagent_poison")
        [notice] = await notices_of(session, 1)
        assert (notice.sender_id, "worker lost" in notice.text) == (job_id, True)
        assert len(stage.notes("poisoned")) == 2
