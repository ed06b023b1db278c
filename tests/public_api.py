"""The public surface as a user writes it: only type-checked (pyright strict), never run.

Every name that the package exports to users stands here, used as it is meant to be. An error that pyright reports here
is one that users would see in their own code.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, assert_never, assert_type

from pydantic import BaseModel, JsonValue
from pydantic_ai.models import Model
from pydantic_ai.models.test import TestModel
from pydantic_ai.tools import Tool
from pydantic_ai.toolsets import FunctionToolset

from broker_config import BrokerSettings, EmbeddedServer, SettingsError, load_settings
from subagent_tasks import (
    AgentOptions,
    BrokerUnavailable,
    CallerError,
    Capabilities,
    ChildRequest,
    ChildResult,
    ConfigurationError,
    Conflict,
    DelegationToolConfig,
    Host,
    JobToolsConfig,
    Notice,
    NoticeInbox,
    RunEnded,
    RunStarted,
    Session,
    SubagentApp,
    SubagentError,
    SubagentFailed,
    SyncHost,
    SyncSession,
    ToolCall,
    ToolDefinition,
    ToolFilter,
    ToolResult,
    TranscriptEvent,
    Unauthorized,
    UnknownJob,
    Usage,
)
from subagent_tasks.errors import (
    ChildFailed,
    DuplicateProvider,
    InvalidArguments,
    LimitReached,
    NoProvider,
    OperatorError,
    ToolError,
    UnsupportedCapability,
    UnsupportedVersion,
)
from subagent_tasks.events import Event, Listener
from subagent_tasks.models.routes import ModelRoutes
from subagent_tasks.protocol.models import Block
from subagent_tasks.providers import ChildTools, Drive, InboxEntry, NewEvent, Provider, Run, SpawnProvider
from subagent_tasks.testing import (
    FakeServer,
    FaultyServer,
    Kit,
    Script,
    ScriptedModel,
    StubLLM,
    WorkerProcess,
    WorkerThread,
    age_lease,
    assert_no_leaked_keys,
    assert_settled,
    call_tool,
    call_tools,
    cut,
    disconnect,
    end_outage,
    fail,
    fake_app,
    freeze_server,
    kill_worker,
    lose_reply,
    refuse,
    reply,
    restart_server,
    stall,
    stub_llm,
    wait_for,
    wait_until,
)

# ------------------------------------------------------------------ the declaration


def read_file(path: str) -> str:
    """Read a text file."""
    return Path(path).read_text(encoding="utf-8")


async def count_lines(path: str, *, skip_blank: bool = False) -> int:
    """Count the lines of a text file."""
    return len(await asyncio.to_thread(read_file, path))


def declare() -> SubagentApp:
    app = SubagentApp()
    app.add_tool(read_file)
    app.add_tool(count_lines)
    app.add_tool(Tool(read_file, name="read"))
    app.add_tool(FunctionToolset[None]([read_file]))
    app.add_provider(SpawnProvider(model="openai:gpt-5-mini"))
    app.add_delegation_tool(provider="spawn")
    app.add_delegation_tool(provider="spawn", tool_name="ask", backgroundMode="continuable", max_depth=1)
    app.add_job_tools()
    app.on_event(lambda event: print(event.run_id))
    assert_type(app.settings, BrokerSettings)
    assert_type(app.providers, dict[str, Provider])
    assert_type(app.queues, list[str])
    assert_type(app.host(), Host)
    assert_type(app.sync_host(), SyncHost)
    # Celery has no types: that it is there is all that can be said.
    _ = app.celery
    return app


def declare_with_objects(settings: BrokerSettings) -> SubagentApp:
    app = SubagentApp(settings)
    app.add_delegation_tool(
        DelegationToolConfig(
            provider="spawn",
            tool_name="subagent",
            enable_model_selection=False,
            model_selection_settings=False,
            enable_run_in_background=True,
            background_mode="one-shot",
            agent_options=AgentOptions(provider="openai", model="gpt-5-mini", reasoning_effort="low", max_tokens=4096),
            persona="You are brief.",
            tool_filter=ToolFilter(allow=("read_file",), deny=()),
            max_depth="provider-managed",
            recovery="resume",
            run_limit_seconds=60.0,
        )
    )
    app.add_job_tools(
        JobToolsConfig(
            wait_timeout_ms=30_000,
            max_wait_timeout_ms=600_000,
            completion_delivery="wakeup",
            max_consecutive_wakes=3,
        )
    )
    return app


def read_settings() -> BrokerSettings:
    try:
        settings = load_settings(broker_url="redis://127.0.0.1:6379/0", namespace="staging", lease_seconds=6)
    except SettingsError as error:
        raise SystemExit(str(error)) from error
    assert_type(settings.redis_url, str | None)
    assert_type(settings.lease_seconds, float)
    assert_type(settings.max_active_jobs, int)
    return settings


def listen(event: Event) -> None:
    match event:
        case RunStarted():
            print(event.run_id, event.provider, event.child_id, event.parent_id)
        case RunEnded():
            print(event.run_id, event.provider, event.child_id, event.parent_id, event.stop_reason)
        case _ as never:
            assert_never(never)


listener: Listener = listen

# ------------------------------------------------------------------ providers


def spawn_providers(model: Model, routes: ModelRoutes) -> list[Provider]:
    return [
        SpawnProvider(),
        SpawnProvider(model=model, name="scripted"),
        SpawnProvider(model=TestModel(), name="test"),
        SpawnProvider(
            "openai:my-model",
            name="local",
            instructions="You are brief.",
            base_url="http://127.0.0.1:8000/v1",
            api_key_env="LOCAL_KEY",
            queue="slow",
            max_tokens=4096,
            max_requests=20,
            routes=routes,
        ),
    ]


def in_house_model(name: str) -> Model:
    return TestModel(model_name=name)


in_house_routes = ModelRoutes(custom={"in-house": in_house_model})


class EchoProvider(Provider):
    """A provider of a user's own: what `subagent_tasks.providers.Provider` asks for and no more."""

    name = "echo"
    capabilities = Capabilities(depth_limit=True, tool_filter=True)
    inherits_parent_context = False
    resumable = True
    queue = "light"

    async def prepare(self) -> None:
        await asyncio.sleep(0)

    async def start(self, request: ChildRequest, drive: Drive) -> EchoRun:
        assert_type(request.label, str)
        assert_type(request.prompt, str)
        assert_type(request.agent_options, AgentOptions | None)
        assert_type(request.persona, str | None)
        assert_type(request.tool_filter, ToolFilter | None)
        assert_type(request.max_depth, int | None)
        assert_type(request.output_schema, dict[str, JsonValue] | None)
        return EchoRun(request, drive)


class EchoRun:
    """Fits the protocol `Run` by its methods: there is nothing to inherit."""

    def __init__(self, request: ChildRequest, drive: Drive) -> None:
        self._request = request
        self._drive = drive

    async def result(self) -> ChildResult:
        drive = self._drive
        assert_type(drive.session_id, str)
        assert_type(drive.depth, int)
        assert_type(drive.attempt, int)
        assert_type(drive.model_request_timeout_seconds, float)
        assert_type(drive.first_event_timeout_seconds, float)
        assert_type(drive.tools, ChildTools)
        assert_type(drive.tools.names(), frozenset[str])
        assert_type(drive.tools.toolsets(), Sequence[object])
        assert_type(await drive.transcript(), Sequence[TranscriptEvent])
        for entry in await drive.take_input():
            assert_type(entry, InboxEntry)
            print(entry.message_id, entry.lane, entry.source)
        await drive.announce()
        await drive.announce(NewEvent("tool_call", {"name": "echo"}))
        await drive.record(NewEvent("response"), NewEvent("tool_result", {"text": self._request.prompt}))
        return ChildResult(
            stop_reason="completed",
            output=({"type": "text", "text": self._request.prompt},),
            diagnostic=None,
            structured={"words": 3},
            usage=Usage(requests=1, input_tokens=2, output_tokens=3, tool_calls=4),
        )

    async def cancel(self, reason: str) -> None:
        print(reason)

    async def dispose(self) -> None:
        return None


def use_own_provider(app: SubagentApp, request: ChildRequest, drive: Drive) -> Run:
    app.add_provider(EchoProvider())
    return EchoRun(request, drive)


def read_result(result: ChildResult) -> None:
    assert_type(result.stop_reason, str)
    assert_type(result.output, tuple[Block, ...])
    assert_type(result.text, str)
    assert_type(result.diagnostic, str | None)
    assert_type(result.structured, JsonValue | None)
    assert_type(result.usage, Usage | None)


# ------------------------------------------------------------------ host and session


async def host_a_conversation(app: SubagentApp) -> None:
    async with app.host() as host:
        assert_type(host, Host)
        session = await host.open_session("conversation-42", reader="main")
        assert_type(session, Session)
        assert_type(session.id, str)
        assert_type(session.tools, list[ToolDefinition])
        assert_type(session.system_prompt, str)
        for tool in session.tools:
            describe(tool)

        arguments: dict[str, Any] = {"description": "greet", "prompt": "say hello"}
        assert_type(await session.call("subagent", arguments), ToolResult)
        stop = asyncio.Event()
        read(await session.call("subagent", '{"prompt": "hi"}', call_id="call-1", signal=stop, timeout=60))

        await run_children(session)
        assert_type(session.notices(), AsyncIterator[Notice])
        async for notice in session.notices():
            read_notice(notice)
            await session.acknowledge(notice)
            async for event in session.transcript(notice.sender_id, follow=True):
                read_event(event)
            assert_type(await session.kill(notice.sender_id, reason="no longer needed"), ToolResult)
            break
        async with session.notice_inbox() as inbox:
            assert_type(inbox, NoticeInbox)
            assert_type(inbox.take(), list[Notice])
            assert_type(await inbox.wake(), list[Notice])
            inbox.user_spoke()
        await session.close(cancel_jobs=True)


class Report(BaseModel):
    title: str
    findings: list[str]


async def run_children(session: Session) -> None:
    """Children of the host's own code, without any delegation tool."""
    assert_type(await session.run_child("spawn", "say hello"), ChildResult)
    result = await session.run_child(
        "spawn",
        "report what you find",
        output_schema=Report.model_json_schema(),
        label="report",
        persona="You are brief.",
        tool_filter=[ToolFilter(deny=("write_file",)), ToolFilter(allow=("read_file",))],
        agent_options=AgentOptions(model="openai:gpt-5-mini"),
        max_depth=1,
        call_id="call-2",
        signal=asyncio.Event(),
        timeout=60,
    )
    if result.stop_reason == "completed":
        print(Report.model_validate(result.structured).findings)


def host_from_a_script(app: SubagentApp) -> None:
    with app.sync_host() as host:
        assert_type(host, SyncHost)
        session = host.open_session("conversation-42", reader="main")
        assert_type(session, SyncSession)
        assert_type(session.id, str)
        assert_type(session.tools, list[ToolDefinition])
        assert_type(session.system_prompt, str)
        read(session.call("subagent", {"description": "greet", "prompt": "say hello"}, call_id="call-1", timeout=60))
        assert_type(session.run_child("spawn", "say hello", output_schema={"type": "object"}, timeout=60), ChildResult)
        assert_type(session.notices(timeout=5), Iterator[Notice])
        for notice in session.notices():
            session.acknowledge(notice)
            assert_type(session.transcript(notice.sender_id), list[TranscriptEvent])
            assert_type(session.kill(notice.sender_id, "no longer needed"), ToolResult)
        session.close(cancel_jobs=False)


def describe(tool: ToolDefinition) -> None:
    assert_type(tool.name, str)
    assert_type(tool.description, str)
    assert_type(tool.parameters, dict[str, JsonValue])
    assert_type(tool.for_openai(), dict[str, JsonValue])
    assert_type(tool.for_anthropic(), dict[str, JsonValue])


def read(result: ToolResult) -> None:
    assert_type(result.call_id, str | None)
    assert_type(result.text, str)
    assert_type(result.value, JsonValue | None)
    assert_type(result.is_error, bool)
    assert_type(result.code, str | None)


def read_call(call: ToolCall) -> None:
    assert_type(call.call_id, str | None)
    assert_type(call.name, str)
    assert_type(call.arguments, dict[str, Any] | str)


def read_notice(notice: Notice) -> None:
    for text in (notice.id, notice.kind, notice.session_id, notice.sender_id, notice.text, notice.source):
        assert_type(text, str)
    assert_type(notice.summary, str)
    assert_type(notice.blocks, tuple[Block, ...])
    assert_type(notice.usage, Usage | None)


def read_event(event: TranscriptEvent) -> None:
    assert_type(event.seq, int)
    assert_type(event.at_ms, int)
    assert_type(event.kind, str)
    assert_type(event.data, dict[str, JsonValue])


def store_models(notice: Notice) -> Notice:
    """Every wire model goes to JSON and back."""
    assert_type(notice.to_json(), str)
    return Notice.model_validate_json(notice.to_json())


# ------------------------------------------------------------------ errors


async def handle_errors(session: Session, job_id: str) -> str:
    try:
        await session.kill(job_id)
    except (UnknownJob, Unauthorized, Conflict) as error:
        assert_type(error.code, str)
        return f"mine to mend: {error}"
    except CallerError as error:
        return f"mine as well: {error.code}"
    except (BrokerUnavailable, UnsupportedVersion) as error:
        return f"try again later: {error.code}"
    except (DuplicateProvider, NoProvider, UnsupportedCapability) as error:
        return f"declared wrongly: {error.code}"
    except (InvalidArguments, LimitReached, ChildFailed) as error:
        return f"the model's to mend: {error.code}"
    except (ConfigurationError, OperatorError, ToolError) as error:
        return f"one family after the other: {error.code}"
    except SubagentError as error:
        return f"the root of all: {error.code}"
    return "done"


def read_a_celery_result(app: SubagentApp, job_id: str) -> str:
    try:
        return str(app.celery.AsyncResult(job_id).get(timeout=5))  # pyright: ignore[reportUnknownArgumentType]  # Celery has no types
    except SubagentFailed as error:
        return str(error)


# ------------------------------------------------------------------ the test kit


async def try_with_a_scripted_model() -> None:
    model = ScriptedModel()
    gate = asyncio.Event()
    model.on("hello", reply("hi there", finish="length", reasoning="hm", usage={"input_tokens": 1, "output_tokens": 2}))
    model.on("search", [call_tool("read_file", {"path": "a"}, call_id="c1", text="let me look"), reply("found it")])
    model.on("both", call_tools(call_tool("read_file", {"path": "a"}), call_tool("read_file", '{"path": "b"}')))
    model.on("busy", [fail(429, retry_after=3, message="later", error_code="rate_limit"), wait_for(gate), reply("yes")])
    model.on("broken", [disconnect(after="so", clean=True), stall(after="so")])
    async with fake_app(model) as kit:
        assert_type(kit, Kit)
        assert_type(kit.app, SubagentApp)
        assert_type(kit.host, Host)
        assert_type(kit.session, Session)
        assert_type(kit.url, str)
        read(await kit.session.call("subagent", {"description": "greet", "prompt": "say hello"}))
        assert_type(await wait_until(lambda: model.requests, description="the model was asked"), int)
        await assert_settled(kit.redis, kit.app.settings.namespace)
        await assert_no_leaked_keys(kit.redis, kit.app.settings.namespace)
        await age_lease(kit.redis, kit.host.process.keys, "worker-1")
        await end_outage(kit.redis, kit.host.process.keys)
    assert_type(model.seen[0].prompt, str)
    assert_type(model.seen[0].tools, tuple[str, ...])
    assert_type(model.seen[0].settings, Mapping[str, Any])


async def try_with_everything_configured() -> None:
    async with fake_app(
        providers=[EchoProvider()],
        tools=[read_file],
        url="redis://127.0.0.1:6380/0",
        settings={"lease_seconds": 1},
        job_tools={"wait_timeout_ms": 100},
        concurrency=10,
        worker=False,
        check_leaks=False,
        provider="echo",
        background_mode="continuable",
    ) as kit:
        print(kit.session.id)


async def try_with_faults(model: ScriptedModel, server: EmbeddedServer) -> None:
    with FaultyServer(server.url) as faulty:
        async with fake_app(model, url=faulty.url) as kit:
            lose_reply(faulty, "say hello", times=2)
            read(await kit.session.call("subagent", {"description": "greet", "prompt": "say hello"}))
        cut(faulty)
        refuse(faulty)
        faulty.stall()
        faulty.heal()
        print(faulty.replies_lost)


def try_with_processes(app: SubagentApp, tmp_path: Path) -> None:
    script = Script()
    script.on("hello", reply("hi there"))
    event = threading.Event()
    with EmbeddedServer() as real:
        real.freeze()
        real.thaw()
        with freeze_server(real):
            real.kill()
        restart_server(real)
        real.restart()
    with stub_llm(script, models=("stub-1",)) as stub, FakeServer() as server:
        assert_type(stub, StubLLM)
        stub.on("", [wait_for(event), reply("anything else")])
        print(stub.url, stub.anthropic_url, stub.requests)
        with WorkerThread(app.celery, concurrency=10):
            event.set()
        environment = {"SUBAGENT_TASKS_BROKER_URL": server.url}
        with WorkerProcess("agents", directory=tmp_path, env=environment, concurrency=2) as worker:
            worker.wait_ready()
            assert_type(worker.pid, int)
            worker.freeze()
            worker.thaw()
            assert_type(kill_worker(worker), int)
