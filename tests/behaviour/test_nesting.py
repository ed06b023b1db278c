"""Children that delegate: the same tools in a child's hands, and waits that hold no slot (P11, behaviour §4.13, §7)."""

from __future__ import annotations

import asyncio
import threading

import pytest

from subagent_tasks.testing import ScriptedModel, call_tool, call_tools, fake_app, reply, wait_for
from subagent_tasks.waiting import Waiting
from tests.behaviour.bench import job_id_of, until
from tests.behaviour.nesting import nesting, results


def chain(depth: int) -> ScriptedModel:
    """Each child delegates to the next one and repeats what it was told; the deepest answers."""
    model = ScriptedModel()
    for level in range(1, depth):
        prompt = {"description": "deeper", "prompt": f"level {level + 1}"}
        model.on(f"level {level}", [call_tool("subagent", prompt), reply(f"done at {level}")])
    model.on(f"level {depth}", reply("the bottom"))
    return model


@pytest.mark.parametrize(("depth", "concurrency", "chains"), [(3, 2, 8), (5, 1, 1)])
async def test_a_chain_is_longer_than_there_are_slots(depth: int, concurrency: int, chains: int) -> None:
    """P11: a child that waits for its own child holds no slot, so nesting cannot deadlock."""
    async with fake_app(chain(depth), concurrency=concurrency, max_depth=depth) as kit:
        calls = [kit.session.call("subagent", {"description": "top", "prompt": "level 1"}) for _ in range(chains)]
        results = await asyncio.gather(*calls)
        assert [result.text for result in results] == ["done at 1"] * chains


async def test_a_child_collects_its_jobs_though_there_is_one_slot() -> None:
    """P11: while it waits for a job it holds none."""
    async with nesting(concurrency=1) as nest:
        job = nest.child(reply("the answer"))
        waits = [call_tool("job_output", {"job_id": name, "wait": True}) for name in ("JOB1", "JOB2")]
        top = nest.child(call_tools(job.job(), job.job()), call_tools(*waits), reply("collected"))
        assert (await (await nest.session()).call("subagent", top.arguments())).text == "collected"
        assert results(nest.requests(top)[-1])[2:] == ["the answer\n[status: completed]"] * 2


async def test_a_message_of_many_children_needs_one_slot() -> None:
    """P11, behaviour §7.2: more children than slots, and more than may go on at once."""
    async with nesting(concurrency=1) as nest:
        leaves = [nest.child(reply(f"leaf {number}")) for number in range(12)]
        top = nest.child(call_tools(*(leaf.call() for leaf in leaves)), reply("all"))
        assert (await (await nest.session()).call("subagent", top.arguments())).text == "all"
        assert results(nest.requests(top)[-1]) == [f"leaf {number}" for number in range(12)]


async def test_a_kill_lets_nothing_below_it_ask_its_model_any_more() -> None:
    """P5: a slot that the kill frees is taken by nothing that was queued below."""
    async with nesting(concurrency=2) as nest:
        gate, session = nest.gate(), await nest.session()
        leaf = nest.child(wait_for(gate), reply("never"))
        middle = nest.child(call_tools(*(leaf.call() for _ in range(10))), reply("never"))
        top = nest.child(call_tools(*(middle.call() for _ in range(4))), reply("never"))
        job_id = job_id_of(await session.call("subagent", top.arguments(run_in_background=True)))
        await until(lambda: len(nest.requests(leaf)) == 2, "both slots are taken by leaves that ask their models")
        await session.kill(job_id)
        await nest.all_settled()
        assert len(nest.requests(leaf)) == 2


async def test_a_child_lets_go_of_its_slot_when_its_last_tool_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """P11: also when that happens just while it begins to listen for the endings it waits for."""
    tool_may_end, is_listening, may_go_on = (threading.Event() for _ in range(3))
    attach = Waiting.attach

    async def attach_slowly(waiting: Waiting, session_id: str) -> None:
        await attach(waiting, session_id)
        is_listening.set()
        await wait_for(may_go_on).passed()

    def hold() -> str:
        """Hold until it is let go."""
        tool_may_end.wait(10)
        return "held"

    async with nesting(concurrency=1, functions=[hold]) as nest:
        session = await nest.session()
        monkeypatch.setattr(Waiting, "attach", attach_slowly)
        leaf = nest.child(reply("leaf"))
        top = nest.child(call_tools(leaf.call(), call_tool("hold")), reply("done"))
        calling = asyncio.create_task(session.call("subagent", top.arguments()))
        await until(is_listening.is_set, "the child begins to listen")
        tool_may_end.set()

        async def recorded() -> bool:
            return any(event.kind == "tool_result" for event in await nest.transcript(session, top))

        await until(recorded, "the tool has ended")
        may_go_on.set()
        async with asyncio.timeout(5):
            assert (await calling).text == "done"
