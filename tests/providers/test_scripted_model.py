"""`ScriptedModel` driven through pydantic-ai's own agent, streamed and not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from pydantic_ai import Agent
from pydantic_ai.exceptions import (
    ContentFilterError,
    ModelAPIError,
    ModelAuthenticationError,
    ModelConnectionError,
    ModelContextWindowExceededError,
    ModelHTTPError,
    ModelOverloadedError,
    ModelQuotaExceededError,
    ModelRateLimitError,
    ModelServerError,
    ModelUnavailableError,
)
from pydantic_ai.messages import ModelRequest, ModelResponse, TextPart, ThinkingPart, UserPromptPart
from pydantic_ai.run import AgentRunResult, AgentRunResultEvent

from subagent_tasks.testing.script import (
    Failure,
    Finish,
    Script,
    Step,
    UnscriptedRequest,
    call_tool,
    call_tools,
    disconnect,
    fail,
    reply,
    stall,
    wait_for,
)
from subagent_tasks.testing.scripted_model import ScriptedModel

RunAgent = Callable[..., Awaitable[AgentRunResult[str]]]


async def whole(agent: Agent[None, str], prompt: str, **options: Any) -> AgentRunResult[str]:
    return await agent.run(prompt, **options)


async def streamed(agent: Agent[None, str], prompt: str, **options: Any) -> AgentRunResult[str]:
    result: AgentRunResult[str] | None = None
    async with agent.run_stream_events(prompt, **options) as events:
        async for event in events:
            if isinstance(event, AgentRunResultEvent):
                result = event.result
    assert result is not None
    return result


both_ways = pytest.mark.parametrize("run", [whole, streamed])


def read_file(path: str) -> str:
    return f"content of {path}"


def scripted(prompt: str, step: Step | list[Step]) -> tuple[ScriptedModel, Agent[None, str]]:
    model = ScriptedModel()
    model.on(prompt, step)
    return model, Agent(model, tools=[read_file])


@both_ways
async def test_design_example(run: RunAgent) -> None:
    """The testing snippet of design §4 works as written."""
    model = ScriptedModel()
    model.on("hello", reply("hi there"))
    model.on("search", [call_tool("read_file", {"path": "a"}), reply("found it")])
    agent = Agent(model, tools=[read_file])
    assert (await run(agent, "say hello")).output == "hi there"
    assert model.requests == 1
    assert (await run(agent, "search for it")).output == "found it"
    assert model.seen[2].messages[-1].text == "content of a"


@both_ways
@pytest.mark.parametrize(
    ("finish", "reason"),
    [("stop", "stop"), ("length", "length"), ("content_filter", "content_filter"), ("error", "error")],
)
async def test_ending_with_text_is_a_result_with_its_finish_reason(run: RunAgent, finish: Finish, reason: str) -> None:
    """pydantic-ai raises for none of them: the runner must look (facts-agents §1.5)."""
    _, agent = scripted("x", reply("some partial text", finish=finish))
    result = await run(agent, "x")
    assert result.output == "some partial text"
    assert result.response.finish_reason == reason


@both_ways
async def test_refusal_is_a_content_filter_error(run: RunAgent) -> None:
    """A refusal has no text to return (facts-agents §1.5)."""
    _, agent = scripted("x", reply("I will not", finish="refusal"))
    with pytest.raises(ContentFilterError):
        await run(agent, "x")


@both_ways
async def test_tool_calls_of_one_message_all_run(run: RunAgent) -> None:
    """Several calls travel in one response, after its text."""
    both = call_tools(call_tool("read_file", {"path": "a"}), call_tool("read_file", {"path": "b"}), text="Both.")
    model, agent = scripted("x", [both, reply("done")])
    result = await run(agent, "x")
    response = result.all_messages()[1]
    assert isinstance(response, ModelResponse)
    assert response.finish_reason == "tool_call"
    assert response.text == "Both."
    assert [message.text for message in model.seen[1].messages[-2:]] == ["content of a", "content of b"]


@both_ways
async def test_reasoning_comes_before_the_text(run: RunAgent) -> None:
    """`reasoning` is a thinking part."""
    _, agent = scripted("x", reply("so", reasoning="let me think"))
    parts = (await run(agent, "x")).response.parts
    assert [type(part) for part in parts] == [ThinkingPart, TextPart]


@both_ways
async def test_usage_is_the_scripts(run: RunAgent) -> None:
    """Tests of accounting fix the numbers."""
    _, agent = scripted("x", reply("so", usage={"input_tokens": 11, "output_tokens": 5}))
    usage = (await run(agent, "x")).usage
    assert (usage.input_tokens, usage.output_tokens, usage.requests) == (11, 5, 1)


async def test_text_is_streamed_in_pieces() -> None:
    """A listener sees deltas, not one block."""
    _, agent = scripted("x", reply("one two three four"))
    async with agent.run_stream("x") as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    assert len(pieces) > 2
    assert "".join(pieces) == "one two three four"


@both_ways
@pytest.mark.parametrize(
    ("step", "category"),
    [
        (fail(401), ModelAuthenticationError),
        (fail(429), ModelRateLimitError),
        (fail(429, error_code="insufficient_quota"), ModelQuotaExceededError),
        (fail(400, error_code="context_length_exceeded"), ModelContextWindowExceededError),
        (fail(500), ModelServerError),
        (fail(503), ModelUnavailableError),
        (fail(529), ModelOverloadedError),
    ],
)
async def test_failure_is_the_error_a_real_model_raises(
    run: RunAgent, step: Failure, category: type[ModelAPIError]
) -> None:
    """Both the category and `ModelHTTPError` catch it (facts-agents §1.4)."""
    _, agent = scripted("x", step)
    with pytest.raises(category) as caught:
        await run(agent, "x")
    assert isinstance(caught.value, ModelHTTPError)
    assert caught.value.status_code == step.status


@both_ways
async def test_rate_limit_says_when_to_come_back(run: RunAgent) -> None:
    """`retry_after` is in seconds."""
    _, agent = scripted("x", [fail(429, retry_after=3), reply("ok")])
    with pytest.raises(ModelRateLimitError) as caught:
        await run(agent, "x", conversation_id="c")
    assert caught.value.retry_after == 3
    assert (await run(agent, "x", conversation_id="c")).output == "ok"


@both_ways
@pytest.mark.parametrize("step", [disconnect(), disconnect(after="partial text")])
async def test_disconnect_is_a_connection_error(run: RunAgent, step: Step) -> None:
    """Before the answer and in the middle of it."""
    _, agent = scripted("x", step)
    with pytest.raises(ModelConnectionError):
        await run(agent, "x")


async def test_stream_that_ends_early_without_error_is_unmeasured() -> None:
    """The trap a runner must notice: text, no finish reason, nothing counted (facts-agents §7.2)."""
    _, agent = scripted("x", disconnect(after="partial text", clean=True))
    result = await streamed(agent, "x")
    assert result.output == "partial text"
    assert result.response.finish_reason is None
    assert result.usage.unmeasured_requests == 1


@both_ways
@pytest.mark.parametrize("step", [stall(), stall(after="partial text")])
async def test_stall_lasts_until_cancelled(run: RunAgent, step: Step) -> None:
    """A stalled model ends with its task, and only then."""
    model, agent = scripted("x", step)
    running = asyncio.ensure_future(run(agent, "x"))
    await until(lambda: model.requests == 1)
    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, 5)


@both_ways
async def test_held_model_is_counted_and_released_by_its_event(run: RunAgent) -> None:
    """A test can know that the child is inside its request, then let it go on (design §4)."""
    event = threading.Event()
    model, agent = scripted("x", [wait_for(event), reply("released")])
    running = asyncio.ensure_future(run(agent, "x"))
    await until(lambda: model.requests == 1)
    assert not running.done()
    event.set()
    assert (await asyncio.wait_for(running, 5)).output == "released"


async def test_history_carried_elsewhere_goes_on_at_the_right_step() -> None:
    """A resumed run meets another instance of the model (P6)."""
    steps: list[Step] = [call_tool("read_file", {"path": "a"}), reply("found it")]
    _, first = scripted("search", steps)
    history = (await first.run("search")).all_messages()[:-1]
    other, second = scripted("search", steps)
    assert (await second.run(message_history=history)).output == "found it"
    assert other.requests == 1


@both_ways
async def test_unscripted_request_reaches_the_test(run: RunAgent) -> None:
    """The failure names the prompt and the rules."""
    _, agent = scripted("hello", reply("hi"))
    with pytest.raises(UnscriptedRequest, match="'goodbye'"):
        await run(agent, "goodbye")


async def test_seen_holds_what_the_request_carried() -> None:
    """Messages, instructions, tools and settings are there for assertions."""
    model, _ = scripted("x", reply("ok"))
    agent = Agent(model, instructions="be brief", tools=[read_file], system_prompt="you are delegated")
    await agent.run(["part x", "and y"], model_settings={"max_tokens": 7}, conversation_id="c1")
    seen = model.seen[0]
    assert [(message.role, message.text) for message in seen.messages] == [
        ("system", "you are delegated"),
        ("user", "part x\nand y"),
    ]
    assert (seen.model, seen.instructions, seen.tools, seen.settings, seen.conversation_id) == (
        "scripted",
        "be brief",
        ("read_file",),
        {"max_tokens": 7},
        "c1",
    )
    (request,) = cast("list[ModelRequest]", seen.raw)
    assert isinstance(request.parts[-1], UserPromptPart)


def test_one_model_serves_several_loops_at_once() -> None:
    """A shared model must not be bound to the loop that met it first (facts-agents §7.3)."""
    script = Script()
    script.on("search", [call_tool("read_file", {"path": "a"}), reply("found it")])
    model = ScriptedModel(script)

    async def many() -> list[str]:
        agent = Agent(model, tools=[read_file])
        results = await asyncio.gather(*(run(agent, "search") for run in (whole, streamed) for _ in range(5)))
        return [result.output for result in results]

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(lambda: asyncio.run(many())) for _ in range(4)]
        outputs = [output for each in running for output in each.result(5)]
    assert outputs == ["found it"] * 40
    assert model.requests == 80


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110  # the model has no event to wait for
            await asyncio.sleep(0.001)
