"""Structured output of an in-process child: what is recorded, what counts, and what a resumed child makes of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic_ai.exceptions import ModelAPIError
from pydantic_ai.messages import ModelResponse, ToolCallPart, ToolReturnPart
from pydantic_ai.toolsets import FunctionToolset

from subagent_tasks.agents.delegation_statement import DELEGATION_STATEMENT
from subagent_tasks.agents.structured import ALREADY_RECORDED, NOT_RECORDED, OUTPUT_SECTION, OUTPUT_TOOL
from subagent_tasks.agents.transcript import fold, response_event, tool_result_event
from subagent_tasks.errors import CallerError, DriveStopped
from subagent_tasks.protocol.interfaces import NewEvent
from subagent_tasks.protocol.models import ChildResult, ToolFilter
from tests.providers.driving import (
    WAIT_SECONDS,
    Script,
    Step,
    ask,
    assert_consistent,
    drive_child,
    say,
    start,
    tool_returns,
    use,
)
from tests.providers.fake_drive import FakeDrive, FakeTools

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "answer": {"type": "integer"},
        "notes": {"type": "array", "items": {"type": "object", "properties": {"text": {"type": "string"}}}},
    },
    "required": ["answer"],
    "additionalProperties": False,
}


def hand_in(answer: Any = 42, **more: Any) -> tuple[str, dict[str, Any]]:
    return OUTPUT_TOOL, {"answer": answer, **more}


async def drive_structured(
    script: Script, drive: FakeDrive | None = None, *, schema: dict[str, Any] = SCHEMA, **fields: Any
) -> ChildResult:
    return await drive_child(script, drive, ask(output_schema=schema, **fields))


class Log:
    """Tools that say when they ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    @property
    def tools(self) -> FakeTools:
        return FakeTools([self.look, self.slow, self.fail])

    async def look(self, path: str) -> str:
        self.ran.append(path)
        return f"seen {path}"

    async def slow(self, path: str) -> str:
        for _ in range(20):
            await asyncio.sleep(0)
        self.ran.append(path)
        return f"seen {path}"

    async def fail(self, path: str) -> str:
        self.ran.append(path)
        raise OSError("gone")


def results_of(drive: FakeDrive) -> list[tuple[str, str, Any]]:
    """Name, outcome and content of each recorded result."""
    return [
        (str(event.data["tool_name"]), str(event.data["outcome"]), event.data["content"])
        for event in drive.events
        if event.kind == "tool_result"
    ]


# --- a valid call


@pytest.mark.parametrize("arguments", [{"answer": 42}, '{"answer": 42}', ' {"answer":42}\n'])
async def test_a_valid_call_is_the_result_and_ends_the_turn(arguments: dict[str, Any] | str) -> None:
    """behaviour §10.156: completed with the value, and no further model step is spent."""
    call = ModelResponse(parts=[ToolCallPart(OUTPUT_TOOL, arguments, "c1")], finish_reason="tool_call")
    script, drive = Script(call), FakeDrive()
    result = await drive_structured(script, drive)
    assert (result.stop_reason, result.structured, result.diagnostic) == ("completed", {"answer": 42}, None)
    assert len(script.requests) == 1
    assert drive.kinds == ["input", "response", "tool_result"]


async def test_a_valid_call_is_acknowledged() -> None:
    """behaviour §5.8: the value and its text."""
    drive = FakeDrive()
    await drive_structured(Script(use(hand_in())), drive)
    assert results_of(drive) == [(OUTPUT_TOOL, "success", "Structured output recorded.")]
    assert drive.events[-1].data["metadata"] == {"recorded": True}


async def test_values_come_back_as_they_were_given() -> None:
    """behaviour §5.8: nulls, nested values and odd keys are part of the value."""
    value: dict[str, Any] = {
        "none": None,
        "list": [None, {"deep": None}],
        "": 1,
        "é": "😀",
        "big": 2**70,
        "float": 1.5,
        "empty": {},
    }
    drive = FakeDrive()
    result = await drive_structured(Script(use((OUTPUT_TOOL, value))), drive, schema={"type": "object"})
    again = await drive_structured(Script(), drive.resumed_at(3), schema={"type": "object"})
    assert (result.structured, again.structured) == (value, value)


async def test_an_empty_object_is_a_value() -> None:
    """behaviour §5.8: a schema without properties is met by a call without arguments."""
    result = await drive_structured(Script(use((OUTPUT_TOOL, {}))), schema={"type": "object"})
    assert (result.stop_reason, result.structured) == ("completed", {})


async def test_the_text_beside_the_call_is_kept() -> None:
    """behaviour §1.3: the output is chosen as ever, whatever becomes of the structured value."""
    message = use(hand_in())
    message = ModelResponse(parts=[*say("Here it is.").parts, *message.parts], finish_reason="tool_call")
    assert (await drive_structured(Script(message))).text == "Here it is."


# --- the other calls of the message


async def test_calls_before_it_run_and_calls_behind_it_are_denied() -> None:
    """behaviour §10.157"""
    log = Log()
    drive = FakeDrive(tools=log.tools)
    script = Script(use(("slow", {"path": "a"}), ("look", {"path": "b"}), hand_in(), ("look", {"path": "c"})))
    result = await drive_structured(script, drive)
    assert result.structured == {"answer": 42}
    assert sorted(log.ran) == ["a", "b"]
    assert results_of(drive)[-2:] == [
        (OUTPUT_TOOL, "success", "Structured output recorded."),
        ("look", "denied", ALREADY_RECORDED),
    ]
    assert ALREADY_RECORDED.startswith("structured output already recorded: the run is complete, so ")


async def test_it_waits_for_the_calls_before_it() -> None:
    """behaviour §5.8: they run normally, so the run is not complete before they are done."""
    log = Log()
    drive = FakeDrive(tools=log.tools)
    await drive_structured(Script(use(("slow", {"path": "a"}), hand_in())), drive)
    assert [name for name, _, _ in results_of(drive)] == ["slow", OUTPUT_TOOL]


@pytest.mark.parametrize(
    "behind",
    [
        hand_in(7),
        hand_in("not a number"),
        ("unknown_tool", {}),
        ("look", {"wrong": "arguments"}),
        ("dangerous", {}),
    ],
    ids=["valid", "invalid", "unknown", "bad-arguments", "unapproved"],
)
async def test_whatever_stands_behind_it_is_denied(behind: tuple[str, dict[str, Any]]) -> None:
    """behaviour §10.157: the first capture stands, and every later call has the same answer."""
    log = Log()

    class Tools(FakeTools):
        def toolsets(self) -> Sequence[object]:
            toolset: FunctionToolset[None] = FunctionToolset([log.look])
            toolset.add_function(dangerous, takes_ctx=False, requires_approval=True)
            return [toolset]

    def dangerous() -> str:
        log.ran.append("dangerous")
        return "boom"

    drive = FakeDrive(tools=Tools([log.look]))
    result = await drive_structured(Script(use(hand_in(), behind)), drive)
    assert (result.stop_reason, result.structured) == ("completed", {"answer": 42})
    assert results_of(drive)[1:] == [(behind[0], "denied", ALREADY_RECORDED)]
    assert not log.ran


async def test_what_went_wrong_before_it_does_not_matter() -> None:
    """behaviour §5.8: failed, unknown and misspelt calls before it are answered as ever."""
    log = Log()
    drive = FakeDrive(tools=log.tools)
    script = Script(use(("fail", {"path": "a"}), ("unknown_tool", {}), ("look", {"wrong": 1}), hand_in()))
    result = await drive_structured(script, drive)
    assert result.structured == {"answer": 42}
    assert Counter(outcome for _, outcome, _ in results_of(drive)) == {"failed": 1, "retried": 2, "success": 1}
    assert_consistent([*fold(drive.events, prompt="do it").history()])


# --- an invalid call


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, ["arguments: 'answer' is a required property"]),
        ({"answer": "x"}, ["answer: 'x' is not of type 'integer'"]),
        ({"answer": 1, "notes": [{}, {"text": 5}]}, ["notes[1].text: 5 is not of type 'string'"]),
        ({"answer": "x", "extra": 1}, ["answer: ", "; arguments: ", "'extra' was unexpected"]),
        ({"answer": float("nan")}, ["answer: not a finite number"]),
        ('{"answer": 1, "notes": ["\\ud800"]}', ["arguments: not JSON: "]),
        ("[1]", ["arguments: [1] is not of type 'object'"]),
        ('{"answer": 1', ["arguments: not JSON: "]),
        ('{"answer": 1e999}', ["answer: not a finite number"]),
        ("nonsense", ["arguments: not JSON: "]),
    ],
)
async def test_an_invalid_call_is_answered_and_may_be_repeated(
    arguments: dict[str, Any] | str, words: list[str]
) -> None:
    """behaviour §10.158: an error naming path and violation; the corrected call, in the same turn, counts."""
    bad = ModelResponse(parts=[ToolCallPart(OUTPUT_TOOL, arguments, "c1")], finish_reason="tool_call")
    drive = FakeDrive()
    result = await drive_structured(Script(bad, use(hand_in())), drive)
    assert (result.stop_reason, result.structured) == ("completed", {"answer": 42})
    (_, outcome, text), _ = results_of(drive)
    assert outcome == "failed"
    assert str(text).startswith("invalid arguments: ")
    assert all(word in str(text) for word in words)
    assert drive.kinds.count("input") == 1


async def test_calls_behind_an_invalid_one_run() -> None:
    """behaviour §5.8: nothing was captured, so nothing is denied."""
    log = Log()
    script = Script(use(hand_in("x"), ("look", {"path": "a"})), use(hand_in()))
    await drive_structured(script, FakeDrive(tools=log.tools))
    assert log.ran == ["a"]


async def test_a_valid_call_behind_an_invalid_one_counts() -> None:
    """behaviour §5.8: the first valid call is captured."""
    script = Script(use(hand_in("x"), hand_in(7)))
    assert (await drive_structured(script)).structured == {"answer": 7}


async def test_a_model_that_never_gets_it_right_stops_at_max_requests() -> None:
    """facts-agents §7.8: however often it errs, the child ends."""
    script = Script(*[use(hand_in("x"))] * 10)
    result = await drive_child(script, FakeDrive(), ask(output_schema=SCHEMA), max_requests=3)
    assert (result.stop_reason, result.structured, len(script.requests)) == ("error", None, 3)
    assert result.diagnostic == "stopped after 3 model requests (max_requests)"


async def test_an_answer_to_an_invalid_call_is_bounded() -> None:
    """P13: neither a long value nor many errors make a long answer; what is wrong is still said."""
    drive = FakeDrive()
    schema = {"type": "object", "additionalProperties": {"type": "integer"}}
    many = {f"key{number}": "x" * 10_000 for number in range(100)}
    script = Script(use((OUTPUT_TOOL, many)), use((OUTPUT_TOOL, {"a": 1})))
    await drive_structured(script, drive, schema=schema)
    text = str(results_of(drive)[0][2])
    assert len(text) < 3000
    assert text.count("is not of type 'integer'") == 5
    assert text.endswith("; and 95 more")


# --- endings without a capture


async def test_a_finish_without_a_call_is_an_error() -> None:
    """behaviour §10.159: not asked again; the text is kept, and the diagnostic says what was missing."""
    script = Script(say("42, I think"))
    result = await drive_structured(script)
    assert (result.stop_reason, result.structured, result.text) == ("error", None, "42, I think")
    assert result.diagnostic == NOT_RECORDED
    assert len(script.requests) == 1


async def test_a_finish_after_an_invalid_call_is_an_error() -> None:
    """behaviour §10.159: what was refused was not captured."""
    result = await drive_structured(Script(use(hand_in("x")), say("I give up")))
    assert (result.stop_reason, result.structured, result.diagnostic) == ("error", None, NOT_RECORDED)


@pytest.mark.parametrize(
    ("step", "stop_reason", "words"),
    [
        (say("cut o", "length"), "max-tokens", "an answer was cut at the token limit"),
        (say("no", "content_filter"), "refusal", "the model declined or its answer was filtered"),
        (ModelAPIError("scripted", "broken"), "error", "model request failed"),
    ],
)
async def test_the_childs_own_ending_stays_its_own(step: Step, stop_reason: str, words: str) -> None:
    """behaviour §5.8, §10.159: only a clean finish is an error for want of a capture."""
    result = await drive_structured(Script(step))
    assert (result.stop_reason, result.structured) == (stop_reason, None)
    assert str(result.diagnostic).startswith(words)


async def test_a_cancelled_child_is_aborted() -> None:
    """behaviour §10.159"""
    started = asyncio.Event()

    async def endless() -> str:
        started.set()
        await asyncio.Event().wait()
        return "never"

    script = Script(use(("endless", {}), hand_in()))
    run = await start(script, FakeDrive(tools=FakeTools([endless])), ask(output_schema=SCHEMA))
    async with asyncio.timeout(WAIT_SECONDS):
        await started.wait()
        await run.cancel("killed")
        result = await run.result()
    await run.dispose()
    assert (result.stop_reason, result.structured, result.diagnostic) == ("aborted", None, None)


# --- staged and committed


def log_of(*events: NewEvent) -> FakeDrive:
    """A drive of a run whose transcript already holds the prompt and these events."""
    drive = FakeDrive()
    drive.give("do it")
    drive.add(*events)
    return drive


def returned(outcome: Any, *, name: str = OUTPUT_TOOL, call_id: str = "c1", content: str = "checked") -> NewEvent:
    return tool_result_event(ToolReturnPart(name, content, call_id, outcome=outcome))


async def test_a_blocked_result_discards_what_was_staged() -> None:
    """behaviour §10.160: the call was valid, its result is no success: it does not count, and the child goes on."""
    drive = log_of(response_event(use(hand_in(1))), returned("denied"))
    result = await drive_structured(Script(Exception("unused"), use(hand_in(2))), drive)
    assert (result.stop_reason, result.structured) == ("completed", {"answer": 2})


async def test_an_accepted_replacement_commits() -> None:
    """behaviour §10.160: that the recorded result is a success counts, not its words; the value is the call's."""
    drive = log_of(response_event(use(hand_in(1))), returned("success", content="approved by policy"))
    result = await drive_structured(Script(), drive)
    assert (result.stop_reason, result.structured) == ("completed", {"answer": 1})


async def test_a_reused_id_in_a_later_message_promotes_nothing() -> None:
    """behaviour §10.160: the id of a discarded call is used again by another tool, with success."""
    log = Log()
    drive = log_of(
        response_event(use(hand_in(1))),
        returned("failed"),
        response_event(use(("look", {"path": "a"}))),
    )
    drive.tools = log.tools
    result = await drive_structured(Script(*[Exception("unused")] * 2, say("done")), drive)
    assert log.ran == ["a"]
    assert (result.stop_reason, result.structured, result.diagnostic) == ("error", None, NOT_RECORDED)


async def test_a_reused_id_has_the_arguments_of_its_own_message() -> None:
    """behaviour §10.160: three messages use one id; the value is that of the recorded one."""
    script = Script(use(("look", {"path": "a"})), use(hand_in("x")), use(hand_in(3)))
    result = await drive_structured(script, FakeDrive(tools=Log().tools))
    assert result.structured == {"answer": 3}


async def test_a_success_of_another_tool_under_the_same_id_is_none_of_ours() -> None:
    """behaviour §10.160: one message with one id for two calls; nothing is promoted, whoever wrote it."""
    calls = [ToolCallPart(OUTPUT_TOOL, {"answer": 1}, "c1"), ToolCallPart("look", {"path": "a"}, "c1")]
    drive = log_of(response_event(ModelResponse(parts=calls)), returned("success", name="look"))
    assert fold(drive.events, prompt="do it", completing_tool=OUTPUT_TOOL).completing_call is None


async def test_two_calls_of_one_id_in_one_message_capture_nothing() -> None:
    """behaviour §10.160: which of them a result would belong to is open, so none runs."""
    log = Log()
    message = ModelResponse(
        parts=[ToolCallPart("look", {"path": "a"}, "c1"), ToolCallPart(OUTPUT_TOOL, {"answer": 1}, "c1")]
    )
    result = await drive_structured(Script(message), FakeDrive(tools=log.tools))
    assert (result.stop_reason, result.structured, log.ran) == ("error", None, [])


async def test_staged_but_not_recorded_is_made_again_by_the_next_worker() -> None:
    """behaviour §5.8, P7: a crash between execution and record costs no model step and loses nothing."""
    drive = FakeDrive()
    await drive_structured(Script(use(hand_in())), drive)
    survived, script = drive.resumed_at(2), Script()
    result = await drive_structured(script, survived)
    assert (result.stop_reason, result.structured, script.requests) == ("completed", {"answer": 42}, [])
    assert survived.kinds == ["input", "response", "tool_result"]


async def test_recorded_but_not_settled_is_complete_for_the_next_worker() -> None:
    """behaviour §5.8: a crash between record and settlement; nothing is asked and nothing is written any more."""
    log = Log()
    drive = FakeDrive(tools=log.tools)
    await drive_structured(Script(use(hand_in(), ("look", {"path": "a"}))), drive)
    survived, script = drive.resumed_at(3), Script()
    result = await drive_structured(script, survived)
    assert (result.stop_reason, result.structured) == ("completed", {"answer": 42})
    assert (script.requests, survived.calls, log.ran) == ([], 0, [])


def long_script() -> Script:
    return Script(
        use(("look", {"path": "a"}), ("look", {"path": "b"}), hand_in("x")),
        use(("look", {"wrong": 1}), ("fail", {"path": "c"})),
        use(("look", {"path": "d"}), hand_in(7), ("look", {"path": "never"})),
    )


LONG_EVENTS = 16


async def test_the_long_script_has_the_length_the_next_test_cuts() -> None:
    """Guards the parametrisation below."""
    drive = FakeDrive(tools=Log().tools)
    await drive_structured(long_script(), drive)
    assert len(drive.events) == LONG_EVENTS


@pytest.mark.parametrize("length", range(1, LONG_EVENTS + 1))
async def test_a_structured_child_resumes_from_every_crash_point(length: int) -> None:
    """P7, behaviour §5.8: the same value, wherever the first worker died; what was announced runs no second time."""
    log = Log()
    drive = FakeDrive(tools=log.tools)
    await drive_structured(long_script(), drive)
    log.ran.clear()
    survived, script = drive.resumed_at(length), long_script()
    announced = survived.kinds.count("tool_call")
    result = await drive_structured(script, survived)
    assert (result.stop_reason, result.structured) == ("completed", {"answer": 7})
    assert len(log.ran) == 4 - announced
    assert survived.kinds.count("response") == 3
    for messages in script.requests:
        assert_consistent(messages)


async def test_a_refused_record_captures_nothing() -> None:
    """P5, behaviour §5.8: killed before the result stood in the transcript, the child is aborted."""
    drive = FakeDrive(refuse_after=3)
    result = await drive_structured(Script(use(hand_in())), drive)
    assert drive.kinds == ["input", "response"]
    assert (result.stop_reason, result.structured) == ("aborted", None)


class LetsNothingStart(FakeDrive):
    """As the real one behind a kill: no effect may start, what has started may still be recorded."""

    async def announce(self, call: NewEvent | None = None) -> None:
        raise DriveStopped("kill")


async def test_nothing_is_captured_after_a_kill() -> None:
    """P5: the call asks before it is carried out, as every effect does."""
    drive = LetsNothingStart()
    result = await drive_structured(Script(use(hand_in())), drive)
    assert drive.kinds == ["input", "response"]
    assert (result.stop_reason, result.structured) == ("aborted", None)


async def test_a_kill_behind_the_record_changes_nothing() -> None:
    """behaviour §2.10: it had completed; that a later call's denial is not written any more is no matter."""
    drive = FakeDrive(refuse_after=4)
    result = await drive_structured(Script(use(hand_in(), hand_in(7))), drive)
    assert drive.kinds == ["input", "response", "tool_result"]
    assert (result.stop_reason, result.structured) == ("completed", {"answer": 42})


class HoldsResults(FakeDrive):
    """Holds the record of a tool's result until `hold` is set."""

    async def record(self, *events: NewEvent) -> None:
        if events[0].kind == "tool_result" and self.hold is not None:
            self.held.set()
            await self.hold.wait()
        for event in events:
            self.add(event)

    async def _write(self, *events: NewEvent) -> None:
        self.calls += 1


async def test_a_cancel_during_the_record_does_not_undo_it() -> None:
    """behaviour §5.8: what the transcript holds counts, here as for a worker that would read it."""
    drive = HoldsResults(hold=asyncio.Event())
    run = await start(Script(use(hand_in())), drive, ask(output_schema=SCHEMA))
    async with asyncio.timeout(WAIT_SECONDS):
        await drive.held.wait()
        await run.cancel("killed")
        for _ in range(50):  # a cancel takes some rounds of the loop to reach the call at work
            await asyncio.sleep(0)
        assert drive.hold is not None
        drive.hold.set()
        result = await run.result()
    await run.dispose()
    assert drive.kinds == ["input", "response", "tool_result"]
    assert (result.stop_reason, result.structured) == ("completed", {"answer": 42})


@pytest.mark.parametrize("reason", ["stale", "release"])
async def test_a_run_taken_over_has_no_result_here(reason: str) -> None:
    """P2: whoever drives it now reads the capture from the transcript; the end is not ours to write."""
    drive = FakeDrive(refuse_after=4, stop_reason=reason)
    with pytest.raises(DriveStopped):
        await drive_structured(Script(use(hand_in(), hand_in(7))), drive)
    result = await drive_structured(Script(), drive.resumed_at(3))
    assert result.structured == {"answer": 42}


# --- who sees the tool


async def test_a_child_sees_its_own_schema() -> None:
    """behaviour §10.161: two at once, each with its schema, and each held to it."""
    ready = asyncio.Barrier(2)

    async def meet() -> str:
        await ready.wait()
        return "met"

    def schema(name: str) -> dict[str, Any]:
        return {"type": "object", "properties": {name: {"const": name}}, "required": [name]}

    scripts = {name: Script(use(("meet", {})), use((OUTPUT_TOOL, {name: name}))) for name in ("one", "two")}
    results = await asyncio.gather(
        *(
            drive_structured(script, FakeDrive(tools=FakeTools([meet])), schema=schema(name))
            for name, script in scripts.items()
        )
    )
    assert [result.structured for result in results] == [{"one": "one"}, {"two": "two"}]
    for name, script in scripts.items():
        (tool,) = [tool for tool in script.infos[0].function_tools if tool.name == OUTPUT_TOOL]
        assert tool.parameters_json_schema == schema(name)


async def test_a_plain_child_never_sees_the_tool() -> None:
    """behaviour §10.161: neither the tool nor its section; a call of it is one of an unknown tool."""
    script = Script(use(hand_in()), say("done"))
    result = await drive_child(script, FakeDrive(tools=Log().tools))
    assert OUTPUT_TOOL not in [tool.name for tool in script.infos[0].function_tools]
    assert OUTPUT_TOOL not in str(script.infos[0].instructions)
    assert tool_returns(script.requests[1])[0].outcome == "retried"
    assert (result.stop_reason, result.text, result.structured) == ("completed", "done", None)


@pytest.mark.parametrize("tool_filter", [ToolFilter(allow=()), ToolFilter(deny=("look",)), ToolFilter(allow=("look",))])
async def test_the_tool_is_outside_the_filter(tool_filter: ToolFilter) -> None:
    """behaviour §5.5: what is a child's own is exempt."""
    script = Script(use(hand_in()))
    result = await drive_structured(script, FakeDrive(tools=Log().tools), tool_filter=tool_filter)
    assert result.structured == {"answer": 42}
    shown = {tool.name for tool in script.infos[0].function_tools}
    assert shown == {OUTPUT_TOOL, *(["look"] if tool_filter.allow else ["slow", "fail"] if tool_filter.deny else [])}


async def test_the_section_follows_the_delegation_statement() -> None:
    """behaviour §5.8: order 190, behind that of §4.13."""
    script = Script(use(hand_in()))
    await drive_structured(script)
    assert script.infos[0].instructions == f"{DELEGATION_STATEMENT}\n\n{OUTPUT_SECTION}"


async def test_a_bad_schema_starts_nothing() -> None:
    """behaviour §5.8: checked again where the child would run."""
    drive, script = FakeDrive(), Script(say("x"))
    drive.give("do it")
    with pytest.raises(CallerError, match=r"^unsupported JSON schema: the root: ") as caught:
        await start(script, drive, ask(output_schema={"type": "array"}))
    assert (caught.value.code, drive.calls, script.requests) == ("UNSUPPORTED_SCHEMA", 0, [])


async def test_a_global_tool_of_the_same_name_is_shadowed() -> None:
    """behaviour §5.8: the child's own tool is the one it calls; a plain child keeps the global one."""
    called: list[str] = []

    async def structured_output(answer: int) -> str:
        called.append("global")
        return "from the global tool"

    tools = FakeTools([structured_output])
    assert (await drive_structured(Script(use(hand_in())), FakeDrive(tools=tools))).structured == {"answer": 42}
    assert not called
    await drive_child(Script(use(hand_in()), say("done")), FakeDrive(tools=tools))
    assert called == ["global"]
