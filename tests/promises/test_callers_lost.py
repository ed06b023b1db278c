"""Foreground runs belong to their caller (protocol §3): what becomes of a chain whose host is killed, in P6's spirit.

The host that dies is a process of its own; the one that comes after it is the test's.
"""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from host_process import HostProcess
from stage import LEASE_SECONDS, Stage, arguments, delegate, notices_of

from subagent_tasks.protocol.ids import run_id_for_call
from subagent_tasks.testing import call_tool, reply, wait_until

LEASE_MS = int(LEASE_SECONDS * 1000)
FOR_GOOD, IN_TIME = "lost-for-good", "lost-and-found"


@pytest.fixture(scope="module")
def callers(stage: Stage) -> dict[str, HostProcess]:
    """Hosts that will wait for a chain of three each, whose last one's tool holds it."""
    started: dict[str, HostProcess] = {}
    for name in (FOR_GOOD, IN_TIME):
        stage.model.on(f"{name} level 1", [delegate(f"{name} level 2"), reply("the answer")])
        stage.model.on(f"{name} level 2", [delegate(f"{name} level 3"), reply("in between")])
        stage.model.on(f"{name} level 3", [call_tool("hold", {"text": name}), reply("the bottom")])
        call = {"name": "subagent", "arguments": arguments(f"{name} level 1"), "call_id": "c1"}
        started[name] = stage.host(name, call)
    stage.ensure(1)
    return started


async def lose(stage: Stage, name: str, callers: dict[str, HostProcess]) -> tuple[str, str]:
    """Kill the host while the last one's tool runs: the id of the run it waited for, and its own."""
    (await callers[name].wait_ready()).call()
    await stage.noted(f"{name} begun")
    callers[name].kill()
    run_id = run_id_for_call(namespace=stage.namespace, session_id=name, call_id="c1")
    return run_id, str(stage.redis.hget(stage.keys.session(run_id), "caller"))


async def test_a_chain_ends_two_leases_after_its_caller_fell_silent(
    stage: Stage, callers: dict[str, HostProcess]
) -> None:
    """Protocol §3: all of it, and not before; the sweeper, which looks every third of a lease, adds one at most."""
    run_id, caller = await lose(stage, FOR_GOOD, callers)
    last_beat_ms = int(cast("float", stage.redis.zscore(stage.keys.processes, caller))) - LEASE_MS
    await wait_until(lambda: set(stage.states()) == {"settled"}, description="all ended")
    silent_ms = int(str(stage.redis.hget(stage.keys.session(run_id), "finished_at"))) - last_beat_ms
    assert 2 * LEASE_MS <= silent_ms <= 3 * LEASE_MS
    assert [(run["status"], run["detail"]) for run in stage.tree(FOR_GOOD)] == [
        ("killed", "caller lost"),
        ("killed", ""),
        ("killed", ""),
    ]
    stage.open_gate(FOR_GOOD)
    async with stage.session(FOR_GOOD) as session:
        [notice] = await notices_of(session, 1)
        assert (notice.kind, notice.sender_id) == ("run-abandoned", run_id)
        assert stage.redis.xlen(stage.keys.notices(session.id)) == 1
    assert stage.notes(FOR_GOOD) == [f"{FOR_GOOD} begun"]
    await stage.assert_clean()


async def test_a_call_repeated_in_time_gets_the_result(stage: Stage, callers: dict[str, HostProcess]) -> None:
    """Protocol §3: by its call id, from another process; the chain goes on, once, for as long as it takes."""
    _, caller = await lose(stage, IN_TIME, callers)
    async with stage.session(IN_TIME) as session:
        call = session.call("subagent", arguments(f"{IN_TIME} level 1"), call_id="c1", timeout=20)
        result = asyncio.ensure_future(call)
        await wait_until(
            lambda: stage.redis.zscore(stage.keys.processes, caller) is None,
            description="the sweepers are through with the first host",
        )
        stage.open_gate(IN_TIME)
        assert (await result).text == "the answer"
        assert [run["status"] for run in stage.tree(session.id)] == ["completed"] * 3
        assert stage.redis.xlen(stage.keys.notices(session.id)) == 0
    assert stage.notes(IN_TIME) == [f"{IN_TIME} begun", f"{IN_TIME} ended"]
    assert len(stage.asked(IN_TIME)) == 3 * 2
    await stage.assert_clean()
