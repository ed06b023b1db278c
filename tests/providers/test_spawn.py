"""The provider `spawn` over a drive in memory: events, stop reasons, filters, resume, cancel."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import pytest
from pydantic_ai import ModelRetry, ToolReturn
from pydantic_ai.exceptions import (
    ContentFilterError,
    ModelAPIError,
    ModelContextWindowExceededError,
    ModelHTTPError,
    ModelRateLimitError,
)
from pydantic_ai.messages import (
    ModelMessage,
    ModelResponse,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    UserPromptPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.toolsets import FunctionToolset

from subagent_tasks.agents.delegation_statement import DELEGATION_STATEMENT
from subagent_tasks.agents.keeper import MAX_TOOL_ERROR_CHARACTERS, NEEDS_APPROVAL
from subagent_tasks.agents.transcript import UNKNOWN_EFFECT, fold
from subagent_tasks.errors import ConfigurationError, DriveStopped, OperatorError
from subagent_tasks.models.routes import ModelRoutes
from subagent_tasks.protocol.models import AgentOptions, ToolFilter
from subagent_tasks.providers import SpawnProvider
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

SECRET = "sk-planted-secret-1234"


class Notebook:
    """Tools with a countable effect, one of each kind."""

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()
        self.threads: list[int] = []

    @property
    def tools(self) -> FakeTools:
        return FakeTools([self.write_sync, self.write_async, self.refuse, self.ask_again])

    def write_sync(self, key: str) -> str:
        self.ran[key] += 1
        self.threads.append(threading.get_ident())
        return f"wrote {key}"

    async def write_async(self, key: str) -> dict[str, str]:
        self.ran[key] += 1
        return {"wrote": key}

    async def refuse(self, key: str) -> str:
        self.ran[key] += 1
        raise OSError(f"{key} is read-only")

    async def ask_again(self, key: str) -> str:
        self.ran[key] += 1
        raise ModelRetry("another key, please")


# --- the plain path


async def test_a_plain_answer_completes_with_its_text() -> None:
    """behaviour §1.3: completed, one text block, usage counted."""
    result = await drive_child(Script(say("hello")))
    assert (result.stop_reason, result.text, result.diagnostic) == ("completed", "hello", None)
    assert result.usage is not None
    assert (result.usage.requests, result.usage.input_tokens, result.usage.output_tokens) == (1, 10, 2)


async def test_the_model_sees_the_taken_input_and_not_the_request_twice() -> None:
    """protocol §3: the conversation is folded from the transcript."""
    script = Script(say("hello"))
    drive = FakeDrive()
    drive.give("the taken words")
    await drive_child(script, drive)
    prompts = [part.content for part in script.requests[0][0].parts if isinstance(part, UserPromptPart)]
    assert prompts == ["the taken words"]


async def test_a_plain_turn_costs_one_check_and_one_append() -> None:
    """design §3: announce before the model request, append after it, nothing else."""
    drive = FakeDrive()
    await drive_child(Script(say("hello")), drive)
    assert drive.kinds == ["input", "response"]
    assert (drive.calls, drive.checks) == (2, 1)


async def test_each_step_is_written_around_its_effect() -> None:
    """P7: a call is announced before it runs, its result recorded after."""
    notebook = Notebook()
    drive = FakeDrive(tools=notebook.tools)
    script = Script(use(("write_sync", {"key": "a"})), use(("write_async", {"key": "b"})), say("done"))
    result = await drive_child(script, drive)
    assert result.text == "done"
    assert drive.kinds == [
        "input",
        "response",
        "tool_call",
        "tool_result",
        "response",
        "tool_call",
        "tool_result",
        "response",
    ]
    assert [drive.events[index].data["content"] for index in (3, 6)] == ["wrote a", {"wrote": "b"}]
    assert notebook.ran == {"a": 1, "b": 1}


async def test_a_synchronous_tool_runs_outside_the_event_loop() -> None:
    """design §7: a blocking tool must not stall the worker's heartbeat."""
    notebook = Notebook()
    await drive_child(Script(use(("write_sync", {"key": "a"})), say("done")), FakeDrive(tools=notebook.tools))
    assert notebook.threads
    assert notebook.threads[0] != threading.get_ident()


async def test_a_childs_session_starts_without_its_parents_words() -> None:
    """behaviour §10.146: a spawned child's conversation holds its own input alone."""
    script = Script(say("hello"))
    await drive_child(script)
    assert len(script.requests[0]) == 1


# --- instructions


@pytest.mark.parametrize(
    ("persona", "expected"),
    [(None, "You serve ACME.\n\n"), ("You are a critic.", "You are a critic.\n\n"), ("", "")],
)
async def test_a_persona_replaces_the_deployments(persona: str | None, expected: str) -> None:
    """behaviour §5.4: absent keeps, empty shadows with nothing; the delegation statement always stands."""
    script = Script(say("hello"))
    await drive_child(script, None, ask(persona=persona), instructions="You serve ACME.")
    assert script.infos[0].instructions == expected + DELEGATION_STATEMENT


@pytest.mark.parametrize("word", ["delegated", "approval", "rejected automatically", "what stopped you"])
def test_the_delegation_statement_says_what_it_must(word: str) -> None:
    """behaviour §4.13."""
    assert word in DELEGATION_STATEMENT


# --- the tool filter


async def test_a_denied_tool_is_hidden_and_refused() -> None:
    """behaviour §5.5, §10.152: hidden from the prompt and refused when called all the same."""
    notebook = Notebook()
    script = Script(use(("write_sync", {"key": "a"})), say("done"))
    request = ask(tool_filter=ToolFilter(deny=("write_sync",)))
    result = await drive_child(script, FakeDrive(tools=notebook.tools), request)
    assert "write_sync" not in [tool.name for tool in script.infos[0].function_tools]
    assert not notebook.ran
    assert tool_returns(script.requests[1])[0].outcome == "retried"
    assert result.stop_reason == "completed"


async def test_an_empty_allow_list_hides_every_tool() -> None:
    """behaviour §5.5: `allow: []` is valid."""
    script = Script(say("done"))
    await drive_child(script, FakeDrive(tools=Notebook().tools), ask(tool_filter=ToolFilter(allow=())))
    assert script.infos[0].function_tools == []


async def test_an_unknown_name_in_the_filter_fails_the_start() -> None:
    """behaviour §5.5: loud, with the known names, and nothing was begun."""
    drive = FakeDrive(tools=FakeTools([Notebook().write_sync]))
    script = Script(say("done"))
    with pytest.raises(ConfigurationError) as caught:
        await start(script, drive, ask(tool_filter=ToolFilter(deny=("x",))))
    assert str(caught.value) == ('tools.restrict() names unknown global tool(s) "x"; known global tools: write_sync')
    assert (drive.calls, script.requests) == (0, [])


# --- stop reasons


@pytest.mark.parametrize(
    ("steps", "stop_reason"),
    [
        ([say("hello", None)], "completed"),
        ([say("cut o", "length")], "max-tokens"),
        ([say("no", "content_filter")], "refusal"),
        ([say("oops", "error")], "error"),
        ([ModelResponse(parts=[TextPart("half an ans")], finish_reason=None, state="interrupted")], "error"),
        ([ModelResponse(parts=[ThinkingPart("hmm")], finish_reason="length")], "max-tokens"),
        ([ContentFilterError("filtered")], "refusal"),
        ([ModelContextWindowExceededError("scripted", "too long")], "max-tokens"),
        ([ModelAPIError("scripted", "broken")], "error"),
        ([RuntimeError("broken")], "error"),
    ],
)
async def test_stop_reasons(steps: list[Step], stop_reason: str) -> None:
    """behaviour §1.3, §5.7: only a finished answer completes."""
    result = await drive_child(Script(*steps))
    assert result.stop_reason == stop_reason
    assert (result.diagnostic is None) == (stop_reason == "completed")


async def test_a_length_cut_in_an_earlier_step_still_counts() -> None:
    """behaviour §1.5: max-tokens is sticky across the later steps of a turn."""
    notebook = Notebook()
    script = Script(use(("write_sync", {"key": "a"}), finish="length"), say("done"))
    result = await drive_child(script, FakeDrive(tools=notebook.tools))
    assert (result.stop_reason, result.text) == ("max-tokens", "done")


async def test_a_reasoning_only_answer_is_an_answer() -> None:
    """behaviour §1.3: the last message with content counts; the model is not asked again."""
    script = Script(ModelResponse(parts=[ThinkingPart("hmm")], finish_reason="stop"))
    result = await drive_child(script)
    assert (result.stop_reason, result.output) == ("completed", ({"type": "reasoning", "text": "hmm"},))
    assert len(script.requests) == 1


async def test_an_error_keeps_the_text_so_far() -> None:
    """behaviour §2.9: partial output is handed on."""
    first = ModelResponse(parts=[TextPart("looking"), ToolCallPart("write_sync", {"key": "a"}, "c1")])
    result = await drive_child(Script(first, ModelAPIError("m", "x")), FakeDrive(tools=Notebook().tools))
    assert (result.stop_reason, result.text) == ("error", "looking")


async def test_a_child_that_never_ends_stops_at_max_requests() -> None:
    """facts-agents §7.8: a request limit must not bite silently."""
    script = Script(*[use(("write_sync", {"key": "a"}))] * 10)
    result = await drive_child(script, FakeDrive(tools=Notebook().tools), max_requests=3)
    assert (result.stop_reason, len(script.requests)) == ("error", 3)
    assert result.diagnostic == "stopped after 3 model requests (max_requests)"


async def test_a_silent_model_times_out_with_the_text_so_far() -> None:
    """field fault 8: every model request is bounded."""

    async def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        if len(messages) > 1:
            await asyncio.Event().wait()
        return ModelResponse(parts=[TextPart("looking"), ToolCallPart("write_sync", {"key": "a"}, "c1")])

    drive = FakeDrive(tools=Notebook().tools, model_request_timeout_seconds=0.05)
    drive.give("do it")
    run = await SpawnProvider(FunctionModel(answer)).start(ask(), drive)
    async with asyncio.timeout(WAIT_SECONDS):
        result = await run.result()
    assert (result.stop_reason, result.text) == ("error", "looking")
    assert result.diagnostic == "model request timed out after 0.05 s"


async def test_a_diagnostic_names_facts_and_never_the_errors_text() -> None:
    """P14, behaviour §1.3: class, status, model and waiting time; no body, no key, no prompt."""
    error = ModelHTTPError.for_category(
        ModelRateLimitError,
        status_code=429,
        model_name=SECRET,
        body={"message": SECRET},
        headers={"retry-after": "3", "authorization": SECRET},
    )
    result = await drive_child(Script(error))
    assert result.diagnostic == (
        "model request failed "
        "(error: ModelRateLimitError; HTTP status: 429; model: function:scripted; retry after: 3 s)"
    )


@pytest.mark.parametrize(
    "error",
    [
        ModelAPIError(SECRET, SECRET, body=SECRET),
        ContentFilterError(SECRET, body=SECRET),
        ValueError(SECRET),
        ExceptionGroup(SECRET, [ValueError(SECRET), ModelHTTPError(500, SECRET, SECRET)]),
    ],
)
async def test_no_secret_reaches_the_result_of_a_failed_child(error: Exception) -> None:
    """P14: foreign error texts quote requests and responses."""
    result = await drive_child(Script(error))
    assert result.stop_reason != "completed"
    assert SECRET not in result.to_json()
    assert "\n" not in str(result.diagnostic)


# --- what tools do


async def test_a_failing_tool_is_told_to_the_model() -> None:
    """design §9: a tool's exception ends neither the child nor the worker."""
    script = Script(use(("refuse", {"key": "a"})), say("it is read-only"))
    drive = FakeDrive(tools=Notebook().tools)
    result = await drive_child(script, drive)
    (returned,) = tool_returns(script.requests[1])
    assert (returned.outcome, returned.content) == ("failed", "OSError: a is read-only")
    assert drive.events[3].data["outcome"] == "failed"
    assert result.text == "it is read-only"


@pytest.mark.parametrize("error", [SystemExit(1), asyncio.CancelledError(), RuntimeError("x" * 100_000)])
async def test_no_exception_of_a_tool_ends_the_child(error: BaseException) -> None:
    """field fault 23: not an exit, not a stray cancel, not an enormous message."""

    async def explode() -> str:
        raise error

    script = Script(use(("explode", {})), say("went on"))
    result = await drive_child(script, FakeDrive(tools=FakeTools([explode])))
    (returned,) = tool_returns(script.requests[1])
    assert returned.outcome == "failed"
    assert len(str(returned.content)) <= MAX_TOOL_ERROR_CHARACTERS + 1
    assert result.text == "went on"


async def test_a_result_without_a_json_form_is_a_failed_result() -> None:
    """field fault 23: an object holding a lock cannot be kept; the model learns that the tool ran."""

    async def lock() -> object:
        return threading.Lock()

    script = Script(use(("lock", {})), say("went on"))
    await drive_child(script, FakeDrive(tools=FakeTools([lock])))
    assert "cannot be written as JSON" in str(tool_returns(script.requests[1])[0].content)


@pytest.mark.parametrize("value", ["a\udcffb", float("nan"), datetime(2030, 1, 2), b"\xff", None])
async def test_odd_values_can_be_kept(value: object) -> None:
    """field fault 23: surrogates from file names, not-a-number, dates and bytes reach the transcript as JSON."""

    async def odd() -> object:
        return value

    drive = FakeDrive(tools=FakeTools([odd]))
    result = await drive_child(Script(use(("odd", {})), say("went on")), drive)
    assert result.text == "went on"
    assert drive.events[3].data["outcome"] == "success"


async def test_a_tool_that_returns_nothing_has_returned() -> None:
    """P7: None is a result like any other, for the model and for whoever resumes behind it."""
    ran: list[str] = []

    async def nothing() -> None:
        ran.append("nothing")

    drive = FakeDrive(tools=FakeTools([nothing]))
    script = Script(use(("nothing", {})), say("done"))
    await drive_child(script, drive)
    await drive_child(script, drive.resumed_at(4))
    for request in script.requests[1:]:
        (returned,) = tool_returns(request)
        assert (returned.content, returned.outcome) == (None, "success")
    assert ran == ["nothing"]


async def test_bad_arguments_run_nothing_and_are_written_down() -> None:
    """facts-core §D trap 4: a call refused by validation is not announced, its answer is recorded."""
    notebook = Notebook()
    drive = FakeDrive(tools=notebook.tools)
    await drive_child(Script(use(("write_sync", {"nokey": 1})), say("sorry")), drive)
    assert drive.kinds == ["input", "response", "tool_result", "response"]
    assert drive.events[2].data["outcome"] == "retried"
    assert not notebook.ran


async def test_a_tool_that_needs_approval_is_rejected() -> None:
    """behaviour §4.13: a delegated child can ask nobody."""
    ran: list[str] = []

    def dangerous() -> str:
        ran.append("dangerous")
        return "boom"

    drive = FakeDrive(tools=ApprovalTools(dangerous))
    script = Script(use(("dangerous", {})), say("not allowed"))
    await drive_child(script, drive)
    assert not ran
    assert tool_returns(script.requests[1])[0].content == NEEDS_APPROVAL
    resumed = drive.resumed_at(2)
    await drive_child(script, resumed)
    assert not ran


class ApprovalTools(FakeTools):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__([function])

    def toolsets(self) -> Sequence[object]:
        toolset: FunctionToolset[None] = FunctionToolset()
        toolset.add_function(self.functions[0], takes_ctx=False, requires_approval=True)
        return [toolset]


# --- resume


def resumable_script() -> Script:
    return Script(
        use(("write_sync", {"key": "a"}), ("write_async", {"key": "b"}), ("refuse", {"key": "c"})),
        use(("write_sync", {"bad": "arguments"}), ("ask_again", {"key": "d"})),
        use(("write_async", {"key": "e"})),
        say("all done"),
    )


RESUMABLE_EVENTS = 16


async def test_the_resumable_script_has_the_length_the_next_test_cuts() -> None:
    """Guards the parametrisation below."""
    drive = FakeDrive(tools=Notebook().tools)
    await drive_child(resumable_script(), drive)
    assert len(drive.events) == RESUMABLE_EVENTS


@pytest.mark.parametrize("length", range(1, RESUMABLE_EVENTS + 1))
async def test_a_child_resumes_from_every_crash_point(length: int) -> None:
    """P7, design §7: nothing announced runs again, what never ran runs once, and the history stays consistent."""
    notebook = Notebook()
    drive = FakeDrive(tools=notebook.tools)
    await drive_child(resumable_script(), drive)
    survived = drive.resumed_at(length)
    announced = Counter(str(event.data["tool_call_id"]) for event in survived.events if event.kind == "tool_call")
    notebook.ran.clear()

    script = resumable_script()
    result = await drive_child(script, survived)

    assert (result.stop_reason, result.text) == ("completed", "all done")
    assert max(notebook.ran.values(), default=0) <= 1
    # Five calls have an effect; each is announced once over both attempts and runs only in the one that announced it.
    assert notebook.ran.total() == 5 - announced.total()
    assert survived.kinds.count("tool_call") == 5
    assert survived.kinds.count("response") == 4
    assert_consistent(fold(survived.events, prompt="do it").history())
    for messages in script.requests:
        assert_consistent(messages)


@pytest.mark.parametrize("length", range(1, RESUMABLE_EVENTS + 1))
async def test_usage_carries_on_over_a_crash(length: int) -> None:
    """facts-core §D trap 7: a resumed child counts what its earlier attempt spent."""
    drive = FakeDrive(tools=Notebook().tools)
    await drive_child(resumable_script(), drive)
    result = await drive_child(resumable_script(), drive.resumed_at(length))
    assert result.usage is not None
    assert (result.usage.requests, result.usage.input_tokens) == (4, 40)


async def test_a_call_of_unknown_effect_gets_a_durable_result() -> None:
    """P7, field fault 22: written down before the next request, told to the model, the tool not run."""
    notebook = Notebook()
    drive = FakeDrive(tools=notebook.tools)
    script = Script(use(("write_sync", {"key": "a"})), say("done"))
    await drive_child(script, drive)
    notebook.ran.clear()
    survived = drive.resumed_at(3)
    await drive_child(script, survived)
    assert survived.kinds == ["input", "response", "tool_call", "tool_result", "response"]
    assert survived.events[3].data["effect"] == "unknown"
    assert tool_returns(script.requests[-1])[0].content == UNKNOWN_EFFECT
    assert not notebook.ran


async def test_a_finished_conversation_is_not_asked_again() -> None:
    """facts-core §D trap 5: a final answer without a settlement is returned without a model request."""
    drive = FakeDrive()
    await drive_child(Script(say("hello", "length")), drive)
    script = Script()
    result = await drive_child(script, drive.resumed_at(2))
    assert (result.stop_reason, result.text, script.requests) == ("max-tokens", "hello", [])


@pytest.mark.parametrize("length", [2, 3, 4])
async def test_a_child_resumes_although_its_tools_are_gone(length: int) -> None:
    """design §7: a deployment may have dropped a tool meanwhile."""
    drive = FakeDrive(tools=Notebook().tools)
    script = Script(use(("write_sync", {"key": "a"})), say("done"))
    await drive_child(script, drive)
    survived = drive.resumed_at(length)
    survived.tools = FakeTools()
    result = await drive_child(script, survived)
    assert (result.stop_reason, result.text) == ("completed", "done")


async def test_content_a_tool_adds_survives_a_crash() -> None:
    """P7: the result of a finished call is kept whole."""

    async def look() -> ToolReturn[str]:
        return ToolReturn("a picture", content="what the picture shows")

    drive = FakeDrive(tools=FakeTools([look]))
    script = Script(use(("look", {})), say("done"))
    await drive_child(script, drive)
    survived = drive.resumed_at(4)
    await drive_child(script, survived)
    first, second = ([part for message in request for part in message.parts] for request in script.requests[1:])
    assert [type(part) for part in first] == [type(part) for part in second]
    assert [part.content for part in second if isinstance(part, UserPromptPart)] == ["do it", "what the picture shows"]
    assert survived.kinds == drive.kinds


# --- the drive says stop


@pytest.mark.parametrize("allowed", range(7))
async def test_a_kill_ends_the_run_and_nothing_is_written_after_it(allowed: int) -> None:
    """P5: whichever step the drive refuses, no later effect starts and no later event appears."""
    notebook = Notebook()
    whole = FakeDrive(tools=notebook.tools)
    script = Script(use(("write_sync", {"key": "a"}), ("write_sync", {"key": "b"})), say("done"))
    await drive_child(script, whole)
    assert whole.calls == 8
    notebook.ran.clear()
    drive = FakeDrive(tools=notebook.tools, refuse_after=allowed)
    result = await drive_child(script, drive)
    assert result.stop_reason == "aborted"
    # At most: a call announced right before its sibling was refused may be cancelled before its thread begins.
    assert notebook.ran.total() <= drive.kinds.count("tool_call")
    assert len(drive.events) <= 1 + allowed


async def test_a_kill_during_a_tool_stops_before_the_next_effect() -> None:
    """P5: the tool's result is refused, no further tool and no model request follow."""
    drive = FakeDrive()

    async def slow() -> str:
        drive.refuse_after = drive.calls
        return "done"

    drive.tools = FakeTools([slow])
    script = Script(use(("slow", {})), say("done"))
    assert (await drive_child(script, drive)).stop_reason == "aborted"
    assert (drive.kinds, len(script.requests)) == (["input", "response", "tool_call"], 1)


async def test_a_run_taken_over_by_another_worker_has_no_result_here() -> None:
    """P2: `stale` comes out unchanged; the end is not ours to write."""
    drive = FakeDrive(refuse_after=1, stop_reason="stale")
    with pytest.raises(DriveStopped) as caught:
        await drive_child(Script(say("done")), drive)
    assert caught.value.reason == "stale"


async def test_a_release_lets_a_running_call_report_first() -> None:
    """protocol §4: what runs at a shutdown ends and is recorded; only what has not begun is left to the next worker."""
    drive = FakeDrive(stop_reason="release")
    go_on = asyncio.Event()

    class ReleasingDrive(FakeDrive):
        async def announce(self, call: Any = None) -> None:
            if call is not None and "response" in self.kinds and "tool_call" in self.kinds:
                go_on.set()
                raise DriveStopped("release")
            await super().announce(call)

    async def first() -> str:
        await go_on.wait()
        return "first"

    async def second() -> str:
        return "second"

    drive = ReleasingDrive(tools=FakeTools([first, second]))
    with pytest.raises(DriveStopped) as caught:
        await drive_child(Script(use(("first", {}), ("second", {})), say("done")), drive)
    assert caught.value.reason == "release"
    assert drive.kinds == ["input", "response", "tool_call", "tool_result"]


async def test_a_fault_of_the_drive_is_raised_and_not_a_result() -> None:
    """behaviour §1.2: an infrastructure fault rejects; it is not the child's failure."""
    drive = FakeDrive(refuse_after=1, fail_with=OperatorError("no redis"))
    with pytest.raises(OperatorError, match="no redis"):
        await drive_child(Script(say("hello")), drive)


# --- cancel and dispose


async def test_a_cancel_aborts_with_the_text_so_far() -> None:
    """behaviour §2.10: aborted, partial text kept."""
    started = asyncio.Event()

    async def endless() -> str:
        started.set()
        await asyncio.Event().wait()
        return "never"

    drive = FakeDrive(tools=FakeTools([endless]))
    first = ModelResponse(parts=[TextPart("looking"), ToolCallPart("endless", {}, "c1")])
    run = await start(Script(first), drive)
    async with asyncio.timeout(WAIT_SECONDS):
        await started.wait()
        await run.cancel("killed")
        await run.cancel("killed again")
        result = await run.result()
    await run.dispose()
    assert (result.stop_reason, result.text, result.diagnostic) == ("aborted", "looking", None)
    assert drive.kinds == ["input", "response", "tool_call"]


async def test_a_cancel_before_the_first_step_aborts() -> None:
    """behaviour §2.10: after publication a child always has a result."""
    run = await start(Script(say("hello")), FakeDrive())
    await run.cancel("killed")
    assert (await run.result()).stop_reason == "aborted"
    await run.dispose()


async def test_a_cancel_after_the_end_changes_nothing() -> None:
    """behaviour §2.10: already completed stays completed."""
    run = await start(Script(say("hello")), FakeDrive())
    assert (await run.result()).stop_reason == "completed"
    await run.cancel("too late")
    assert (await run.result()).stop_reason == "completed"
    await run.dispose()


async def test_a_cancel_lets_a_write_that_began_end() -> None:
    """facts-core §F: a write cut in two leaves its sequence number open, and the settlement is refused."""
    drive = FakeDrive()
    drive.give("do it")
    drive.hold = asyncio.Event()
    run = await start(Script(say("hello")), drive)
    async with asyncio.timeout(WAIT_SECONDS):
        await drive.held.wait()
        await run.cancel("killed")
        drive.hold.set()
        result = await run.result()
    await run.dispose()
    assert (result.stop_reason, drive.calls) == ("aborted", 1)


async def test_a_synchronous_tool_does_not_hold_the_result_of_a_cancel() -> None:
    """P5, behaviour §11.22: its thread goes on, the result does not wait for it, and its own is not written."""
    started, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def stubborn() -> str:
        started.set()
        may_end.wait(WAIT_SECONDS)
        ended.set()
        return "late"

    drive = FakeDrive(tools=FakeTools([stubborn]))
    run = await start(Script(use(("stubborn", {})), say("done")), drive)
    async with asyncio.timeout(WAIT_SECONDS):
        await asyncio.to_thread(started.wait, WAIT_SECONDS)
        await run.cancel("killed")
        result = await run.result()
        await run.dispose()
        assert not ended.is_set()
        may_end.set()
        await asyncio.to_thread(ended.wait, WAIT_SECONDS)
    assert result.stop_reason == "aborted"
    assert drive.kinds == ["input", "response", "tool_call"]


async def test_a_tool_that_swallows_the_cancel_holds_the_result_for_the_grace_alone() -> None:
    """P5, behaviour §11.22: a cancel that does nothing must not stall the teardown; a late result is not written."""
    started, may_end = asyncio.Event(), asyncio.Event()

    async def stubborn() -> str:
        started.set()
        while not may_end.is_set():
            with suppress(asyncio.CancelledError):
                await may_end.wait()
        return "late"

    drive = FakeDrive(tools=FakeTools([stubborn]))
    run = await start(Script(use(("stubborn", {})), say("done")), drive)
    run._cancel_grace_seconds = 0.01  # pyright: ignore[reportPrivateUsage]  # the wait is a constant in production
    run._dispose_timeout_seconds = 0.01  # pyright: ignore[reportPrivateUsage]  # as above
    async with asyncio.timeout(WAIT_SECONDS):
        await started.wait()
        await run.cancel("killed")
        result = await run.result()
        await run.dispose()
        await run.dispose()
        assert not run._task.done()  # pyright: ignore[reportPrivateUsage]  # that it was left behind is the claim
        may_end.set()
        await asyncio.wait({run._task})  # pyright: ignore[reportPrivateUsage]  # nothing public tells that it is gone
    assert result.stop_reason == "aborted"
    assert drive.kinds == ["input", "response", "tool_call"]


async def test_dispose_alone_ends_the_child() -> None:
    """behaviour §1.2: dispose cancels leftover work and is idempotent."""
    started = asyncio.Event()

    async def endless() -> str:
        started.set()
        await asyncio.Event().wait()
        return "never"

    run = await start(Script(use(("endless", {}))), FakeDrive(tools=FakeTools([endless])))
    async with asyncio.timeout(WAIT_SECONDS):
        await started.wait()
        await run.dispose()
        await run.dispose()
    assert (await run.result()).stop_reason == "aborted"


# --- routes and options


def test_the_declared_capabilities() -> None:
    """behaviour §5.1, the row `spawn`."""
    provider = SpawnProvider("openai:gpt-5-mini")
    capabilities = provider.capabilities
    assert (capabilities.depth_limit, capabilities.tool_filter, capabilities.persona) == (True, True, True)
    assert (capabilities.agent_options, capabilities.prepare_continuable) == (True, True)
    assert capabilities.output_schema
    assert (provider.inherits_parent_context, provider.resumable, provider.name) == (False, True, "spawn")


async def test_request_settings_carry_options_and_bounds() -> None:
    """behaviour §5.6: an explicit option overrides the provider's; every request is bounded; no hidden retries."""
    script = Script(say("x"))
    options = AgentOptions(max_tokens=7, reasoning_effort="high")
    await drive_child(script, None, ask(agent_options=options), max_tokens=99)
    assert script.infos[0].model_settings == {
        "max_tokens": 7,
        "max_retries": 2,
        "request_timeout": 5.0,
        "first_event_timeout": 5.0,
    }


async def test_agent_options_choose_another_model() -> None:
    """behaviour §5.6: the route of the call wins over the provider's."""
    other = Script(say("from the other model"))
    routes = ModelRoutes(custom={"mine": lambda name: other.model})
    options = AgentOptions(model="mine:big")
    result = await drive_child(Script(say("own")), None, ask(agent_options=options), routes=routes)
    assert result.text == "from the other model"


@pytest.mark.parametrize(
    ("model", "options", "error", "words"),
    [
        (None, None, ConfigurationError, ['provider "spawn" has no model']),
        ("openai:x", {"model": "nobody:y"}, ConfigurationError, ['"nobody" is not known', "anthropic", "openai"]),
        ("openai:x", {"reasoning_effort": "ultra"}, ConfigurationError, ['"ultra"', "minimal"]),
        (None, {"model": "x"}, ConfigurationError, ["name no provider"]),
        ("openai:x", None, OperatorError, ['"openai:x"', "OPENAI_API_KEY", "worker"]),
        ("anthropic:x", None, OperatorError, ["ANTHROPIC_API_KEY", "worker"]),
        ("groq:x", None, OperatorError, ["pip install 'pydantic-ai-slim[groq]'"]),
    ],
)
async def test_a_route_that_cannot_be_built_fails_the_start(
    model: str | None,
    options: dict[str, Any] | None,
    error: type[Exception],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P13: names the value and what to do, before anything starts."""
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GROQ_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    request = ask(agent_options=None if options is None else AgentOptions(**options))
    drive = FakeDrive()
    with pytest.raises(error) as caught:
        await SpawnProvider(model).start(request, drive)
    assert all(word in str(caught.value) for word in words)
    assert drive.calls == 0


async def test_a_model_is_built_once_per_loop_and_closed() -> None:
    """field fault 6: connections belong to a loop."""
    routes = ModelRoutes(environ={"MY_KEY": SECRET})
    provider = SpawnProvider("local-model", base_url="http://127.0.0.1:9/v1", api_key_env="MY_KEY", routes=routes)
    route, model = provider._model(None)  # pyright: ignore[reportPrivateUsage]  # no request is to be sent
    assert provider._model(None)[1] is model  # pyright: ignore[reportPrivateUsage]  # as above
    assert (route.name, model.system) == ("openai-compatible:local-model", "openai-compatible")
    assert SECRET not in repr(routes) + repr(route)
    await routes.aclose()
    assert routes.model(route) is not model
    await routes.aclose()


def test_a_key_variable_that_is_not_set_is_named() -> None:
    """P13: which variable, where."""

    async def build() -> None:
        SpawnProvider("m", base_url="http://127.0.0.1:9/v1", api_key_env="NO_SUCH_KEY")._model(None)  # pyright: ignore[reportPrivateUsage]  # as above

    with pytest.raises(OperatorError, match="set NO_SUCH_KEY in the environment of the worker"):
        asyncio.run(build())
