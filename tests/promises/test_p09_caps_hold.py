"""P9: depth and active jobs are counted where a run is admitted, so no interleaving of processes gets past a cap."""

from __future__ import annotations

import asyncio
import threading

import pytest
from host_process import HostProcess
from stage import Stage, arguments, delegate

from subagent_tasks.testing import call_tools, reply, wait_for, wait_until
from subagent_tasks.testing.processes import WorkerProcess

MAX_ACTIVE_JOBS = 10
LIMIT_REACHED = f"background job limit reached for this owner (limit: {MAX_ACTIVE_JOBS})"


@pytest.fixture(scope="module")
def rival(stage: Stage) -> HostProcess:
    """A second host on the session `p9-race`, with eight jobs to start."""
    call = {"name": "subagent", "arguments": arguments("p9-race", background=True)}
    return stage.host("p9-race", *[call] * 8)


@pytest.fixture(scope="module", autouse=True)
def workers(stage: Stage, rival: HostProcess) -> tuple[WorkerProcess, WorkerProcess]:
    """One for the children of each provider."""
    spawn, apart = (stage.worker(providers=(provider,)) for provider in ("spawn", "apart"))
    stage.ensure(2)
    return spawn, apart


async def test_depth_is_counted_across_workers(stage: Stage, workers: tuple[WorkerProcess, WorkerProcess]) -> None:
    """P9: three levels, the processes by turns; the third asks for a fourth, is told no, and goes on."""
    spawn, apart = workers
    stage.model.on("p9-depth 1", [delegate("p9-depth 2", tool="subagent_apart"), reply("went so far")])
    stage.model.on("p9-depth 2", [delegate("p9-depth 3"), reply("in between")])
    stage.model.on("p9-depth 3", [delegate("p9-depth 4", tool="subagent_apart"), reply("no further")])
    async with stage.session() as session:
        result = await session.call("subagent", arguments("p9-depth 1"), timeout=10)
        assert result.text == "went so far"
        tree = stage.tree(session.id)
        assert [run["depth"] for run in tree] == ["1", "2", "3"]
        assert [stage.driver_pid(run["id"]) for run in tree] == [spawn.pid, apart.pid, spawn.pid]
        assert "subagent depth 4 exceeds maxDepth 3" in stage.asked("p9-depth 3")[-1].messages[-1].text


async def test_one_message_starts_no_more_jobs_than_its_child_may_own(stage: Stage) -> None:
    """P9: three children at once, each with twelve background calls in one message; each gets ten jobs of its own."""
    gate = threading.Event()
    stage.model.on("p9-job", [wait_for(gate), reply("done")])
    jobs = [delegate("p9-job", tool="subagent_apart", background=True) for _ in range(MAX_ACTIVE_JOBS + 2)]
    stage.model.on("p9-owner", [call_tools(*jobs), wait_for(gate), reply("enough")])
    async with stage.session() as session:
        calls = [session.call("subagent", arguments("p9-owner"), timeout=20) for _ in range(3)]
        owners = asyncio.gather(*calls)
        await wait_until(lambda: len(stage.asked("p9-owner")) == 6, description="all three were told")
        assert [run["depth"] for run in stage.tree(session.id)] == ["1"] * 3 + ["2"] * 3 * MAX_ACTIVE_JOBS
        answers = [
            [message.text for message in request.messages if message.role == "tool"]
            for request in stage.asked("p9-owner")
        ]
        assert [len(texts) for texts in answers if texts] == [MAX_ACTIVE_JOBS + 2] * 3
        for texts in filter(None, answers):
            assert sum("started background subagent job" in text for text in texts) == MAX_ACTIVE_JOBS
            assert sum(LIMIT_REACHED in text for text in texts) == 2
        gate.set()
        assert [result.text for result in await owners] == ["enough"] * 3
        # Whatever ends a one-shot child ends its jobs.
        await wait_until(lambda: set(stage.states()) == {"settled"}, description="all ended")
    await stage.assert_clean()


async def test_two_hosts_that_race_for_the_last_slots_get_no_more_than_there_are(
    stage: Stage, rival: HostProcess
) -> None:
    """P9: both on one session, eight jobs each, at the same moment."""
    gate = threading.Event()
    stage.model.on("p9-race", [wait_for(gate), reply("done")])
    given = arguments("p9-race", background=True)
    await rival.wait_ready()
    async with stage.session("p9-race") as session:
        rival.call()
        results = await asyncio.gather(*(session.call("subagent", given) for _ in range(8)))
        texts = [result.text for result in results] + [result["text"] for result in await rival.results()]
        started = [text for text in texts if text.startswith("started background subagent job")]
        assert len(started) == MAX_ACTIVE_JOBS
        assert sum(LIMIT_REACHED in text for text in texts) == 16 - MAX_ACTIVE_JOBS
        assert len(stage.tree(session.id)) == MAX_ACTIVE_JOBS
        gate.set()
        await wait_until(lambda: set(stage.states()) == {"settled"}, description="all ended")
    await stage.assert_clean()
