"""The calls of one message: side by side, in the model's order (behaviour §7)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from subagent_tasks import CallerError, ToolCall, ToolDefinition, ToolResult
from tests.behaviour.bench import Bench, until
from tests.behaviour.provider import Child


def call_of(child: Child, call_id: str) -> ToolCall:
    return ToolCall(call_id=call_id, name="subagent", arguments=child.arguments())


async def test_foreground_calls_overlap_and_keep_the_models_order(bench: Bench) -> None:
    """behaviour §10.184: results in model order, though the second finishes first."""
    session = await bench.session()
    slow, quick = bench.provider.child(holds_result=True), bench.provider.child()
    calls = asyncio.ensure_future(session.call_all([call_of(slow, "a"), call_of(quick, "b")]))
    await until(lambda: slow.is_running and quick.log[-1:] == ["dispose"], "the second ended while the first runs")
    slow.go_on.set()
    results = await calls
    assert [(result.call_id, result.is_error) for result in results] == [("a", False), ("b", False)]


async def test_at_most_max_parallel_run_and_each_end_starts_the_next(bench: Bench) -> None:
    """behaviour §10.185: a rolling pool."""
    session = await bench.session()
    children = [bench.provider.child(holds_result=True) for _ in range(3)]
    calls = asyncio.ensure_future(
        session.call_all([call_of(child, str(number)) for number, child in enumerate(children)], max_parallel=2)
    )
    await until(lambda: children[0].is_running and children[1].is_running, "two run")
    assert children[2].starts == 0
    children[1].go_on.set()
    await until(lambda: children[2].is_running, "the third took the free place")
    assert children[0].is_running
    children[0].go_on.set()
    children[2].go_on.set()
    assert [result.is_error for result in await calls] == [False] * 3


@pytest.mark.parametrize("size", [0, -1, True, 1.5])
async def test_a_pool_that_is_no_positive_number_is_refused(bench: Bench, size: int) -> None:
    """behaviour §10.185"""
    with pytest.raises(CallerError, match="maxParallelToolCalls must be a positive integer"):
        await (await bench.session()).call_all([], max_parallel=size)


async def test_an_abort_drains_what_runs_and_starts_nothing_more(bench: Bench) -> None:
    """behaviour §10.187: the started child ends as aborted, the waiting one was never dispatched."""
    session, signal = await bench.session(), asyncio.Event()
    running, waiting = bench.provider.child(holds_result=True), bench.provider.child()
    calls = asyncio.ensure_future(
        session.call_all([call_of(running, "a"), call_of(waiting, "b")], max_parallel=1, signal=signal)
    )
    await until(lambda: running.is_running, "the first runs")
    signal.set()
    first, second = await calls
    assert first.text.startswith("Error: subagent run was cancelled")
    assert (second.call_id, second.text, second.code) == (
        "b",
        "Error: tool call aborted before dispatch",
        "ABORTED_BEFORE_DISPATCH",
    )
    assert waiting.starts == 0


async def test_a_failure_of_the_caller_surfaces_after_the_others_ended(bench: Bench) -> None:
    """behaviour §10.188: no result is invented for a call that cannot be one."""
    session = await bench.session()
    child = bench.provider.child(holds_result=True)
    calls = asyncio.ensure_future(
        session.call_all([call_of(child, "a"), ToolCall(call_id="", name="subagent", arguments=child.arguments())])
    )
    await until(lambda: child.is_running, "the first runs")
    assert not calls.done()
    child.go_on.set()
    with pytest.raises(CallerError, match="call_id must be 1 to 200 printable characters"):
        await calls


async def test_overlapping_background_calls_get_ids_of_their_own(bench: Bench) -> None:
    """behaviour §10.189"""
    session = await bench.session()
    children = [bench.provider.child() for _ in range(5)]
    results = await session.call_all(
        [
            ToolCall(call_id=str(number), name="subagent", arguments=child.in_background())
            for number, child in enumerate(children)
        ]
    )
    values = [result.value for result in results]
    ids = {str(value["jobId"]) for value in values if isinstance(value, dict)}
    assert len(ids) == len(children)
    for job_id in ids:
        await bench.settled(session, job_id)


# Exclusive calls: none of our own tools is one yet, so these are calls of tools made here.


class GatedTool:
    """Runs until the test lets it go, and notes `+name` and `-name`; alone among a message's calls if `exclusive`."""

    section = ""

    def __init__(self, name: str, notes: list[str], *, exclusive: bool = False) -> None:
        self.definition = ToolDefinition(name=name, description="Waits.", parameters={"type": "object"})
        self.exclusive = exclusive
        self.gate = asyncio.Event()
        self._notes = notes

    async def call(self, services: object, context: object, arguments: object) -> ToolResult:
        name = self.definition.name
        self._notes.append(f"+{name}")
        await self.gate.wait()
        self._notes.append(f"-{name}")
        return ToolResult(text=name)


@asynccontextmanager
async def called(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *tools: GatedTool
) -> AsyncGenerator[asyncio.Task[list[ToolResult]]]:
    """One message that calls each of the tools, in a session of a host with these alone."""
    app = bench.other_app()
    declared: dict[str, Any] = {tool.definition.name: tool for tool in tools}
    monkeypatch.setattr(app, "tools", lambda: declared)
    async with app.host() as host:
        session = await bench.session(host=host)
        yield asyncio.create_task(
            session.call_all([ToolCall(call_id=name, name=name, arguments={}) for name in declared])
        )


async def test_an_exclusive_call_parts_the_calls_before_it_from_those_behind(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """behaviour §10.186: three groups: side by side, it alone, side by side."""
    notes: list[str] = []
    one, two, alone, four, five = tools = [
        GatedTool(name, notes, exclusive=name == "alone") for name in ("one", "two", "alone", "four", "five")
    ]
    async with called(bench, monkeypatch, *tools) as calling:
        for group in ((two, one), (alone,), (five, four)):
            await until(lambda group=group: all(f"+{tool.definition.name}" in notes for tool in group), "all begin")
            for tool in group:
                tool.gate.set()
        results = await calling
    assert notes == ["+one", "+two", "-two", "-one", "+alone", "-alone", "+four", "+five", "-five", "-four"]
    assert [result.text for result in results] == ["one", "two", "alone", "four", "five"]


async def test_a_waiting_call_is_classified_again_behind_the_barrier(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """behaviour §10.186: what ran before it may have made it exclusive, or safe."""
    notes: list[str] = []
    barrier, tightened, loosened, last = tools = [
        GatedTool("barrier", notes, exclusive=True),
        GatedTool("tightened", notes),
        GatedTool("loosened", notes, exclusive=True),
        GatedTool("last", notes),
    ]
    async with called(bench, monkeypatch, *tools) as calling:
        await until(lambda: notes == ["+barrier"], "the barrier runs")
        tightened.exclusive, loosened.exclusive = True, False
        barrier.gate.set()
        await until(lambda: "+tightened" in notes, "what became exclusive runs")
        tightened.gate.set()
        await until(lambda: "+last" in notes, "the rest runs")
        loosened.gate.set()
        last.gate.set()
        await calling
    assert notes == [
        *("+barrier", "-barrier", "+tightened", "-tightened"),
        *("+loosened", "+last", "-loosened", "-last"),
    ]


@pytest.mark.parametrize("call", [{"name": "subagent"}, ("subagent", {})])
async def test_what_is_no_tool_call_is_refused_by_its_place(bench: Bench, call: Any) -> None:
    """P13: before any of the calls begins."""
    session, child = await bench.session(), bench.provider.child()
    with pytest.raises(CallerError, match=r"calls\[1\] is a .*: make each one a ToolCall"):
        await session.call_all([call_of(child, "a"), call])
    assert child.starts == 0
