"""Which of our tools a child has: the depth cap leaves them visible, its filter takes them away (behaviour §5.5)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from subagent_tasks.protocol.interfaces import Provider
from subagent_tasks.testing import call_tool, reply
from subagent_tasks.testing.script import SeenRequest
from tests.behaviour.nesting import Child, Nest, nesting, results, returns
from tests.behaviour.provider import ScriptedProvider

pytestmark = pytest.mark.asyncio(loop_scope="module")

JOB_TOOLS = ["job_output", "job_list", "job_kill"]

scripted = ScriptedProvider()


def look(path: str) -> str:
    """Look at a path."""
    return f"seen {path}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nest() -> AsyncIterator[Nest]:
    tools: list[dict[str, Any]] = [
        {"tool_name": "unbounded", "max_depth": "provider-managed"},
        {"tool_name": "never", "max_depth": 0},
        {"tool_name": "elsewhere", "provider": "scripted", "max_depth": "provider-managed"},
        {"tool_name": "later", "background_mode": "continuable"},
        {"tool_name": "denying", "tool_filter": {"deny": ["subagent", "look"]}},
        {"tool_name": "bare", "tool_filter": {"allow": []}},
        {"tool_name": "jobless", "tool_filter": {"deny": JOB_TOOLS}},
        {"tool_name": "outputless", "tool_filter": {"deny": ["job_output"]}},
        {"tool_name": "unlisted", "tool_filter": {"deny": ["job_list", "later"]}},
        {"tool_name": "only_jobs", "tool_filter": {"allow": JOB_TOOLS}},
    ]
    providers: list[Provider] = [scripted]
    async with nesting(tools=tools, functions=[look], providers=providers) as nest:
        yield nest


def chain(nest: Nest, length: int, *, tool: str = "subagent") -> list[Child]:
    """Children of which each but the last delegates to the next one; the first of all comes first."""
    children = [nest.child(reply("the bottom"))]
    for _ in range(length - 1):
        children.insert(0, nest.child(children[0].call(tool), reply("back")))
    return children


async def only_request(nest: Nest, tool: str) -> SeenRequest:
    """What the model is asked on behalf of a child of that tool."""
    child = nest.child(reply("done"))
    result = await (await nest.session()).call(tool, child.arguments())
    assert result.text == "done"
    (request,) = nest.requests(child)
    return request


# Depth


async def test_the_depth_cap_counts_from_the_root(nest: Nest) -> None:
    """behaviour §4.13: a child at the cap is refused what its own parent was allowed."""
    *_, third, fourth = chain_of_four = chain(nest, 4)
    result = await (await nest.session()).call("subagent", chain_of_four[0].arguments())
    assert not result.is_error
    refused = returns(nest.requests(third)[-1])[0]
    assert refused.content == "Error: subagent depth 4 exceeds maxDepth 3"
    assert refused.outcome == "failed"
    assert not nest.requests(fourth)


async def test_the_tool_stays_visible_at_the_cap(nest: Nest) -> None:
    """behaviour §2.5 step 9: only the start is rejected."""
    children = chain(nest, 3)
    await (await nest.session()).call("subagent", children[0].arguments())
    deepest = nest.requests(children[-1])[0]
    assert "subagent" in deepest.tools
    assert deepest.tools == nest.requests(children[0])[0].tools


async def test_a_cap_of_none_forbids_all_delegation(nest: Nest) -> None:
    """behaviour §4.13: 0, for a host and for a child alike."""
    unborn = nest.child(reply("never said"))
    top = nest.child(unborn.call("never"), reply("could not"))
    session = await nest.session()
    refused = await session.call("never", unborn.arguments())
    assert refused.text == "Error: subagent depth 1 exceeds maxDepth 0"
    assert (await session.call("subagent", top.arguments())).text == "could not"
    assert results(nest.requests(top)[-1]) == ["Error: subagent depth 2 exceeds maxDepth 0"]
    assert not nest.requests(unborn)


async def test_a_job_is_refused_at_the_cap_too(nest: Nest) -> None:
    """behaviour §2.7 step 12: the check is the same for every route."""
    unborn = nest.child(reply("never said"))
    top = nest.child(unborn.call("never", run_in_background=True), call_tool("job_list"), reply("done"))
    await (await nest.session()).call("subagent", top.arguments())
    assert results(nest.requests(top)[-1]) == ["Error: subagent depth 2 exceeds maxDepth 0", "(no background jobs)"]


async def test_without_a_cap_a_chain_may_be_of_any_length(nest: Nest) -> None:
    """behaviour §2.7: `provider-managed` sends no cap."""
    children = chain(nest, 6, tool="unbounded")
    result = await (await nest.session()).call("unbounded", children[0].arguments())
    assert result.text == "back"
    assert (await nest.record(children[-1])).depth == 6


async def test_a_cap_left_to_the_provider_is_no_part_of_a_childs_request(nest: Nest) -> None:
    """behaviour §2.7: what the provider is asked has no `max_depth`."""
    grandchild = scripted.child()
    top = nest.child(call_tool("elsewhere", grandchild.arguments()), reply("done"))
    await (await nest.session()).call("subagent", top.arguments())
    assert [request.max_depth for request in grandchild.requests] == [None]


# Arguments


@pytest.mark.parametrize("written", ['{"prompt": "cut o', "[1]", '"text"', ""])
async def test_arguments_that_are_no_json_object_are_refused_as_in_a_host(nest: Nest, written: str) -> None:
    """behaviour §7.13, §2.7 step 3: the child's model is told, and goes on."""
    session, top = await nest.session(), nest.child(call_tool("subagent", written), reply("went on"))
    assert (await session.call("subagent", top.arguments())).text == "went on"
    refused = await session.call("subagent", written)
    assert refused.code == "INVALID_ARGS"
    assert results(nest.requests(top)[-1]) == [refused.text]


async def test_empty_arguments_are_an_empty_object(nest: Nest) -> None:
    """behaviour §7.13"""
    top = nest.child(call_tool("job_list", ""), reply("done"))
    await (await nest.session()).call("subagent", top.arguments())
    assert results(nest.requests(top)[-1]) == ["(no background jobs)"]


# Filter


async def test_without_a_filter_a_child_has_what_a_host_has_and_the_apps_tools(nest: Nest) -> None:
    """design §4: a child is an ordinary session."""
    session = await nest.session()
    request = await only_request(nest, "subagent")
    assert sorted(request.tools) == sorted(["look", *(tool.name for tool in session.tools)])


async def test_a_denied_delegation_tool_is_hidden_and_refused(nest: Nest) -> None:
    """behaviour §5.5, §10.152"""
    unborn = nest.child(reply("never said"))
    top = nest.child(unborn.call(), reply("could not"))
    result = await (await nest.session()).call("denying", top.arguments())
    assert result.text == "could not"
    assert "subagent" not in nest.requests(top)[0].tools
    assert "job_output" in nest.requests(top)[0].tools
    assert not nest.requests(unborn)


async def test_a_denied_job_tool_is_refused(nest: Nest) -> None:
    """behaviour §5.5: the model calls it all the same, and learns nothing."""
    top = nest.child(call_tool("job_list"), reply("could not"))
    result = await (await nest.session()).call("jobless", top.arguments())
    assert result.text == "could not"
    assert "(no background jobs)" not in str(nest.requests(top)[-1].raw)


async def test_an_empty_allow_list_hides_our_tools_too(nest: Nest) -> None:
    """behaviour §5.5"""
    assert (await only_request(nest, "bare")).tools == ()


async def test_a_filter_is_of_one_child_and_not_of_its_children(nest: Nest) -> None:
    """behaviour §5.5: it changes the child's layer; it is no ceiling for those below."""
    grandchild = nest.child(reply("deep"))
    top = nest.child(grandchild.call("unbounded"), reply("done"))
    await (await nest.session()).call("denying", top.arguments())
    assert {"subagent", "look"}.isdisjoint(nest.requests(top)[0].tools)
    assert {"subagent", "look"} <= set(nest.requests(grandchild)[0].tools)


# Prompt


@pytest.mark.parametrize(
    ("tool", "is_told"),
    [
        ("subagent", True),
        ("unlisted", True),
        ("only_jobs", True),
        ("jobless", False),
        ("outputless", False),
        ("bare", False),
    ],
)
async def test_a_child_is_told_about_jobs_if_it_can_collect_them(nest: Nest, tool: str, is_told: bool) -> None:
    """behaviour §8: filters remove schema and guidance together."""
    request = await only_request(nest, tool)
    assert ("job_output" in request.tools) is is_told
    assert ("# Background jobs" in (request.instructions or "")) is is_told


@pytest.mark.parametrize(("tool", "is_told"), [("subagent", True), ("unlisted", False), ("bare", False)])
async def test_a_delegation_tools_guidance_goes_with_the_tool(nest: Nest, tool: str, is_told: bool) -> None:
    """behaviour §10.18: a tool hidden by restriction has no section."""
    request = await only_request(nest, tool)
    assert ("later" in request.tools) is is_told
    assert ("# Delegating with later" in (request.instructions or "")) is is_told


async def test_a_child_reads_the_sections_of_its_tools_in_the_order_of_a_host(nest: Nest) -> None:
    """behaviour §8, P12: the same words in the same order."""
    session = await nest.session()
    assert session.system_prompt in str((await only_request(nest, "subagent")).instructions)
