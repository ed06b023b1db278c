"""P11: a child that waits for its own child holds neither slot nor lease, and any worker goes on with it.

Chains are longer here than there are slots. The provider `apart` has a queue of its own, so that a test can say which
worker may drive which child.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from stage import PROCESS_SECONDS, Stage, arguments, delegate

from subagent_tasks.agents.transcript import UNKNOWN_EFFECT
from subagent_tasks.testing import call_tool, reply, wait_for, wait_until
from subagent_tasks.testing.processes import WorkerProcess
from subagent_tasks.testing.script import Step

CALL_SECONDS = 20


def chain(stage: Stage, name: str, last: Sequence[Step], *, depth: int = 3, tool: str = "subagent") -> None:
    """Each level writes a note, delegates to the next, and writes a note again; the deepest one's steps are `last`."""
    for level in range(1, depth):
        before, after = (call_tool("note", {"text": f"{name} {level} {when}"}) for when in ("before", "after"))
        deeper = delegate(f"{name} level {level + 1}", tool=tool)
        stage.model.on(f"{name} level {level}", [before, deeper, after, reply(f"{name} is over")])
    stage.model.on(f"{name} level {depth}", last)


async def test_eight_chains_of_three_finish_on_two_slots(stage: Stage) -> None:
    """P11: foreground all the way, on one worker; two of each chain's three children wait for another one."""
    stage.worker(concurrency=2, log_level="DEBUG").wait_ready(PROCESS_SECONDS)
    chain(stage, "p11-eight", [reply("the bottom")])
    async with stage.session() as session:
        calls = [session.call("subagent", arguments("p11-eight level 1"), timeout=CALL_SECONDS) for _ in range(8)]
        results = await asyncio.gather(*calls)
        assert [result.text for result in results] == ["p11-eight is over"] * 8
        notes = Counter(stage.notes("p11-eight"))
        assert notes == {f"p11-eight {level} {when}": 8 for level in (1, 2) for when in ("before", "after")}
        assert len(stage.asked("p11-eight")) == 8 * (4 + 4 + 1)


async def test_no_log_says_what_a_chain_was_about(stage: Stage) -> None:
    """P14: neither prompt nor output nor tool input of any level, at DEBUG, suspensions and resumptions included."""
    chain(stage, "p11-zebra", [call_tool("note", {"text": "p11-zebra 3"}), reply("p11-zebra at the bottom")])
    async with stage.session() as session:
        result = await session.call("subagent", arguments("p11-zebra level 1"), timeout=CALL_SECONDS)
        assert result.text == "p11-zebra is over"
    [worker] = stage.living
    assert "run suspended" in worker.log
    at = worker.log.find("p11-")
    assert at < 0, worker.log[max(0, at - 300) : at + 100]


@pytest.fixture(scope="module")
def one_slot(stage: Stage) -> WorkerProcess:
    """All there is: one slot, for the children of `spawn`."""
    for worker in stage.living:
        worker.kill()
    return stage.worker(concurrency=1, providers=("spawn",)).wait_ready(PROCESS_SECONDS)


@pytest.mark.usefixtures("one_slot")
async def test_a_chain_of_five_finishes_on_one_slot(stage: Stage) -> None:
    """P11: four wait while the last one runs."""
    gate = threading.Event()
    chain(stage, "p11-five", [wait_for(gate), reply("the bottom")], depth=5, tool="subagent_deep")
    async with stage.session() as session:
        prompt = arguments("p11-five level 1")
        call = asyncio.ensure_future(session.call("subagent_deep", prompt, timeout=CALL_SECONDS))
        await wait_until(lambda: stage.asked("p11-five level 5"), description="the last one's model is asked")
        assert [run["state"] for run in stage.tree(session.id)] == ["suspended"] * 4 + ["driven"]
        gate.set()
        assert (await call).text == "p11-five is over"


async def test_who_waits_leaves_slot_and_lease_to_others(stage: Stage, one_slot: WorkerProcess) -> None:
    """P11: nobody serves the grandchild's queue yet; the one slot takes other work, and nothing is held meanwhile."""
    chain(stage, "p11-slot", [reply("the bottom")], depth=2, tool="subagent_apart")
    stage.model.on("p11-other", reply("served"))
    async with stage.session() as session:
        call = asyncio.ensure_future(session.call("subagent", arguments("p11-slot level 1"), timeout=CALL_SECONDS))

        def states() -> list[str]:
            return [run["state"] for run in stage.tree(session.id)]

        await wait_until(lambda: states() == ["suspended", "queued"], description="the first one waits")
        assert stage.redis.keys(stage.keys.driven("*")) == []
        assert (await session.call("subagent", arguments("p11-other"), timeout=5)).text == "served"
        stage.worker(providers=("apart",)).wait_ready(PROCESS_SECONDS)
        assert (await call).text == "p11-slot is over"
    assert one_slot.is_running


@pytest.fixture(scope="module")
def crew(stage: Stage) -> None:
    """Workers for the children of `spawn`: each of the tests behind this ends one, and needs one more."""
    stage.ensure(len(stage.living) + 3, providers=("spawn",))


@pytest.mark.usefixtures("crew")
@pytest.mark.parametrize("end", [WorkerProcess.kill, WorkerProcess.terminate])
async def test_another_worker_goes_on_with_a_child_that_waited(
    stage: Stage, end: Callable[[WorkerProcess], None]
) -> None:
    """P11: its first worker was killed, or stopped, meanwhile; it drove nothing, so no lease has to lapse."""
    name, gate = f"p11-{end.__name__}", threading.Event()
    chain(stage, name, [wait_for(gate), reply("the bottom")], depth=2, tool="subagent_apart")
    async with stage.session() as session:
        call = asyncio.ensure_future(session.call("subagent", arguments(f"{name} level 1"), timeout=CALL_SECONDS))
        await wait_until(lambda: stage.asked(f"{name} level 2"), description="the grandchild's model is asked")
        [waits, _] = stage.tree(session.id)
        await wait_until(lambda: stage.state(waits["id"]) == "suspended", description="the child waits")
        first = stage.by_pid(stage.driver_pid(waits["id"]))
        end(first)
        first.wait(PROCESS_SECONDS)
        gate.set()
        assert (await call).text == f"{name} is over"
        assert stage.driver_pid(waits["id"]) != first.pid
        assert stage.notes(name) == [f"{name} 1 before", f"{name} 1 after"]


@pytest.mark.usefixtures("crew")
async def test_a_chain_outlives_the_worker_of_its_last_one(stage: Stage) -> None:
    """P11, P6, P7: kill -9 while the grandchild's tool runs and two wait above it; what was done is not done again."""
    chain(stage, "p11-lost", [call_tool("hold", {"text": "p11-lost"}), reply("the bottom")])
    async with stage.session() as session:
        call = asyncio.ensure_future(session.call("subagent", arguments("p11-lost level 1"), timeout=CALL_SECONDS))
        stage.by_pid(await stage.noted("p11-lost begun")).kill()
        assert (await call).text == "p11-lost is over"
        assert stage.notes("p11-lost") == [
            "p11-lost 1 before",
            "p11-lost 2 before",
            "p11-lost begun",
            "p11-lost 2 after",
            "p11-lost 1 after",
        ]
        assert UNKNOWN_EFFECT in stage.asked("p11-lost level 3")[-1].messages[-1].text
