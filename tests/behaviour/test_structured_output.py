"""Children that a host's own code runs: `Session.run_child`, its refusals and endings, and structured output."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import pytest

from subagent_tasks import (
    AgentOptions,
    CallerError,
    Capabilities,
    ChildResult,
    ConfigurationError,
    Conflict,
    Session,
    ToolFilter,
)
from subagent_tasks.agents.structured import ALREADY_RECORDED, NOT_RECORDED, OUTPUT_SECTION, OUTPUT_TOOL
from subagent_tasks.errors import ChildFailed, LimitReached, NoProvider, UnsupportedCapability
from subagent_tasks.protocol.ids import run_id_for_call
from subagent_tasks.protocol.keys import Keys
from subagent_tasks.protocol.lifecycle import State
from subagent_tasks.protocol.models import TranscriptEvent
from subagent_tasks.testing import call_tool, call_tools, reply, wait_for
from subagent_tasks.testing.script import SeenRequest, ToolCalls
from tests.behaviour.bench import Bench, first_notices, until
from tests.behaviour.provider import ScriptedProvider, ended

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}


def hand_in(answer: Any = 42, **more: Any) -> ToolCalls:
    return call_tool(OUTPUT_TOOL, {"answer": answer, **more})


def asked(bench: Bench, prompt: str) -> list[SeenRequest]:
    """What the model was asked on behalf of the child with this prompt."""
    return [seen for seen in bench.model.seen if seen.prompt == prompt]


def run_id_of(bench: Bench, session: Session, call_id: str) -> str:
    return run_id_for_call(namespace=bench.kit.app.settings.namespace, session_id=session.id, call_id=call_id)


async def events_of(bench: Bench, session: Session, call_id: str) -> list[TranscriptEvent]:
    return [event async for event in session.transcript(run_id_of(bench, session, call_id), follow=True)]


async def has_runs(bench: Bench, session: Session) -> bool:
    """Whether the session ever had a run of its own, or anything else."""
    keys = [str(key) async for key in cast("Any", bench.kit.redis).scan_iter(f"*{session.id}*")]
    return set(keys) != {Keys(bench.kit.app.settings.namespace).session(session.id)}


# --- structured output


async def test_a_valid_call_is_the_result(bench: Bench) -> None:
    """behaviour §10.156: the value is handed back, and no further model step is spent."""
    bench.model.on("count the files", hand_in())
    result = await (await bench.session()).run_child("spawn", "count the files", output_schema=SCHEMA)
    assert (result.stop_reason, result.structured) == ("completed", {"answer": 42})
    assert len(asked(bench, "count the files")) == 1


async def test_calls_behind_the_capture_are_denied(bench: Bench) -> None:
    """behaviour §10.157: those before it ran, in the transcript of the child too."""
    bench.model.on("look, then count", call_tools(call_tool("look", {"path": "a"}), hand_in(), hand_in(7)))
    session = await bench.session()
    result = await session.run_child("spawn", "look, then count", output_schema=SCHEMA, call_id="c1")
    assert result.structured == {"answer": 42}
    results = [event.data for event in await events_of(bench, session, "c1") if event.kind == "tool_result"]
    assert [data["content"] for data in results] == ["seen a", "Structured output recorded.", ALREADY_RECORDED]


async def test_an_invalid_call_may_be_repeated(bench: Bench) -> None:
    """behaviour §10.158: the child reads what was wrong, in the same turn."""
    bench.model.on("count badly", [hand_in("many"), hand_in(3)])
    result = await (await bench.session()).run_child("spawn", "count badly", output_schema=SCHEMA)
    assert result.structured == {"answer": 3}
    told = asked(bench, "count badly")[1].messages[-1].text
    assert "invalid arguments: answer: 'many' is not of type 'integer'" in told


async def test_a_finish_without_a_call_is_an_error(bench: Bench) -> None:
    """behaviour §10.159: a result, not an exception, with what the child said instead."""
    bench.model.on("count in words", reply("forty-two"))
    result = await (await bench.session()).run_child("spawn", "count in words", output_schema=SCHEMA)
    assert (result.stop_reason, result.diagnostic, result.text) == ("error", NOT_RECORDED, "forty-two")
    assert len(asked(bench, "count in words")) == 1


async def test_a_cancelled_child_is_aborted(bench: Bench) -> None:
    """behaviour §10.159, §10.30: by the caller's signal; nothing was captured."""
    gate, signal = threading.Event(), asyncio.Event()
    bench.model.on("count for ever", [wait_for(gate), hand_in()])
    session = await bench.session()
    running = asyncio.create_task(session.run_child("spawn", "count for ever", output_schema=SCHEMA, signal=signal))
    await until(lambda: asked(bench, "count for ever"), "the model is asked")
    signal.set()
    result = await running
    gate.set()
    assert (result.stop_reason, result.structured) == ("aborted", None)


async def test_structured_children_side_by_side_see_their_own_schema(bench: Bench) -> None:
    """behaviour §10.161: two at once, and a plain child beside them that sees neither tool nor section."""
    together = threading.Barrier(3)

    class Together:
        def is_set(self) -> bool:
            return False

        def wait(self, timeout: float | None = None) -> bool:
            together.wait(5)
            return True

    def schema(name: str) -> dict[str, Any]:
        return {"type": "object", "properties": {name: {"const": name}}, "required": [name]}

    for name in ("north", "south"):
        bench.model.on(f"find {name}", [wait_for(Together()), call_tool(OUTPUT_TOOL, {name: name})])
    bench.model.on("find nothing", [wait_for(Together()), reply("nothing")])
    session = await bench.session()
    results = await asyncio.gather(
        *(session.run_child("spawn", f"find {name}", output_schema=schema(name)) for name in ("north", "south")),
        session.run_child("spawn", "find nothing"),
    )
    assert [result.structured for result in results] == [{"north": "north"}, {"south": "south"}, None]
    (plain,), (structured,) = asked(bench, "find nothing"), asked(bench, "find north")
    assert OUTPUT_TOOL in structured.tools
    assert str(structured.instructions).endswith(OUTPUT_SECTION)
    assert OUTPUT_TOOL not in plain.tools
    assert OUTPUT_TOOL not in str(plain.instructions)


async def test_a_structured_child_may_wait_for_its_own(bench: Bench) -> None:
    """P11, behaviour §5.8: suspended in the middle of its message, it hands in what stood behind the delegation."""
    session, inner = await bench.session(), bench.provider.child(holds_result=True)
    bench.model.on("the outer task", call_tools(call_tool("subagent", inner.arguments()), hand_in(5)))
    running = asyncio.create_task(session.run_child("spawn", "the outer task", output_schema=SCHEMA, call_id="c1"))
    run_id = run_id_of(bench, session, "c1")

    async def is_suspended() -> bool:
        record = await bench.host.process.delegation.record(run_id)
        return record is not None and record.state is State.SUSPENDED

    await until(is_suspended, "the outer child holds no slot")
    inner.go_on.set()
    assert (await running).structured == {"answer": 5}
    assert len(asked(bench, "the outer task")) == 1


async def test_what_any_provider_captures_is_handed_back(bench: Bench) -> None:
    """behaviour §1.3: the value is the provider's; blocks, diagnostic and usage come with it."""
    given = ChildResult(stop_reason="completed", output=ended("said").output, structured={"deep": [None, {"a": 1}]})
    child = bench.provider.child(result=given)
    result = await (await bench.session()).run_child("scripted", child.prompt, output_schema=SCHEMA)
    assert result == given
    assert child.requests[0].output_schema == SCHEMA


# --- what is asked of the provider


async def test_absent_stays_absent(bench: Bench) -> None:
    """behaviour §2.1: nothing is invented that nobody asked for."""
    child = bench.provider.child()
    result = await (await bench.session()).run_child("scripted", child.prompt)
    assert (result.stop_reason, result.text) == ("completed", "done")
    assert child.requests[0].model_dump(exclude_none=True) == {"label": "", "prompt": child.prompt}


async def test_everything_asked_for_reaches_the_provider(bench: Bench) -> None:
    """behaviour §2.7: an empty persona too, which is not an absent one (§5.4)."""
    child = bench.provider.child()
    await (await bench.session()).run_child(
        "scripted",
        child.prompt,
        label="count",
        output_schema=SCHEMA,
        persona="",
        tool_filter=ToolFilter(deny=("look",)),
        agent_options=AgentOptions(model="openai:gpt-5-mini"),
        max_depth=2,
    )
    (request,) = child.requests
    assert (request.label, request.persona, request.max_depth) == ("count", "", 2)
    assert request.tool_filter == ToolFilter(deny=("look",))
    assert request.agent_options == AgentOptions(provider="openai", model="gpt-5-mini")


async def test_several_filters_intersect(bench: Bench) -> None:
    """behaviour §5.5"""
    child = bench.provider.child()
    filters = [ToolFilter(allow=("look", "job_list")), ToolFilter(deny=("job_list",)), ToolFilter(allow=("look",))]
    await (await bench.session()).run_child("scripted", child.prompt, tool_filter=filters)
    tool_filter = child.requests[0].tool_filter
    assert tool_filter is not None
    assert tool_filter.admits("look")
    assert not tool_filter.admits("job_list")


async def test_a_child_of_the_session_has_depth_one(bench: Bench) -> None:
    """behaviour §4.13: and the cap counts from the root."""
    session, child = await bench.session(), bench.provider.child()
    await session.run_child("scripted", child.prompt, call_id="c1", max_depth=1)
    record = await bench.host.process.delegation.record(run_id_of(bench, session, "c1"))
    assert record is not None
    assert (record.depth, record.owner, record.mode, record.spec.tool) == (1, session.id, "foreground", "")


async def test_a_depth_of_zero_forbids_it(bench: Bench) -> None:
    """behaviour §2.7 step 12"""
    child = bench.provider.child()
    with pytest.raises(LimitReached, match=r"^subagent depth 1 exceeds maxDepth 0$"):
        await (await bench.session()).run_child("scripted", child.prompt, max_depth=0)
    assert child.starts == 0


# --- refusals


async def test_an_unknown_provider_is_refused(bench: Bench) -> None:
    """behaviour §1.1, §2.7 step 11: before everything else."""
    session = await bench.session()
    with pytest.raises(NoProvider) as caught:
        await session.run_child("nobody", "", output_schema={"type": "array"}, max_depth=0)
    assert (str(caught.value), caught.value.code) == ('no subagent provider registered for "nobody"', "NO_PROVIDER")
    assert not await has_runs(bench, session)


ASKED: dict[str, dict[str, Any]] = {
    "outputSchema": {"output_schema": {"type": "nonsense"}},
    "depthLimit": {"max_depth": 0},
    "toolFilter": {"tool_filter": ToolFilter(allow=())},
    "persona": {"persona": ""},
    "agentOptions": {"agent_options": AgentOptions(max_tokens=1)},
}


@pytest.mark.parametrize("first", range(len(ASKED)))
async def test_a_capability_the_provider_lacks_is_refused(bench: Bench, first: int) -> None:
    """behaviour §2.7 step 11: the first in the contract's order is named, and no run exists."""
    can_do_nothing = ScriptedProvider("plain", capabilities=Capabilities())
    name, *others = list(ASKED)[first:]
    request = {key: value for each in (*reversed(others), name) for key, value in ASKED[each].items()}
    async with bench.other_app(providers=[can_do_nothing]).host() as host:
        session = await bench.session(host=host)
        with pytest.raises(UnsupportedCapability) as caught:
            await session.run_child("plain", "a task", **request)
    assert str(caught.value) == f'subagent provider "plain" does not support the "{name}" capability'
    assert not await has_runs(bench, session)


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"type": "array"}, 'the root: "type" must be "object", got "array"'),
        ({"type": "object", "properties": {"a": {"$ref": "https://example.org"}}}, 'properties.a: "$ref" must be'),
        ([], "the root: expected a JSON object, got []"),
    ],
)
async def test_an_unsupported_schema_is_refused(bench: Bench, schema: Any, where: str) -> None:
    """behaviour §5.8: the code, where and why, before any child exists."""
    session, child = await bench.session(), bench.provider.child()
    with pytest.raises(CallerError) as caught:
        await session.run_child("scripted", child.prompt, output_schema=schema)
    assert caught.value.code == "UNSUPPORTED_SCHEMA"
    assert str(caught.value).startswith(f"unsupported JSON schema: {where}")
    assert (child.starts, await has_runs(bench, session)) == (0, False)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"prompt": " \n"}, CallerError, "prompt is empty"),
        ({"prompt": 5}, CallerError, "prompt must be a string, got 5"),
        ({"prompt": "a\0b"}, CallerError, "prompt contains a NUL character at position 1"),
        ({"prompt": "x" * 70_001}, CallerError, "prompt: 70001 bytes of UTF-8 exceed the limit of 70000"),
        ({"label": "\ud800"}, CallerError, "label contains half of a surrogate pair"),
        ({"timeout": 0}, CallerError, "timeout must be a positive number"),
        ({"call_id": ""}, CallerError, "call_id must be 1 to"),
        ({"persona": 5}, ConfigurationError, "persona"),
        ({"max_depth": -1}, ConfigurationError, "subagent maxDepth must be a non-negative safe integer"),
        ({"tool_filter": ToolFilter()}, ConfigurationError, "names neither `allow` nor `deny`"),
        ({"tool_filter": "look"}, ConfigurationError, "tool_filter"),
        ({"agent_options": {"temperature": 1}}, ConfigurationError, "agent_options.temperature: unknown key"),
    ],
)
async def test_what_cannot_be_asked_for_is_refused(
    bench: Bench, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    """P13: a typed error that names the argument, before anything starts."""
    session, child = await bench.session(), bench.provider.child()
    asked_for: dict[str, Any] = {"provider": "scripted", "prompt": child.prompt, **change}
    with pytest.raises(error) as caught:
        await session.run_child(**asked_for)
    assert words in str(caught.value)
    assert (child.starts, await has_runs(bench, session)) == (0, False)


async def test_a_closed_session_runs_no_child(bench: Bench) -> None:
    """behaviour §10.153"""
    session = await bench.session()
    await session.close()
    with pytest.raises(CallerError, match="the session is closed"):
        await session.run_child("scripted", "a task")


# --- endings


@pytest.mark.parametrize("stop_reason", ["aborted", "error", "max-tokens", "refusal", "paused"])
async def test_however_a_child_ends_is_a_result(bench: Bench, stop_reason: str) -> None:
    """behaviour §1.2: child-level failures resolve with their stop reason, text and diagnostic."""
    given = ended("half", stop_reason=stop_reason, diagnostic="HTTP status: 500")
    child = bench.provider.child(result=given)
    assert await (await bench.session()).run_child("scripted", child.prompt) == given


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ({"start_error": ConfigurationError("no such model")}, "no such model"),
        ({"result": OSError("gone")}, "OSError: gone"),
        ({"dispose_error": OSError("port still open")}, "OSError: port still open"),
        (
            {"result": OSError("gone"), "dispose_error": OSError("port still open")},
            "subagent run failed: OSError: gone; dispose failed: OSError: port still open",
        ),
    ],
)
async def test_an_infrastructure_fault_is_raised(bench: Bench, behaviour: dict[str, Any], message: str) -> None:
    """behaviour §1.2, §2.8: a start or result that is rejected, and a release that failed even behind a success."""
    child = bench.provider.child(**behaviour)
    with pytest.raises(ChildFailed) as caught:
        await (await bench.session()).run_child("scripted", child.prompt)
    assert (str(caught.value), caught.value.code) == (message, "CHILD_FAILED")


async def test_a_signal_set_beforehand_starts_nothing(bench: Bench) -> None:
    """behaviour §2.10, §10.151: the caller is told as it would be a moment later; the provider is never called."""
    session, child, signal = await bench.session(), bench.provider.child(), asyncio.Event()
    signal.set()
    result = await session.run_child("scripted", child.prompt, signal=signal)
    assert result == ended(stop_reason="aborted", diagnostic="subagent request was aborted before child publication")
    assert (child.starts, await has_runs(bench, session)) == (0, False)


async def test_a_child_that_is_given_up_on_keeps_its_text(bench: Bench) -> None:
    """behaviour §2.10"""
    session, signal = await bench.session(), asyncio.Event()
    child = bench.provider.child(holds_result=True, when_cancelled=ended("half", stop_reason="aborted"))
    running = asyncio.create_task(session.run_child("scripted", child.prompt, signal=signal))
    await until(lambda: child.is_running, "the child runs")
    signal.set()
    assert await running == ended("half", stop_reason="aborted")
    assert child.cancel_reasons == ["the caller no longer waits"]


async def test_a_call_that_times_out_ends_its_child(bench: Bench) -> None:
    """P8: the caller is told in its time, and why."""
    child = bench.provider.child(holds_result=True, when_cancelled=ended("half", stop_reason="aborted"))
    result = await (await bench.session()).run_child("scripted", child.prompt, timeout=0.2)
    assert result == ended("half", stop_reason="aborted", diagnostic="the call timed out after 0.2 s")
    await until(lambda: child.log[-1] == "dispose", "the child is released")


async def test_cancelling_the_awaiting_task_ends_the_child(bench: Bench) -> None:
    """design §4: the same as the signal, and the cancellation goes on."""
    session, child = await bench.session(), bench.provider.child(holds_result=True)
    running = asyncio.create_task(session.run_child("scripted", child.prompt))
    await until(lambda: child.is_running, "the child runs")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: child.log[-1] == "dispose", "the child is released")


# --- repeated calls


async def test_a_repeated_call_id_is_the_same_run(bench: Bench) -> None:
    """design §4: one child, one structured value, also for another host."""
    bench.model.on("count once", hand_in(1))
    session = await bench.session()
    first = await session.run_child("spawn", "count once", output_schema=SCHEMA, call_id="c1")
    async with bench.kit.app.host() as other:
        reopened = await other.open_session(session.id)
        again = await reopened.run_child("spawn", "count once", output_schema=SCHEMA, call_id="c1")
    assert again == first
    assert len(asked(bench, "count once")) == 1


async def test_a_call_repeated_while_it_runs_attaches_to_the_run(bench: Bench) -> None:
    """design §4: all callers get the one result."""
    session, child = await bench.session(), bench.provider.child(holds_result=True)
    calls = [asyncio.create_task(session.run_child("scripted", child.prompt, call_id="c1")) for _ in range(3)]
    await until(lambda: child.is_running, "the child runs")
    child.go_on.set()
    assert await asyncio.gather(*calls) == [ended("done")] * 3
    assert child.starts == 1


@pytest.mark.parametrize("change", [{"output_schema": SCHEMA}, {"persona": ""}, {"max_depth": 3}, {"label": "x"}])
async def test_a_call_id_with_another_request_is_a_conflict(bench: Bench, change: dict[str, Any]) -> None:
    """design §4: the earlier run is untouched."""
    session, child = await bench.session(), bench.provider.child()
    first = await session.run_child("scripted", child.prompt, call_id="c1")
    with pytest.raises(Conflict):
        await session.run_child("scripted", child.prompt, call_id="c1", **change)
    assert await session.run_child("scripted", child.prompt, call_id="c1") == first


async def test_a_tools_call_of_the_same_id_is_a_conflict(bench: Bench) -> None:
    """design §4: a call id names one call of the session, whoever makes it."""
    session, child = await bench.session(), bench.provider.child()
    await session.call("subagent", child.arguments(), call_id="c1")
    with pytest.raises(Conflict):
        await session.run_child("scripted", child.prompt, call_id="c1")


async def test_a_run_of_the_hosts_own_is_announced_to_nobody(bench: Bench) -> None:
    """behaviour §3.7: its ending is its caller's result; the model's jobs and notices know nothing of it."""
    session, child = await bench.session(), bench.provider.child()
    await session.run_child("scripted", child.prompt)
    assert (await session.call("job_list", {})).text == "(no background jobs)"
    job = bench.provider.child()
    await session.call("subagent", job.in_background())
    (notice,) = await first_notices(session, 1)
    assert notice.kind == "job-completed"


# --- blocking


async def test_the_blocking_host_runs_children_too(bench: Bench) -> None:
    """design §4: the same call for scripts; refusals are the same errors."""
    bench.model.on("count from a script", hand_in(8))

    def script() -> tuple[ChildResult, str]:
        with bench.kit.app.sync_host() as host:
            session = host.open_session(f"script-{next(bench.numbers)}")
            result = session.run_child("spawn", "count from a script", output_schema=SCHEMA, timeout=5)
            with pytest.raises(CallerError) as caught:
                session.run_child("spawn", "count from a script", output_schema={})
            return result, caught.value.code

    result, code = await asyncio.to_thread(script)
    assert (result.structured, code) == ({"answer": 8}, "UNSUPPORTED_SCHEMA")
