"""The stub server driven through pydantic-ai's real OpenAI and Anthropic models, and the bytes it sends."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from pydantic_ai import Agent
from pydantic_ai.exceptions import (
    ContentFilterError,
    ModelAPIError,
    ModelAuthenticationError,
    ModelConnectionError,
    ModelContextWindowExceededError,
    ModelHTTPError,
    ModelOverloadedError,
    ModelRateLimitError,
    ModelRequestRejectedError,
    ModelServerError,
)
from pydantic_ai.messages import TextPart, ThinkingPart
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.run import AgentRunResult, AgentRunResultEvent

from subagent_tasks.errors import ConfigurationError
from subagent_tasks.testing import serve_stub
from subagent_tasks.testing.script import (
    Failure,
    Finish,
    Script,
    Step,
    call_tool,
    call_tools,
    disconnect,
    fail,
    reply,
    stall,
    wait_for,
)
from subagent_tasks.testing.stub_llm import StubLLM, stub_llm

MakeModel = Callable[[StubLLM], Model[Any]]
RunAgent = Callable[..., Awaitable[AgentRunResult[str]]]


def chat(stub: StubLLM) -> Model[Any]:
    return OpenAIChatModel("gpt-5-mini", provider=OpenAIProvider(base_url=stub.url, api_key="secret-key"))


def responses(stub: StubLLM) -> Model[Any]:
    return OpenAIResponsesModel("gpt-5-mini", provider=OpenAIProvider(base_url=stub.url, api_key="secret-key"))


def anthropic(stub: StubLLM) -> Model[Any]:
    provider = AnthropicProvider(base_url=stub.anthropic_url, api_key="secret-key")
    return AnthropicModel("claude-stub", provider=provider)  # a real name would be deprecated some day


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


every_api = pytest.mark.parametrize("make_model", [chat, responses, anthropic])
both_ways = pytest.mark.parametrize("run", [whole, streamed])


def read_file(path: str) -> str:
    return f"content of {path}"


@pytest.fixture
def stub() -> Iterator[StubLLM]:
    with stub_llm() as server:
        yield server


@asynccontextmanager
async def agent_for(make_model: MakeModel, stub: StubLLM) -> AsyncGenerator[Agent[None, str]]:
    agent = Agent(make_model(stub), tools=[read_file], model_settings={"max_retries": 0}, instructions="be brief")
    async with agent:
        yield agent


@every_api
@both_ways
@pytest.mark.parametrize(
    ("finish", "reason"), [("stop", "stop"), ("length", "length"), ("content_filter", "content_filter")]
)
async def test_ending_arrives_as_its_finish_reason(
    stub: StubLLM, make_model: MakeModel, run: RunAgent, finish: Finish, reason: str
) -> None:
    """A cut answer is a normal result that only the finish reason tells apart (facts-agents §7.1)."""
    stub.on("x", reply("some partial text", finish=finish))
    async with agent_for(make_model, stub) as agent:
        result = await run(agent, "x")
    assert result.output == "some partial text"
    assert result.response.finish_reason == reason
    assert result.response.state == "complete"
    assert result.usage.unmeasured_requests == 0


@every_api
@both_ways
async def test_refusal_is_a_content_filter_error(stub: StubLLM, make_model: MakeModel, run: RunAgent) -> None:
    """Each API says it in its own place (facts-agents §1.5)."""
    stub.on("x", reply("I will not", finish="refusal"))
    async with agent_for(make_model, stub) as agent:
        with pytest.raises(ContentFilterError) as caught:
            await run(agent, "x")
    assert "I will not" in str(caught.value.body)


@every_api
@both_ways
async def test_failure_on_the_models_side_is_a_server_error(
    stub: StubLLM, make_model: MakeModel, run: RunAgent
) -> None:
    """`response.failed`, an error event, or a 500."""
    stub.on("x", reply("some partial text", finish="error"))
    async with agent_for(make_model, stub) as agent:
        with pytest.raises(ModelServerError):
            await run(agent, "x")


@every_api
@both_ways
async def test_tool_calls_and_their_results_make_the_round_trip(
    stub: StubLLM, make_model: MakeModel, run: RunAgent
) -> None:
    """Two calls in one message, then the reply that follows in the script (design §4)."""
    both = call_tools(call_tool("read_file", {"path": "a"}), call_tool("read_file", {"path": "b"}), text="Both.")
    stub.on("search", [both, reply("found it")])
    async with agent_for(make_model, stub) as agent:
        result = await run(agent, "search")
    assert result.output == "found it"
    assert result.usage.tool_calls == 2
    last = stub.seen[-1]
    assert [message.text for message in last.messages[-2:]] == ["content of a", "content of b"]
    assert last.messages[-3].text == "Both."
    assert [call.call_id for call in last.messages[-3].calls] == ["call_1_1", "call_1_2"]
    assert stub.requests == 2


@every_api
@both_ways
async def test_next_turn_meets_its_own_rule(stub: StubLLM, make_model: MakeModel, run: RunAgent) -> None:
    """The newest user message decides, whatever the history holds."""
    stub.on("one", [call_tool("read_file", {"path": "a"}), reply("first")])
    stub.on("two", reply("second"))
    async with agent_for(make_model, stub) as agent:
        first = await run(agent, "one")
        second = await run(agent, "two", message_history=first.all_messages())
    assert (first.output, second.output) == ("first", "second")


@every_api
@both_ways
async def test_reasoning_comes_before_the_text(stub: StubLLM, make_model: MakeModel, run: RunAgent) -> None:
    """Each API has its own shape for it."""
    stub.on("x", reply("so", reasoning="let me think"))
    async with agent_for(make_model, stub) as agent:
        parts = (await run(agent, "x")).response.parts
    assert [type(part) for part in parts] == [ThinkingPart, TextPart]
    assert isinstance(parts[0], ThinkingPart)
    assert parts[0].content == "let me think"


@every_api
@both_ways
async def test_usage_is_the_scripts(stub: StubLLM, make_model: MakeModel, run: RunAgent) -> None:
    """Ready-made stubs report 0 here (facts-agents §4.1)."""
    stub.on("x", reply("so", usage={"input_tokens": 11, "output_tokens": 5}))
    async with agent_for(make_model, stub) as agent:
        usage = (await run(agent, "x")).usage
    assert (usage.input_tokens, usage.output_tokens) == (11, 5)


@every_api
@both_ways
@pytest.mark.parametrize(
    ("step", "category"),
    [
        (fail(400, error_code="context_length_exceeded"), ModelContextWindowExceededError),
        (fail(401), ModelAuthenticationError),
        (fail(429, retry_after=3), ModelRateLimitError),
        (fail(500), ModelServerError),
        (fail(529), ModelOverloadedError),
    ],
)
async def test_http_error_is_understood_by_the_client(
    stub: StubLLM, make_model: MakeModel, run: RunAgent, step: Failure, category: type[ModelAPIError]
) -> None:
    """Status, body shape and Retry-After are the vendor's (facts-agents §1.4)."""
    stub.on("x", step)
    async with agent_for(make_model, stub) as agent:
        with pytest.raises(category) as caught:
            await run(agent, "x")
    assert isinstance(caught.value, ModelHTTPError)
    assert (caught.value.status_code, caught.value.retry_after) == (step.status, step.retry_after)


@every_api
async def test_sdk_retry_gets_the_next_step(stub: StubLLM, make_model: MakeModel) -> None:
    """A client that tries again by itself gets past the failure."""
    stub.on("x", [fail(429, retry_after=0.01), reply("ok")])
    async with agent_for(make_model, stub) as agent:
        assert (await whole(agent, "x", model_settings={"max_retries": 1})).output == "ok"
    assert stub.requests == 2


@every_api
@both_ways
@pytest.mark.parametrize("step", [disconnect(), disconnect(after="partial text")])
async def test_disconnect_is_a_connection_error(
    stub: StubLLM, make_model: MakeModel, run: RunAgent, step: Step
) -> None:
    """Before the answer and in the middle of it."""
    stub.on("x", step)
    async with agent_for(make_model, stub) as agent:
        with pytest.raises(ModelConnectionError):
            await run(agent, "x")


async def test_chat_stream_without_a_last_event_looks_like_success(stub: StubLLM) -> None:
    """Only the unmeasured request gives it away (facts-agents §7.2)."""
    stub.on("x", disconnect(after="partial text", clean=True))
    async with agent_for(chat, stub) as agent:
        result = await streamed(agent, "x")
    assert (result.output, result.response.finish_reason) == ("partial text", "stop")
    assert result.usage.unmeasured_requests == 1


@every_api
@both_ways
@pytest.mark.parametrize("step", [stall(), stall(after="partial text")])
async def test_stall_ends_when_the_server_stops(make_model: MakeModel, run: RunAgent, step: Step) -> None:
    """It accepts, never answers, and holds nobody up at the end."""
    with stub_llm() as stub:
        stub.on("x", step)
        async with agent_for(make_model, stub) as agent:
            running = asyncio.ensure_future(run(agent, "x"))
            await until(lambda: stub.requests == 1)
            assert not running.done()
            await asyncio.to_thread(stub.stop)
            with pytest.raises(ModelConnectionError):
                await asyncio.wait_for(running, 5)


@both_ways
async def test_held_request_is_counted_and_released_by_its_event(stub: StubLLM, run: RunAgent) -> None:
    """As with `ScriptedModel`; the event is the test's own."""
    event = asyncio.Event()
    stub.on("x", [wait_for(event), reply("released")])
    async with agent_for(chat, stub) as agent:
        running = asyncio.ensure_future(run(agent, "x"))
        await until(lambda: stub.requests == 1)
        assert not running.done()
        event.set()
        assert (await asyncio.wait_for(running, 5)).output == "released"


@every_api
async def test_unscripted_request_is_rejected_by_name(stub: StubLLM, make_model: MakeModel) -> None:
    """The client's error says which message had no rule."""
    stub.on("hello", reply("hi"))
    async with agent_for(make_model, stub) as agent:
        with pytest.raises(ModelRequestRejectedError, match="'goodbye'"):
            await whole(agent, "goodbye")


@every_api
async def test_request_is_recorded_without_credentials(stub: StubLLM, make_model: MakeModel) -> None:
    """Bodies are compared by prefix tests (P12); keys are nobody's business (P14)."""
    stub.on("x", reply("ok"))
    async with agent_for(make_model, stub) as agent:
        await whole(agent, "please x", model_settings={"max_tokens": 77})
    (seen,) = stub.seen
    assert (seen.instructions, seen.tools, seen.prompt) == ("be brief", ("read_file",), "please x")
    assert 77 in seen.settings.values()
    assert stub.bodies == [seen.raw]
    assert stub.headers[0]["content-type"] == "application/json"
    assert "secret-key" not in json.dumps(stub.headers)


async def test_two_hundred_requests_at_once(stub: StubLLM) -> None:
    """As many children may wait for the model together as a benchmark starts."""
    event = threading.Event()
    stub.on("x", [wait_for(event), reply("ok")])

    def ask() -> str:
        connection = http.client.HTTPConnection("127.0.0.1", int(stub.anthropic_url.rpartition(":")[2]), timeout=5)
        try:
            return str(post(connection, "/v1/chat/completions", chat_body("x"))["choices"][0]["message"]["content"])
        finally:
            connection.close()

    with ThreadPoolExecutor(200) as pool:
        asking = [pool.submit(ask) for _ in range(200)]
        await until(lambda: stub.requests == 200)
        event.set()
        answers = {future.result(5) for future in asking}
    assert answers == {"ok"}


def test_connection_is_kept_alive(stub: StubLLM, connection: http.client.HTTPConnection) -> None:
    """HTTP/1.1: whole answers, streams and errors leave the connection usable."""
    stub.on("x", reply("ok"))
    assert post(connection, "/v1/chat/completions", chat_body("x"))["object"] == "chat.completion"
    opened = connection.sock
    assert events(connection, "/v1/chat/completions", chat_body("x"))[-1] == (None, "[DONE]")
    assert "error" in post(connection, "/v1/chat/completions", chat_body("y"))
    assert "error" in post(connection, "/v1/nothing", {})
    assert connection.sock is opened


def test_chat_stream_gives_usage_only_when_asked(stub: StubLLM, connection: http.client.HTTPConnection) -> None:
    """The usage chunk has no choices and comes last (OpenAI `stream_options`)."""
    stub.on("x", reply("ok"))
    plain = events(connection, "/v1/chat/completions", chat_body("x"))
    assert all("usage" not in data for _, data in plain)
    asked = events(connection, "/v1/chat/completions", chat_body("x") | {"stream_options": {"include_usage": True}})
    assert json.loads(asked[-2][1])["choices"] == []
    assert json.loads(asked[-2][1])["usage"]["total_tokens"] > 0


@pytest.mark.parametrize(
    ("finish", "terminal", "reason"),
    [
        ("stop", "response.completed", None),
        ("refusal", "response.completed", None),
        ("length", "response.incomplete", {"reason": "max_output_tokens"}),
        ("content_filter", "response.incomplete", {"reason": "content_filter"}),
        ("error", "response.failed", None),
    ],
)
def test_responses_stream_ends_in_its_terminal_event(
    stub: StubLLM,
    connection: http.client.HTTPConnection,
    finish: Finish,
    terminal: str,
    reason: dict[str, str] | None,
) -> None:
    """The event, not only the status in it, differs (facts-agents §4.1); every event fits the SDK's type."""
    stub.on("x", reply("some text", finish=finish, reasoning="hm"))
    sent = events(connection, "/v1/responses", {"model": "m", "input": "x"})
    parsed = [json.loads(data) for _, data in sent]
    assert [event["sequence_number"] for event in parsed] == list(range(len(parsed)))
    assert [name for name, _ in sent] == [event["type"] for event in parsed]
    assert parsed[-1]["type"] == terminal
    assert parsed[-1]["response"]["incomplete_details"] == reason
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for event in parsed:
        adapter.validate_python(event)


def test_responses_stream_adds_up_to_the_whole_answer(stub: StubLLM, connection: http.client.HTTPConnection) -> None:
    """Streamed and not, the answer holds the same; both fit the SDK's type."""
    stub.on("x", call_tool("t", {"a": 1}, text="First.", call_id="c"))
    whole_answer = post(connection, "/v1/responses", {"model": "m", "input": "x"})
    final = json.loads(events(connection, "/v1/responses", {"model": "m", "input": "x"})[-1][1])["response"]
    Response.model_validate(whole_answer)
    assert [item["type"] for item in final["output"]] == ["message", "function_call"]
    for answer in (final, whole_answer):
        for part in (answer, *answer["output"]):
            part.pop("id")
        answer.pop("created_at")
    assert final == whole_answer


def test_reference_to_an_earlier_response_is_rejected(stub: StubLLM, connection: http.client.HTTPConnection) -> None:
    """The stub reads the conversation off the request, so it must all be there."""
    stub.on("x", reply("ok"))
    body = {"model": "m", "input": "x", "previous_response_id": "resp_1"}
    assert "whole input" in post(connection, "/v1/responses", body)["error"]["message"]


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (reply("a"), "end_turn"),
        (reply("a", finish="length"), "max_tokens"),
        (reply("a", finish="refusal"), "refusal"),
        (call_tool("t", {}), "tool_use"),
    ],
)
def test_anthropic_stream_ends_in_its_stop_reason(
    stub: StubLLM, connection: http.client.HTTPConnection, step: Step, reason: str
) -> None:
    """`message_delta` carries it, `message_stop` follows."""
    stub.on("x", step)
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    sent = events(connection, "/v1/messages?beta=true", body)
    assert sent[0][0] == "message_start"
    assert json.loads(sent[-2][1])["delta"]["stop_reason"] == reason
    assert json.loads(sent[-2][1])["usage"]["output_tokens"] > 0
    assert sent[-1][0] == "message_stop"


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "invalid_request_error"),
        ("/v1/responses", {"input": "x"}, "invalid_request_error"),
        ("/messages", {"messages": [{"role": "user", "content": "x"}]}, "authentication_error"),
    ],
)
def test_error_body_has_the_vendors_shape(
    stub: StubLLM, connection: http.client.HTTPConnection, path: str, body: dict[str, Any], kind: str
) -> None:
    """OpenAI names the key by its code, Anthropic by its type."""
    stub.on("x", fail(401, message="no such key"))
    answer = post(connection, path, body)
    assert answer["error"]["type"] == kind
    assert answer["error"]["message"] == "no such key"


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff"])
def test_body_that_is_no_object_is_rejected(stub: StubLLM, connection: http.client.HTTPConnection, body: bytes) -> None:
    """400, and the server goes on."""
    connection.request("POST", "/v1/chat/completions", body)
    answer = connection.getresponse()
    assert (answer.status, "error" in json.loads(answer.read())) == (400, True)
    assert stub.requests == 0


def test_models_are_listed_for_either_vendor(connection: http.client.HTTPConnection) -> None:
    """`GET /v1/models` in OpenAI's shape, or Anthropic's if its version header is there."""
    connection.request("GET", "/v1/models")
    assert json.loads(connection.getresponse().read())["data"][0]["object"] == "model"
    connection.request("GET", "/v1/models", headers={"anthropic-version": "2023-06-01"})
    assert json.loads(connection.getresponse().read())["data"][0]["type"] == "model"


def test_url_before_the_start_is_refused() -> None:
    """The message says how to start it (P13)."""
    with pytest.raises(ConfigurationError, match="with stub_llm"):
        _ = stub_llm().url


def test_stopping_closes_idle_connections_and_the_port() -> None:
    """A kept-alive connection does not hold the server up, and stopping twice is fine."""
    with stub_llm() as stub:
        stub.on("x", reply("ok"))
        port = int(stub.anthropic_url.rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        post(connection, "/v1/chat/completions", chat_body("x"))
        stub.stop()
        assert connection.sock is not None
        assert connection.sock.recv(1) == b""
        connection.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    assert stub.requests == 1


def test_stub_runs_as_a_process_of_its_own(tmp_path: Path) -> None:
    """Real worker processes are driven by a script file; the first line printed is the URL."""
    script = Script()
    script.on("search", [call_tool("t", {}), reply("from afar")])
    (tmp_path / "script.json").write_text(script.to_json())
    command = [sys.executable, "-m", "subagent_tasks.testing.serve_stub", "--script", str(tmp_path / "script.json")]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            connection = http.client.HTTPConnection("127.0.0.1", int(url.split(":")[2].split("/")[0]), timeout=5)
            answer = post(connection, "/v1/chat/completions", chat_body("search"))
            connection.close()
        finally:
            process.terminate()
        assert process.wait(5) == 0
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{}", "no script as Script.to_json writes it: rules: Field required"),
        ("{", "no script as Script.to_json writes it: Invalid JSON"),
        ('{"rules": [{"contains": "x"}, {"contains": "y"}]}', "rules.0.steps: Field required (and 1 more)"),
        ('{"rules": [{"contains": "x", "steps": []}]}', "The rule for 'x' has no steps"),
    ],
)
def test_script_file_that_cannot_be_used_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, reason: str
) -> None:
    """An operator's mistake is named before a port is opened (P13)."""
    path = tmp_path / "script.json"
    if text is not None:
        path.write_text(text)
    assert serve_stub.main(["--script", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"Error: {path}: ")
    assert reason in told
    assert told.count("\n") == 1


def test_the_stubs_usage_names_its_own_command(capsys: pytest.CaptureFixture[str]) -> None:
    """What it shows can be typed."""
    with pytest.raises(SystemExit):
        serve_stub.main([])
    assert "usage: python -m subagent_tasks.testing.serve_stub" in capsys.readouterr().err


@pytest.fixture
def connection(stub: StubLLM) -> Iterator[http.client.HTTPConnection]:
    opened = http.client.HTTPConnection("127.0.0.1", int(stub.anthropic_url.rpartition(":")[2]), timeout=5)
    yield opened
    opened.close()


def chat_body(prompt: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": prompt}]}


def post(connection: http.client.HTTPConnection, path: str, body: dict[str, Any]) -> dict[str, Any]:
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    answer: dict[str, Any] = json.loads(connection.getresponse().read())
    return answer


def events(connection: http.client.HTTPConnection, path: str, body: dict[str, Any]) -> list[tuple[str | None, str]]:
    connection.request("POST", path, json.dumps(body | {"stream": True}), {"content-type": "application/json"})
    text = connection.getresponse().read().decode()
    found: list[tuple[str | None, str]] = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields.get("event"), fields["data"]))
    return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110  # the server has no event to wait for
            await asyncio.sleep(0.001)
