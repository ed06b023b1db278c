"""A foreground delegation: what its call returns, however the child, its release or the caller's patience ends."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any, cast

import pytest

from subagent_tasks import CallerError, RunEnded, RunStarted, Session, ToolResult
from subagent_tasks.agents.stopping import output_of_responses
from subagent_tasks.protocol.keys import Keys
from subagent_tasks.protocol.models import MAX_DIAGNOSTIC_BYTES, Block, ChildResult, text_block
from subagent_tasks.testing import call_tool, reply, wait_for
from tests.behaviour.bench import Bench, foreground_value, run_id_of, until
from tests.behaviour.provider import Child, ended


async def delegate(bench: Bench, **behaviour: Any) -> tuple[ToolResult, Child]:
    """A foreground call in a session of its own, and the child it went to."""
    child = bench.provider.child(**behaviour)
    return await (await bench.session()).call("subagent", child.arguments()), child


async def test_a_completed_child_is_its_text_and_its_blocks(bench: Bench) -> None:
    """behaviour §10.21: kind foreground with the run's id and all blocks; the text is the text blocks alone."""
    blocks: tuple[Block, ...] = ({"type": "reasoning", "text": "hm"}, text_block("a"), text_block("b"))
    result, _ = await delegate(bench, result=ChildResult(stop_reason="completed", output=blocks))
    assert (result.text, result.is_error, result.code) == ("ab", False, None)
    assert result.value == {"kind": "foreground", "runId": run_id_of(result), "output": list(blocks)}


async def test_the_run_id_is_the_celery_result_id(bench: Bench) -> None:
    """P3, behaviour §2.4: a plain `AsyncResult` of the run's id holds the same canonical value."""
    result, _ = await delegate(bench)
    stored = cast("Any", bench.kit.app.celery.AsyncResult(run_id_of(result)))
    assert await asyncio.to_thread(lambda: stored.get(timeout=5)) == result.value


async def test_a_session_that_is_gone_cannot_delegate(bench: Bench) -> None:
    """behaviour §10.22: the caller is a session id here; without its record nothing starts and the fix is named."""
    session, child = await bench.session(), bench.provider.child()
    await bench.kit.redis.delete(Keys(bench.kit.app.settings.namespace).session(session.id))
    result = await session.call("subagent", child.arguments())
    assert result.code == "UNKNOWN_SESSION"
    assert result.text == (
        f"Error: session '{session.id}' is unknown or has expired: open it with host.open_session('{session.id}') first"
    )
    assert child.starts == 0


@pytest.mark.parametrize(
    ("stop_reason", "headline"),
    [
        ("aborted", "subagent run was cancelled"),
        ("error", "subagent run failed"),
        ("max-tokens", "subagent run hit its token limit before finishing"),
        ("refusal", "subagent declined the task"),
    ],
)
async def test_each_failure_has_its_headline(bench: Bench, stop_reason: str, headline: str) -> None:
    """behaviour §10.23: the headline of §2.9, as an error."""
    result, _ = await delegate(bench, result=ended(stop_reason=stop_reason))
    assert (result.text, result.is_error, result.code) == (f"Error: {headline}", True, "CHILD_FAILED")


async def test_an_unknown_stop_reason_is_a_failure(bench: Bench) -> None:
    """behaviour §10.24: the set of stop reasons is open."""
    result, _ = await delegate(bench, result=ended("half", stop_reason="paused"))
    assert result.is_error
    assert result.text.startswith("Error: subagent run ended abnormally (paused)\n")


async def test_headline_diagnostic_and_partial_text_come_in_this_order(bench: Bench) -> None:
    """behaviour §10.25"""
    result, _ = await delegate(bench, result=ended("half", stop_reason="error", diagnostic="HTTP status: 500"))
    assert result.text == (
        "Error: subagent run failed\nDiagnostic: HTTP status: 500\nPartial output before the run ended:\nhalf"
    )


async def test_a_failure_without_text_has_no_partial_section(bench: Bench) -> None:
    """behaviour §10.26"""
    result, _ = await delegate(bench, result=ended(stop_reason="error", diagnostic="HTTP status: 500"))
    assert result.text == "Error: subagent run failed\nDiagnostic: HTTP status: 500"


@pytest.mark.parametrize("outcome", [ended("done"), ended(stop_reason="error"), OSError("gone")])
async def test_a_run_is_disposed_once_after_its_result(bench: Bench, outcome: ChildResult | Exception) -> None:
    """behaviour §10.27: on success and failure alike."""
    _, child = await delegate(bench, result=outcome)
    assert child.log == ["starting", "started", "result", "dispose"]


async def test_a_failed_release_spoils_a_completed_child(bench: Bench) -> None:
    """behaviour §10.28: errored with the dispose error, and no value that could be taken for a success."""
    result, _ = await delegate(bench, dispose_error=OSError("port still open"))
    assert (result.text, result.value) == ("Error: OSError: port still open", None)


async def test_a_rejected_result_and_a_failed_release_are_both_told(bench: Bench) -> None:
    """behaviour §10.29: the aggregate text of §2.8."""
    result, _ = await delegate(bench, result=ValueError("no answer"), dispose_error=OSError("port still open"))
    assert result.text == (
        "Error: subagent run failed: ValueError: no answer; dispose failed: OSError: port still open"
    )


async def test_a_signal_cancels_the_child(bench: Bench) -> None:
    """behaviour §10.30: the provider is asked to cancel, the text so far is kept, the release still happens."""
    session, signal = await bench.session(), asyncio.Event()
    child = bench.provider.child(holds_result=True, when_cancelled=ended("half", stop_reason="aborted"))
    calling = asyncio.create_task(session.call("subagent", child.arguments(), signal=signal))
    await until(lambda: child.is_running, "the child runs")
    signal.set()
    result = await calling
    assert result.text == "Error: subagent run was cancelled\nPartial output before the run ended:\nhalf"
    assert child.cancel_reasons == ["the caller no longer waits"]
    assert child.log[-2:] == ["result", "dispose"]


async def test_a_signal_during_the_start_cancels_the_start(bench: Bench) -> None:
    """behaviour §2.10: the start is rejected after its own cleanup; nothing was published, so nothing is released."""
    session, signal = await bench.session(), asyncio.Event()
    child = bench.provider.child(holds_start=True)
    calling = asyncio.create_task(session.call("subagent", child.arguments(), signal=signal))
    await until(lambda: child.starts, "the start began")
    signal.set()
    assert (await calling).text == "Error: subagent run was cancelled"
    assert child.log == ["starting", "start cancelled"]


async def test_a_child_that_completed_first_beats_the_signal(bench: Bench) -> None:
    """behaviour §2.10: what ignores its cancel and completes stays completed."""
    session, signal = await bench.session(), asyncio.Event()
    child = bench.provider.child(holds_result=True, ignores_cancel=True)
    calling = asyncio.create_task(session.call("subagent", child.arguments(), signal=signal))
    await until(lambda: child.is_running, "the child runs")
    signal.set()
    await until(lambda: child.cancel_reasons, "the child was asked to end")
    child.go_on.set()
    result = await calling
    assert (result.text, result.is_error) == ("done", False)


async def test_a_signal_set_beforehand_starts_nothing(bench: Bench) -> None:
    """behaviour §10.31"""
    session, signal, child = await bench.session(), asyncio.Event(), bench.provider.child()
    signal.set()
    result = await session.call("subagent", child.arguments(), call_id="c1", signal=signal)
    assert (result.text, result.code) == ("Error: tool call aborted before dispatch", "ABORTED_BEFORE_DISPATCH")
    assert (await session.call("subagent", child.arguments(), call_id="c1")).text == "done"
    assert child.starts == 1


async def test_a_long_diagnostic_is_cut_on_a_character_boundary(bench: Bench) -> None:
    """behaviour §10.32: 4096 bytes of UTF-8 with the marker, in whole characters."""
    result, _ = await delegate(bench, result=ended(stop_reason="error", diagnostic="é€😀" * 2000))
    diagnostic = result.text.removeprefix("Error: subagent run failed\nDiagnostic: ")
    assert diagnostic.endswith("\n[diagnostic truncated]")
    assert MAX_DIAGNOSTIC_BYTES - 4 < len(diagnostic.encode()) <= MAX_DIAGNOSTIC_BYTES
    assert "�" not in diagnostic


async def test_an_empty_last_message_leaves_the_one_before(bench: Bench) -> None:
    """behaviour §10.33: a message with usage alone is no output."""
    bench.model.on("look first", [call_tool("look", {"path": "a"}, text="It is there."), reply("")])
    result = await (await bench.session()).call("spawn_agent", {"description": "", "prompt": "look first"})
    assert (result.text, result.is_error) == ("It is there.", False)


async def test_streamed_text_stands_in_for_a_message(bench: Bench) -> None:
    """behaviour §10.34: deltas alone are joined into one block."""
    streamed = ChildResult(stop_reason="completed", output=output_of_responses((), deltas=("he", "llo")))
    result, _ = await delegate(bench, result=streamed)
    assert result.value == foreground_value(run_id_of(result), "hello")


async def test_a_message_of_reasoning_alone_is_the_output(bench: Bench) -> None:
    """behaviour §10.35: it hides the earlier text; the rendered text is empty, the block stays in the value."""
    bench.model.on("think", [call_tool("look", {"path": "a"}, text="earlier"), reply("", reasoning="hm")])
    result = await (await bench.session()).call("spawn_agent", {"description": "", "prompt": "think"})
    assert (result.text, result.is_error) == ("", False)
    assert result.value == {
        "kind": "foreground",
        "runId": run_id_of(result),
        "output": [{"type": "reasoning", "text": "hm"}],
    }


async def test_an_empty_description_is_fine_in_the_foreground(bench: Bench) -> None:
    """behaviour §3.3: only a job needs a label."""
    child = bench.provider.child()
    assert (await (await bench.session()).call("subagent", child.arguments(description=""))).text == "done"


async def test_calls_run_side_by_side(bench: Bench) -> None:
    """behaviour §7: a held child does not hold up the next call of the session."""
    session, held, quick = await bench.session(), bench.provider.child(holds_result=True), bench.provider.child()
    waiting = asyncio.create_task(session.call("subagent", held.arguments()))
    await until(lambda: held.is_running, "the first child runs")
    assert (await session.call("subagent", quick.arguments())).text == "done"
    held.go_on.set()
    assert (await waiting).text == "done"


# The caller's patience.


async def test_a_call_that_times_out_ends_its_child(bench: Bench) -> None:
    """P8: the caller is told in its time, and the child is ended, its text kept."""
    child = bench.provider.child(holds_result=True, when_cancelled=ended("half", stop_reason="aborted"))
    session = await bench.session()
    result = await session.call("subagent", child.arguments(), timeout=0.2)
    assert result.code == "TIMEOUT"
    assert result.text == (
        "Error: subagent run was cancelled\nDiagnostic: the call timed out after 0.2 s\n"
        "Partial output before the run ended:\nhalf"
    )
    await until(lambda: child.log[-1] == "dispose", "the child is released")


async def test_no_call_waits_longer_than_the_run_limit(bench: Bench) -> None:
    """design §7: a foreground `timeout` is at most the run limit."""
    child = bench.provider.child(holds_result=True)
    async with bench.declared(run_limit_seconds=0.2) as (session, tool):
        result = await session.call(tool, child.arguments(), timeout=30)
    assert result.is_error
    assert "0.2 s" in result.text


async def test_cancelling_the_awaiting_task_ends_the_child(bench: Bench) -> None:
    """design §4: the same as the signal, and the cancellation goes on."""
    session, child = await bench.session(), bench.provider.child(holds_result=True)
    calling = asyncio.create_task(session.call("subagent", child.arguments()))
    await until(lambda: child.is_running, "the child runs")
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    await until(lambda: child.log[-1] == "dispose", "the child is released")
    assert child.cancel_reasons == ["the caller no longer waits"]


async def test_a_cancelled_call_leaves_no_child_behind(bench: Bench) -> None:
    """design §4, P5: wherever the cancellation meets the call, what was admitted ends."""
    session = await bench.session()
    for rounds in range(12):
        child = bench.provider.child(holds_result=True)
        calling = asyncio.create_task(session.call("subagent", child.arguments()))
        for _ in range(rounds):
            await asyncio.sleep(0)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
    unsettled = Keys(bench.kit.app.settings.namespace).unsettled(session.id)

    async def nothing_is_left() -> bool:
        return not await bench.kit.redis.exists(unsettled)

    await until(nothing_is_left, "every admitted run has settled")


# Repeated calls.


async def test_a_repeated_call_id_is_the_same_run(bench: Bench) -> None:
    """design §4: one child, one result, also from another host."""
    session, child = await bench.session(), bench.provider.child()
    first = await session.call("subagent", child.arguments(), call_id="c1")
    async with bench.kit.app.host() as other:
        again = await (await other.open_session(session.id)).call("subagent", child.arguments(), call_id="c1")
    assert again == first
    assert (first.call_id, child.starts) == ("c1", 1)


async def test_a_call_repeated_while_it_runs_attaches_to_the_run(bench: Bench) -> None:
    """design §4: both callers get the one result."""
    session, child = await bench.session(), bench.provider.child(holds_result=True)
    calls = [asyncio.create_task(session.call("subagent", child.arguments(), call_id="c1")) for _ in range(3)]
    await until(lambda: child.is_running, "the child runs")
    child.go_on.set()
    first, *others = await asyncio.gather(*calls)
    assert others == [first, first]
    assert child.starts == 1


async def test_one_impatient_reader_does_not_disturb_the_others(bench: Bench) -> None:
    """behaviour §3.5: two wait for one job; the wait that runs out first ends only itself."""
    session, child = await bench.session(), bench.provider.child(holds_result=True)
    job_id = await bench.running_job(session, child)
    patient = asyncio.create_task(bench.settled(session, job_id))
    hasty = await session.call("job_output", {"job_id": job_id, "wait": True, "timeout_ms": 50})
    assert hasty.text.endswith("[status: running]")
    assert not patient.done()
    child.go_on.set()
    assert (await patient).text == "done\n[status: completed]"


@pytest.mark.parametrize("more", [{"description": "another"}, {"prompt": "another"}, {"run_in_background": True}])
async def test_a_call_id_with_other_arguments_is_a_conflict(bench: Bench, more: dict[str, Any]) -> None:
    """design §4: refused, naming the call id and the run; the earlier run is untouched."""
    session, child = await bench.session(), bench.provider.child()
    first = await session.call("subagent", child.arguments(), call_id="c1")
    refused = await session.call("subagent", child.arguments(**more), call_id="c1")
    assert (refused.code, refused.is_error) == ("CONFLICT", True)
    assert "call_id 'c1' was used before with other arguments" in refused.text
    assert run_id_of(first) in refused.text
    assert await session.call("subagent", child.arguments(), call_id="c1") == first


async def test_a_call_id_belongs_to_its_session(bench: Bench) -> None:
    """design §4: two conversations may count their calls alike."""
    child = bench.provider.child()
    one, two = await bench.session(), await bench.session()
    results = [await session.call("subagent", child.arguments(), call_id="c1") for session in (one, two)]
    assert run_id_of(results[0]) != run_id_of(results[1])
    assert child.starts == 2


# Bad input.


def nested(depth: int) -> Any:
    value: Any = "leaf"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "description: required, but missing; give a string; prompt: required, but missing; give a string"),
        ({"description": "d", "prompt": ""}, "prompt: empty; say what the agent is to do"),
        ({"description": "d", "prompt": " \n"}, "prompt: empty; say what the agent is to do"),
        ({"description": "d", "prompt": 5}, "prompt: expected a string, got 5"),
        ({"description": "d", "prompt": {"text": "x"}}, "prompt: expected a string, got an object"),
        ({"description": "d", "prompt": "a\x00b"}, "prompt: contains a NUL character at position 1; remove it"),
        (
            {"description": "d", "prompt": "a\ud800"},
            "prompt: contains half of a surrogate pair at position 1; remove it",
        ),
        (
            {"description": "d", "prompt": "é" * 35_001},
            "prompt: 70002 bytes of UTF-8 exceed the limit of 70000; shorten it",
        ),
        ({"prompt": "x", "description": None}, "description: expected a string, got null"),
        ({"prompt": "x", "run_in_background": "no"}, 'run_in_background: expected true or false, got "no"'),
        ({"description": "d", "prompt": "x", "more": nested(100)}, "arguments: nested deeper than 64 levels"),
        ({1: 2}, "prompt: required, but missing"),
        (None, "arguments: expected a JSON object, got null"),
        (7, "arguments: expected a JSON object, got 7"),
        ([["prompt", "x"], ["description", "x"]], "arguments: expected a JSON object, got a list of 2"),
        ("", "prompt: required, but missing"),
        ("[1]", "arguments: expected a JSON object, got text of 3 characters"),
        ('{"prompt": "x"', "arguments: expected a JSON object, got text of 14 characters"),
        ("[" * 100_000, "arguments: expected a JSON object, got text of 100000 characters"),
        ('{"description": "d", "prompt": "\\ud800"}', "prompt: contains half of a surrogate pair at position 0"),
        ('{"description": "\ud800", "prompt": "x"}', "description: contains half of a surrogate pair at position 0"),
    ],
)
async def test_bad_arguments_are_refused_by_field_value_and_fix(bench: Bench, arguments: Any, said: str) -> None:
    """P13, behaviour §2.7: a result with code INVALID_ARGS, nothing raised, nothing started."""
    session = await bench.session()
    result = await session.call("subagent", arguments, call_id="c1")
    assert result.text.startswith("Error: invalid arguments: ")
    assert said in result.text
    assert (result.code, result.is_error, result.call_id) == ("INVALID_ARGS", True, "c1")
    assert len(result.text) < 500
    assert not await bench.kit.redis.exists(Keys(bench.kit.app.settings.namespace).unsettled(session.id))


async def test_a_refused_call_id_may_be_used_again(bench: Bench) -> None:
    """P13: nothing was started, so nothing is remembered of the refused call."""
    session, child = await bench.session(), bench.provider.child()
    assert (await session.call("subagent", child.arguments(prompt=5), call_id="c1")).code == "INVALID_ARGS"
    assert (await session.call("subagent", child.arguments(), call_id="c1")).text == "done"


async def test_arguments_may_be_json_text(bench: Bench) -> None:
    """design §4: as model APIs send them; undeclared keys are ignored (behaviour §2.2)."""
    child = bench.provider.child()
    text = json.dumps(child.arguments(more=nested(20)))
    assert (await (await bench.session()).call("subagent", text)).text == "done"


@pytest.mark.parametrize("name", ["nope", "", "SUBAGENT", "x\ud800", "a" * 1000, None, []])
async def test_an_unknown_tool_is_refused_and_the_tools_are_named(bench: Bench, name: Any) -> None:
    """P13, behaviour §2.7 step 2"""
    result = await (await bench.session()).call(name, {})
    assert (result.code, result.is_error) == ("UNKNOWN_TOOL", True)
    assert "the tools are subagent, " in result.text
    assert len(result.text) < 500


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), "5", True])
async def test_a_timeout_that_is_no_time_is_refused(bench: Bench, seconds: Any) -> None:
    """P13: raised, for it is the calling code's mistake."""
    session, child = await bench.session(), bench.provider.child()
    with pytest.raises(CallerError, match="timeout must be a positive number of seconds, got "):
        await session.call("subagent", child.arguments(), timeout=seconds)
    assert child.starts == 0


@pytest.mark.parametrize("call_id", ["", "a" * 201, "a\nb", "a\x00", "a\ud800", 7])
async def test_a_call_id_that_is_none_is_refused(bench: Bench, call_id: Any) -> None:
    """P13"""
    session, child = await bench.session(), bench.provider.child()
    with pytest.raises(CallerError, match="call_id must be "):
        await session.call("subagent", child.arguments(), call_id=call_id)
    assert child.starts == 0


@pytest.mark.parametrize("session_id", ["", "a" * 201, "a\nb", "a\x00", "a\ud800", None, 7])
async def test_a_session_id_that_is_none_is_refused(bench: Bench, session_id: Any) -> None:
    """P13"""
    with pytest.raises(CallerError, match="session_id must be "):
        await bench.host.open_session(session_id)


async def test_a_childs_id_opens_no_parent_session(bench: Bench) -> None:
    """P13: a child is acted on through its parent."""
    result, _ = await delegate(bench)
    with pytest.raises(CallerError, match="is a child's"):
        await bench.host.open_session(run_id_of(result))


# Life of sessions, hosts and listeners.


async def test_a_closed_session_says_so(bench: Bench) -> None:
    """P13, P8: it would wait for endings that it cannot hear; opened again, it works."""
    session, child = await bench.session(), bench.provider.child()
    await session.close()
    with pytest.raises(CallerError, match=r"is closed; open it again with host\.open_session"):
        await session.call("subagent", child.arguments())
    again = await bench.host.open_session(session.id)
    assert (await again.call("subagent", child.arguments())).text == "done"
    assert child.starts == 1


async def test_a_session_of_a_stopped_host_says_so(bench: Bench) -> None:
    """P13, P8"""
    child = bench.provider.child()
    async with bench.kit.app.host() as host:
        session = await bench.session(host=host)
    with pytest.raises(CallerError, match="its host has stopped"):
        await session.call("subagent", child.arguments())
    with pytest.raises(CallerError, match="the host is not running"):
        await host.open_session("any")
    assert child.starts == 0


async def test_closing_one_of_two_readers_leaves_the_other_listening(bench: Bench) -> None:
    """design §4: opening is idempotent; each opener is one."""
    session, child = await bench.session(), bench.provider.child()
    await (await bench.host.open_session(session.id, reader="other")).close()
    async with asyncio.timeout(3):
        assert (await session.call("subagent", child.arguments())).text == "done"


async def test_listeners_hear_one_start_and_one_end(bench: Bench) -> None:
    """behaviour §9: an id for each attempt, the child's id, its provider, its parent, and how it ended."""
    session, gate = await bench.session(), threading.Event()
    events = heard(bench, session)
    bench.model.on("listen", [wait_for(gate), reply("heard")])
    calling = asyncio.create_task(session.call("spawn_agent", {"description": "d", "prompt": "listen"}))
    await until(lambda: events, "the start was told")
    assert [type(event) for event in events] == [RunStarted]
    gate.set()
    child_id = run_id_of(await calling)
    await until(lambda: len(events) == 2, "the end was told")
    attempt_id = events[0].run_id
    assert events == [
        RunStarted(attempt_id, "spawn", child_id, session.id),
        RunEnded(attempt_id, "spawn", child_id, session.id, "completed"),
    ]


def heard(bench: Bench, session: Session) -> list[RunStarted | RunEnded]:
    events: list[RunStarted | RunEnded] = []
    bench.kit.app.on_event(lambda event: events.append(event) if event.parent_id == session.id else None)
    return events


async def test_a_failed_start_has_no_events(bench: Bench) -> None:
    """behaviour §9"""
    session, child = await bench.session(), bench.provider.child(start_error=OSError("no"))
    events = heard(bench, session)
    await session.call("subagent", child.arguments())
    after = bench.provider.child()
    await session.call("subagent", after.arguments())
    await until(lambda: len(events) == 2, "the second child's events")
    assert {type(event) for event in events} == {RunStarted, RunEnded}
    assert len({event.child_id for event in events}) == 1


@pytest.mark.parametrize(
    ("outcome", "stop_reason"), [(OSError("gone"), "error"), (ended(stop_reason="refusal"), "refusal")]
)
async def test_a_start_is_followed_by_one_end(bench: Bench, outcome: ChildResult | Exception, stop_reason: str) -> None:
    """behaviour §9: a rejected result ends `error`."""
    session, child = await bench.session(), bench.provider.child(result=outcome)
    events = heard(bench, session)
    await session.call("subagent", child.arguments())
    await until(lambda: len(events) == 2, "start and end")
    assert isinstance(events[1], RunEnded)
    assert events[1].stop_reason == stop_reason


async def test_a_killed_child_has_its_end_event(bench: Bench) -> None:
    """behaviour §9: exactly one end for each start, whatever ended it."""
    session, gate = await bench.session(), threading.Event()
    events = heard(bench, session)
    bench.model.on("be killed", [wait_for(gate), reply("never")])
    result = await session.call("spawn_agent", {"description": "d", "prompt": "be killed"}, timeout=0.5)
    assert result.code == "TIMEOUT"
    gate.set()
    await until(lambda: len(events) == 2, "start and end")
    assert isinstance(events[1], RunEnded)
    assert events[1].stop_reason == "aborted"


async def test_a_listener_that_raises_changes_nothing(bench: Bench) -> None:
    """behaviour §9: contained, and the listeners behind it still hear."""
    session, child = await bench.session(), bench.provider.child()

    def broken(event: object) -> None:
        raise RuntimeError("listener")

    bench.kit.app.on_event(broken)
    events = heard(bench, session)
    assert (await session.call("subagent", child.arguments())).text == "done"
    await until(lambda: len(events) == 2, "both events behind the broken listener")


async def test_the_blocking_host_does_the_same(bench: Bench) -> None:
    """design §4: `SyncHost` for scripts and Django; one implementation underneath."""
    child = bench.provider.child()

    def script() -> None:
        with bench.kit.app.sync_host() as host:
            session = host.open_session("blocking")
            assert "subagent" in [tool.name for tool in session.tools]
            result = session.call("subagent", child.arguments(), call_id="c1", timeout=5)
            assert (result.text, result.call_id) == ("done", "c1")
            job = session.call("subagent", child.in_background(), call_id="c2")
            assert isinstance(job.value, dict)
            notice = next(iter(session.notices(timeout=5)))
            assert notice.sender_id == job.value["jobId"]
            session.acknowledge(notice)
            assert list(session.notices(timeout=0.05)) == []
            assert [event.kind for event in session.transcript(notice.sender_id)] == ["input", "settled"]
            assert session.kill(notice.sender_id).value
            session.close(cancel_jobs=True)
        with pytest.raises(CallerError, match="the host is not running"):
            host.open_session("blocking")

    await asyncio.to_thread(script)


async def test_a_call_hears_of_its_ending_when_its_session_is_closed_meanwhile(bench: Bench) -> None:
    """design §4: closing takes no further call; those under way come to their end, at once and not by a later look."""
    session, child = await bench.session(), bench.provider.child(holds_result=True)
    calling = asyncio.ensure_future(session.call("subagent", child.arguments()))
    await until(lambda: child.is_running, "the child runs")
    await session.close()
    child.go_on.set()
    async with asyncio.timeout(bench.kit.app.settings.lease_seconds / 2):
        assert (await calling).text == "done"
