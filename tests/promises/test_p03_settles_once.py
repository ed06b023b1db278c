"""P3: state, Celery result, notice and capacity change in one step; plain Celery agrees with `job_output`."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest
from stage import Stage, job, start_job

from subagent_tasks.testing import call_tool, fail, reply, wait_until

# A process that knows Celery and nothing of ours.
PLAIN_CELERY = """
import json, sys
from celery import Celery
url, *ids = sys.argv[1:]
app = Celery(broker=url, backend=url)
found = {}
for id in ids:
    result = app.AsyncResult(id)
    try:
        found[id] = {"value": result.get(timeout=5)}
    except Exception as error:
        found[id] = {"error": type(error).__name__, "text": str(error)}
    found[id]["state"] = result.state
assert not any(name.startswith(("subagent_tasks", "broker_config")) for name in sys.modules)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def ended(stage: Stage) -> dict[str, dict[str, Any]]:
    """One run that completed, one that failed and one that was killed, as a plain Celery process reads them."""
    stage.ensure(1)
    stage.model.on("p3-good", [call_tool("note", {"text": "p3"}), reply("the answer")])
    stage.model.on("p3-bad", fail(400))
    stage.model.on("p3-long", [call_tool("hold", {"text": "p3-long"}), reply("too late")])

    async def run() -> dict[str, str]:
        async with stage.session("p3") as session:
            good = await start_job(session, "p3-good")
            bad = await start_job(session, "p3-bad")
            long = await start_job(session, "p3-long")
            await stage.noted("p3-long begun")
            await session.kill(long, "not needed")
            for job_id in (good, bad, long):
                await wait_until(lambda id=job_id: stage.state(id) == "settled", description="it is settled")
            return {"good": good, "bad": bad, "long": long}

    ids = asyncio.run(run())
    found = json.loads(stage.run("-c", PLAIN_CELERY, stage.url, *ids.values()))
    return {name: {"id": id, **found[id]} for name, id in ids.items()}


def test_plain_celery_gets_the_canonical_value(ended: dict[str, dict[str, Any]]) -> None:
    """Behaviour §2.4, P3: from a process that imports only Celery."""
    good = ended["good"]
    assert (good["state"], good["value"]) == (
        "SUCCESS",
        {"kind": "foreground", "runId": good["id"], "output": [{"type": "text", "text": "the answer"}]},
    )


def test_plain_celery_raises_for_a_failed_run(ended: dict[str, dict[str, Any]]) -> None:
    """Facts-core §A: an exception that any Celery process can raise."""
    assert (ended["bad"]["state"], ended["bad"]["error"]) == ("FAILURE", "SubagentFailed")
    assert "subagent run failed" in ended["bad"]["text"]


def test_plain_celery_raises_for_a_killed_run(ended: dict[str, dict[str, Any]]) -> None:
    """Protocol §2: killed is REVOKED."""
    assert (ended["long"]["state"], ended["long"]["error"]) == ("REVOKED", "TaskRevokedError")


async def test_job_output_and_plain_celery_agree(stage: Stage, ended: dict[str, dict[str, Any]]) -> None:
    """P3: until both expire together, which is one lifetime on both keys."""
    words = {"SUCCESS": "completed", "FAILURE": "failed", "REVOKED": "killed"}
    async with stage.session("p3") as session:
        for run in ended.values():
            assert (await job(session, run["id"]))["job"]["status"] == words[run["state"]]
            result, record = f"celery-task-meta-{run['id']}", stage.keys.session(run["id"])
            assert abs(stage.redis.pttl(result) - stage.redis.pttl(record)) < 100


async def test_a_kill_that_races_the_end_leaves_one_outcome(stage: Stage) -> None:
    """P3, field fault 16: forty runs killed around the moment of their end; every account of each agrees."""
    stage.ensure(1)
    stage.model.on("p3-race", reply("won"))
    async with stage.session() as session:

        async def race(pause_seconds: float) -> tuple[str, str]:
            job_id = await start_job(session, "p3-race")
            await asyncio.sleep(pause_seconds)
            said = await session.kill(job_id)
            await wait_until(lambda: stage.state(job_id) == "settled", description="it ended")
            return job_id, str(cast("dict[str, Any]", said.value)["outcome"])

        for start in range(0, 40, 8):
            for job_id, said in await asyncio.gather(*(race(number * 0.002) for number in range(start, start + 8))):
                status = stage.redis.hget(stage.keys.session(job_id), "status")
                state = stage.celery_state(job_id)
                assert (status, state) in [("completed", "SUCCESS"), ("killed", "REVOKED")]
                assert not (said == "already-finished" and status == "killed")
                settled = [fields for _, fields in stage.transcript(job_id) if fields["k"] == "settled"]
                assert len(settled) == 1
        assert stage.redis.exists(stage.keys.flagged) == 0
