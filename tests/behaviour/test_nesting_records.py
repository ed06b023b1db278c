"""What is told of a child that delegated: transcript, events, usage; and which of its calls are one call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from subagent_tasks import RunEnded, RunStarted, Session, Unauthorized
from subagent_tasks.protocol.models import TranscriptEvent, Usage
from subagent_tasks.providers import SpawnProvider
from subagent_tasks.testing import call_tool, call_tools, reply, wait_for
from tests.behaviour.bench import first_notices, until
from tests.behaviour.nesting import Child, Nest, NestingModel, nesting, results

pytestmark = pytest.mark.asyncio(loop_scope="module")


def look(path: str) -> str:
    """Look at a path."""
    return f"seen {path}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nest() -> AsyncIterator[Nest]:
    model = NestingModel()
    short = SpawnProvider(model=model, name="short", max_requests=2)
    tools = [{"tool_name": "short", "provider": "short"}]
    async with nesting(model=model, providers=[short], tools=tools, functions=[look]) as nest:
        yield nest


async def suspended_twice(
    nest: Nest, session: Session, *, tool: str = "subagent", in_background: bool = False
) -> Child:
    """A child that called `look` beside a first child, then a second one, and was suspended for each; it has ended."""
    gates = [nest.gate() for _ in range(2)]
    first, second = (nest.child(wait_for(gate), reply("done")) for gate in gates)
    look_beside = call_tools(first.call(), call_tool("look", {"path": "a"}))
    top = nest.child(look_beside, second.call(), reply("done"))
    calling = asyncio.create_task(session.call(tool, top.arguments(run_in_background=in_background)))
    for child, gate in zip((first, second), gates, strict=True):
        await nest.asked(child)
        await nest.suspended(top)
        gate.set()
    await calling
    await nest.settled(top)
    return top


# Transcript


async def test_a_host_reads_the_transcript_of_its_childrens_children(nest: Nest) -> None:
    """design §4: a child's session belongs to its tree."""
    session, leaf = await nest.session(), nest.child(reply("deep"))
    top = nest.child(leaf.call(), reply("done"))
    await session.call("subagent", top.arguments())
    events = await nest.transcript(session, leaf)
    assert [event.kind for event in events] == ["input", "response", "settled"]
    assert events[0].data["text"] == leaf.prompt


async def test_another_tree_may_not_read_it(nest: Nest) -> None:
    """behaviour §3.8: nor may a session below another root."""
    session, leaf = await nest.session(), nest.child(reply("deep"))
    top = nest.child(leaf.call(), reply("done"))
    await session.call("subagent", top.arguments())
    with pytest.raises(Unauthorized, match="belongs to another session"):
        await nest.transcript(await nest.session(), leaf)


async def test_the_transcript_of_a_child_that_was_suspended_tells_everything_once(nest: Nest) -> None:
    """protocol §3: each model message, each call and each result, however often the child was driven."""
    session = await nest.session()
    events = await nest.transcript(session, await suspended_twice(nest, session))
    assert [(event.kind, event.data.get("tool_call_id")) for event in events] == [
        ("input", None),
        ("response", None),
        ("tool_call", "call_1_2"),
        ("tool_result", "call_1_2"),
        ("suspended", None),
        ("tool_result", "call_1_1"),
        ("response", None),
        ("suspended", None),
        ("tool_result", "call_2_1"),
        ("response", None),
        ("settled", None),
    ]
    assert [event.seq for event in events] == list(range(len(events)))


async def test_a_followed_transcript_goes_on_over_a_suspension(nest: Nest) -> None:
    """design §4: until the child settles."""
    session, gate = await nest.session(), nest.gate()
    leaf = nest.child(wait_for(gate), reply("done"))
    top = nest.child(leaf.call(), reply("done"))
    calling = asyncio.create_task(session.call("subagent", top.arguments()))
    await nest.suspended(top)
    kinds: list[str] = []

    async def follow() -> None:
        async for event in session.transcript(nest.id_of(top), follow=True):
            kinds.append(event.kind)

    following = asyncio.create_task(follow())
    await until(lambda: "suspended" in kinds, "the suspension was read")
    gate.set()
    await calling
    await following
    assert kinds == ["input", "response", "suspended", "tool_result", "response", "settled"]


# Events


async def test_a_child_that_was_suspended_begins_and_ends_once(nest: Nest) -> None:
    """behaviour §9, §10.192: a suspension is neither."""
    events: list[RunStarted | RunEnded] = []
    nest.kit.app.on_event(events.append)
    top = await suspended_twice(nest, await nest.session())

    def of_top() -> list[RunStarted | RunEnded]:
        return [event for event in events if event.child_id == nest.id_of(top)]

    await until(lambda: len(of_top()) > 1, "the end was told")
    start, end = of_top()
    assert isinstance(start, RunStarted)
    assert isinstance(end, RunEnded)
    assert (start.run_id, end.stop_reason) == (end.run_id, "completed")


async def test_an_event_of_a_grandchild_names_the_child_as_its_parent(nest: Nest) -> None:
    """behaviour §9: told to whoever listens, with the direct parent."""
    events: list[RunStarted | RunEnded] = []
    nest.kit.app.on_event(events.append)
    leaf = nest.child(reply("deep"))
    top = nest.child(leaf.call(), reply("done"))
    await (await nest.session()).call("subagent", top.arguments())
    parents = {event.parent_id for event in events if event.child_id == nest.id_of(leaf)}
    assert parents == {nest.id_of(top)}


# Calls


@pytest.mark.parametrize("is_same", [True, False], ids=["same arguments", "other arguments"])
async def test_a_call_id_used_again_in_a_later_message_is_another_call(nest: Nest, is_same: bool) -> None:
    """protocol §3: models repeat ids; a call is told by its message and its id."""
    first = nest.child(reply("one"))
    second = first if is_same else nest.child(reply("two"))
    top = nest.child(first.call(call_id="x"), second.call(call_id="x"), reply("done"))
    await (await nest.session()).call("subagent", top.arguments())
    asked = [*nest.requests(first), *([] if is_same else nest.requests(second))]
    assert len({request.conversation_id for request in asked}) == 2
    assert results(nest.requests(top)[-1]) == ["one", "one" if is_same else "two"]


async def test_the_same_delegation_twice_in_a_message_is_two_runs(nest: Nest) -> None:
    """behaviour §7.1: each call is a child of its own."""
    leaf = nest.child(reply("done"))
    top = nest.child(call_tools(leaf.call(), leaf.call()), reply("done"))
    await (await nest.session()).call("subagent", top.arguments())
    assert len({request.conversation_id for request in nest.requests(leaf)}) == 2


# Usage


async def test_usage_counts_on_over_suspensions(nest: Nest) -> None:
    """design §4: the whole conversation's, and each request and call once."""
    session = await nest.session()
    top = await suspended_twice(nest, session, in_background=True)
    (notice,) = await first_notices(session, 1)
    assert notice.sender_id == nest.id_of(top)
    assert isinstance(notice.usage, Usage)
    assert (notice.usage.requests, notice.usage.tool_calls) == (3, 3)
    assert notice.usage.input_tokens == sum(input_tokens(await nest.transcript(session, top)))


def input_tokens(events: list[TranscriptEvent]) -> list[int]:
    messages: list[Any] = [event.data["message"] for event in events if event.kind == "response"]
    return [int(message["usage"]["input_tokens"]) for message in messages]


async def test_the_limit_of_requests_counts_on_over_suspensions(nest: Nest) -> None:
    """design §4: `max_requests` bounds the conversation, not the drive."""
    top = await suspended_twice(nest, await nest.session(), tool="short")
    assert len(nest.requests(top)) == 2
    outcome = (await nest.record(top)).outcome
    assert outcome is not None
    assert outcome.stop_reason == "error"
    assert outcome.diagnostic == "stopped after 2 model requests (max_requests)"
