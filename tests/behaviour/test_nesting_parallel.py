"""The calls of one message of a child: side by side and in the model's order, as in a host (behaviour §7)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from pydantic_ai.toolsets import FunctionToolset

from subagent_tasks.scheduling import DEFAULT_MAX_PARALLEL
from subagent_tasks.testing import call_tool, call_tools, fail, reply, wait_for
from tests.behaviour.bench import until
from tests.behaviour.nesting import Nest, nesting, results

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Held:
    """An ordinary tool that runs until a test lets it go, and how often it ran for whom."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.gates: dict[str, threading.Event] = {}

    def gate(self, name: str) -> threading.Event:
        return self.gates.setdefault(name, threading.Event())

    def hold(self, name: str) -> str:
        """Hold until it is let go."""
        self.runs.append(name)
        self.gate(name).wait(10)
        return f"held {name}"

    def hold_alone(self, name: str) -> str:
        """The same, alone among the calls of a message."""
        return self.hold(name)


held = Held()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nest() -> AsyncIterator[Nest]:
    exclusive = FunctionToolset[None]()
    exclusive.add_function(held.hold_alone, sequential=True)
    async with nesting(functions=[held.hold, exclusive]) as nest:
        yield nest
        for gate in held.gates.values():
            gate.set()


async def test_calls_overlap_and_their_results_keep_the_models_order(nest: Nest) -> None:
    """behaviour §10.184: in a child too, though the second finishes first."""
    go_on = nest.gate()
    slow, quick = nest.child(wait_for(go_on), reply("slow")), nest.child(reply("quick"))
    top = nest.child(call_tools(slow.call(), quick.call()), reply("both"))
    calling = asyncio.create_task((await nest.session()).call("subagent", top.arguments()))
    await nest.asked(slow)
    await nest.settled(quick)
    go_on.set()
    assert (await calling).text == "both"
    assert results(nest.requests(top)[-1]) == ["slow", "quick"]


async def test_ten_of_a_messages_children_go_on_and_each_end_starts_the_next(nest: Nest) -> None:
    """behaviour §10.185: the default of a host, rolling over suspensions."""
    gates = [nest.gate() for _ in range(DEFAULT_MAX_PARALLEL + 2)]
    children = [nest.child(wait_for(gate), reply(f"child {number}")) for number, gate in enumerate(gates)]
    *first, eleventh, twelfth = children
    top = nest.child(call_tools(*(child.call() for child in children)), reply("all"))
    calling = asyncio.create_task((await nest.session()).call("subagent", top.arguments()))
    await nest.asked(*first)
    await nest.suspended(top)
    assert not nest.requests(eleventh)
    gates[4].set()
    await nest.asked(eleventh)
    await nest.suspended(top)
    assert not nest.requests(twelfth)
    gates[0].set()
    await nest.asked(twelfth)
    for gate in gates:
        gate.set()
    assert (await calling).text == "all"
    assert results(nest.requests(top)[-1]) == [f"child {number}" for number in range(len(children))]


async def test_an_exclusive_call_is_a_barrier(nest: Nest) -> None:
    """behaviour §10.186: three groups: what stands before it has ended, what stands behind it has not begun."""
    gates = [nest.gate() for _ in range(4)]
    one, two, four, five = (nest.child(wait_for(gate), reply(str(number))) for number, gate in enumerate(gates))
    alone = call_tool("hold_alone", {"name": "barrier"})
    top = nest.child(call_tools(one.call(), two.call(), alone, four.call(), five.call()), reply("all"))
    calling = asyncio.create_task((await nest.session()).call("subagent", top.arguments()))
    await nest.asked(one, two)
    gates[0].set()
    await nest.settled(one)
    await nest.suspended(top)
    assert "barrier" not in held.runs
    gates[1].set()
    await until(lambda: "barrier" in held.runs, "the exclusive tool runs")
    assert not nest.requests(four)
    held.gate("barrier").set()
    await nest.asked(four, five)
    gates[2].set()
    gates[3].set()
    await calling
    assert results(nest.requests(top)[-1]) == ["0", "1", "held barrier", "2", "3"]
    assert held.runs.count("barrier") == 1


async def test_a_failing_sibling_leaves_the_others_alone(nest: Nest) -> None:
    """behaviour §7.11"""
    go_on = nest.gate()
    good, bad = nest.child(wait_for(go_on), reply("good")), nest.child(fail(400))
    top = nest.child(call_tools(bad.call(), good.call()), reply("went on"))
    calling = asyncio.create_task((await nest.session()).call("subagent", top.arguments()))
    await nest.asked(good)
    await nest.settled(bad)
    go_on.set()
    assert (await calling).text == "went on"
    failed, fine = results(nest.requests(top)[-1])
    assert failed.startswith("Error: subagent run failed")
    assert fine == "good"


async def test_a_refused_sibling_leaves_the_others_alone(nest: Nest) -> None:
    """behaviour §7.11, §2.7 step 3"""
    good = nest.child(reply("good"))
    top = nest.child(call_tools(call_tool("subagent", {"prompt": 1}), good.call()), reply("went on"))
    assert (await (await nest.session()).call("subagent", top.arguments())).text == "went on"
    refused, fine = results(nest.requests(top)[-1])
    assert refused.startswith("Error: invalid arguments: ")
    assert fine == "good"


async def test_an_ordinary_tool_runs_and_is_recorded_beside_a_pending_child(nest: Nest) -> None:
    """protocol §3: ordinary tools of the message run at once; what they answered is written down before the wait."""
    go_on, session = nest.gate(), await nest.session()
    slow = nest.child(wait_for(go_on), reply("slow"))
    top = nest.child(call_tools(slow.call(), call_tool("hold", {"name": "beside"})), reply("both"))
    calling = asyncio.create_task(session.call("subagent", top.arguments()))
    await nest.asked(slow)
    held.gate("beside").set()
    await nest.suspended(top)
    events = await nest.transcript(session, top)
    assert [event.data["content"] for event in events if event.kind == "tool_result"] == ["held beside"]
    go_on.set()
    await calling


async def test_an_ordinary_tool_is_not_run_again_when_the_child_goes_on(nest: Nest) -> None:
    """P7: over two suspensions of the same message."""
    gates = [nest.gate() for _ in range(DEFAULT_MAX_PARALLEL + 1)]
    children = [nest.child(wait_for(gate), reply("done")) for gate in gates]
    held.gate("once").set()
    calls = [call_tool("hold", {"name": "once"}), *(child.call() for child in children)]
    top = nest.child(call_tools(*calls), reply("all"))
    calling = asyncio.create_task((await nest.session()).call("subagent", top.arguments()))
    await nest.asked(*children[:-1])
    await nest.suspended(top)
    gates[0].set()
    await nest.asked(children[-1])
    await nest.suspended(top)
    for gate in gates:
        gate.set()
    await calling
    assert held.runs.count("once") == 1
    assert results(nest.requests(top)[-1]) == ["held once", *["done"] * len(children)]


async def test_a_child_that_ends_while_an_ordinary_tool_runs_is_heard_at_once(nest: Nest) -> None:
    """behaviour §7.5: bodies overlap; what runs in this process keeps the child driven."""
    session, quick = await nest.session(), nest.child(reply("quick"))
    top = nest.child(call_tools(call_tool("hold", {"name": "long"}), quick.call()), reply("both"))
    calling = asyncio.create_task(session.call("subagent", top.arguments()))

    async def heard() -> bool:
        events = await nest.transcript(session, top) if nest.requests(top) else []
        return [event.data["content"] for event in events if event.kind == "tool_result"] == ["quick"]

    await until(heard, "the child's result is written down")
    held.gate("long").set()
    await calling
    assert results(nest.requests(top)[-1]) == ["held long", "quick"]
