"""A worker's connections to the API of its children's model: kept over all of them, and never waited on for ever."""

from __future__ import annotations

import time

import pytest
from stage import MakeStage, Stage, arguments, job, notices_of, start_job

from subagent_tasks.testing import call_tool, reply, stall

REQUEST_SECONDS = 1.0


@pytest.fixture(scope="module")
def stage(make_stage: MakeStage) -> Stage:
    names = ("FIRST_EVENT_TIMEOUT_SECONDS", "MODEL_REQUEST_TIMEOUT_SECONDS")
    stage = make_stage(environment={f"SUBAGENT_TASKS_{name}": str(REQUEST_SECONDS) for name in names})
    stage.ensure(1, concurrency=1)
    return stage


async def test_fifty_children_one_after_another_share_a_client(stage: Stage) -> None:
    """Field fault 6: `Event loop is closed`, or a future attached to another loop, from the second child on."""
    [worker] = stage.living
    stage.model.on("fifty", [call_tool("note", {"text": "fifty"}), reply("answered")])
    async with stage.session() as session:
        results = [await session.call("subagent", arguments("fifty")) for _ in range(50)]
    assert {result.text for result in results} == {"answered"}
    assert (len(stage.notes("fifty")), len(stage.asked("fifty"))) == (50, 100)
    # No retry of a client hid a connection that was broken.
    for trace in ("loop is closed", "different loop", "Connection error", "Traceback"):
        assert trace not in worker.log


async def test_a_model_that_accepts_and_never_answers_ends_its_child(stage: Stage) -> None:
    """Field fault 8: failed with what was said before, announced, and its slot is free again."""
    stage.model.on("silent", [call_tool("note", {"text": "silent"}, text="so far"), stall()])
    stage.model.on("behind", reply("served"))
    async with stage.session() as session:
        started_at = time.monotonic()
        job_id = await start_job(session, "silent")
        [notice] = await notices_of(session, 1)
        assert time.monotonic() - started_at < REQUEST_SECONDS + 2
        assert (notice.sender_id, "[status: failed, error; diagnostic:" in notice.text) == (job_id, True)
        read = await job(session, job_id)
        assert (read["text"], "1 s" in read["job"]["detail"]) == ("so far", True), read
        assert (await session.call("subagent", arguments("behind"), timeout=5)).text == "served"
