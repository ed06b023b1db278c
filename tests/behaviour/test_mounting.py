"""Declaring delegation tools: what the model is shown of them, what reaches the provider, and what is refused, when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from celery import Celery
from pydantic_ai.tools import Tool

from broker_config import BrokerSettings
from subagent_tasks import AgentOptions, Capabilities, ChildRequest, ConfigurationError, SubagentApp, ToolFilter
from subagent_tasks.errors import DuplicateProvider, NoProvider, UnsupportedCapability
from subagent_tasks.providers import SpawnProvider
from subagent_tasks.testing import reply
from subagent_tasks.tools.calls import sections_of
from tests.behaviour.bench import Bench, run_id_of, status_of, until
from tests.behaviour.provider import Child, ScriptedProvider

NO_CAPABILITIES = Capabilities()


def declared(*providers: ScriptedProvider, **tool: Any) -> SubagentApp:
    """An app with these providers and one delegation tool; nothing connects."""
    app = SubagentApp(BrokerSettings(namespace="declared"))
    for provider in providers or (ScriptedProvider(),):
        app.add_provider(provider)
    app.add_delegation_tool(**{"provider": "scripted", **tool})
    return app


def shown(app: SubagentApp, name: str = "subagent") -> tuple[str, dict[str, Any]]:
    """The description of a tool and its parameters."""
    definition = app.tools()[name].definition
    return definition.description, cast("dict[str, Any]", definition.parameters["properties"])


async def requested(bench: Bench, **tool: Any) -> ChildRequest:
    """What the provider was asked for through a tool configured so."""
    child = bench.provider.child()
    async with bench.declared(**tool) as (session, name):
        assert (await session.call(name, child.arguments())).text == "done"
    (request,) = child.requests
    return request


async def test_the_default_tool_has_three_fields(bench: Bench) -> None:
    """behaviour §10.1: description, prompt, run_in_background; nothing about the transport."""
    (tool,) = [tool for tool in (await bench.session()).tools if tool.name == "subagent"]
    parameters = cast("dict[str, Any]", tool.parameters)
    assert list(parameters["properties"]) == ["description", "prompt", "run_in_background"]
    assert parameters["required"] == ["description", "prompt"]
    assert "scripted" not in tool.model_dump_json()


def test_without_background_the_field_is_gone() -> None:
    """behaviour §10.2: and the description says that the call waits."""
    description, fields = shown(declared(enable_run_in_background=False))
    assert list(fields) == ["description", "prompt"]
    assert "The call waits for the agent and returns its result." in description
    assert "background" not in description


async def test_without_background_a_forced_background_call_is_refused(bench: Bench) -> None:
    """behaviour §10.3: undeclared fields are accepted, so what is switched off is refused at the call."""
    child = bench.provider.child()
    async with bench.declared(enable_run_in_background=False) as (session, name):
        refused = await session.call(name, child.in_background())
        assert refused.is_error
        assert refused.text == (
            "Error: run_in_background is disabled for this tool instance (enableRunInBackground: false)"
        )
        assert (await session.call(name, child.arguments(run_in_background=False))).text == "done"
    assert child.starts == 1


async def test_a_forced_selection_is_refused(bench: Bench) -> None:
    """behaviour §2.7: selection is off unless configured, whatever the model sends."""
    child = bench.provider.child()
    refused = await (await bench.session()).call("subagent", child.arguments(model="big", provider="any"))
    assert refused.text == "Error: child model selection is disabled for this tool instance"
    assert child.starts == 0


def test_fresh_and_inheriting_providers_are_described_differently() -> None:
    """behaviour §10.9: in the description and in the text of the prompt field."""
    (fresh, fresh_fields), (heir, heir_fields) = (
        shown(declared(ScriptedProvider(inherits_parent_context=inherits))) for inherits in (False, True)
    )
    assert "cannot see this conversation" in fresh
    assert "starts from this conversation" in heir
    assert fresh_fields["prompt"] != heir_fields["prompt"]
    assert fresh_fields["description"] == heir_fields["description"]


async def test_the_default_depth_cap_is_three(bench: Bench) -> None:
    """behaviour §10.13"""
    assert (await requested(bench)).max_depth == 3


@pytest.mark.parametrize(("max_depth", "sent"), [(0, None), (1, 1), ("provider-managed", None)])
async def test_the_depth_cap_is_sent_as_a_number_or_not_at_all(
    bench: Bench, max_depth: int | str, sent: int | None
) -> None:
    """behaviour §2.7, §4.13: 0 forbids all delegation; `provider-managed` sends no cap."""
    if max_depth == 0:
        child = bench.provider.child()
        async with bench.declared(max_depth=0) as (session, name):
            refused = await session.call(name, child.arguments())
        assert refused.text == "Error: subagent depth 1 exceeds maxDepth 0"
        assert child.starts == 0
    else:
        assert (await requested(bench, max_depth=max_depth)).max_depth == sent


def test_a_filter_without_keys_fails_at_the_declaration() -> None:
    """behaviour §10.14: not at the first call; in either spelling."""
    for key in ("tool_filter", "toolFilter"):
        with pytest.raises(ConfigurationError) as refused:
            declared(**{key: {}})
        assert str(refused.value) == (
            "tool-subagent: `toolFilter` is configured but names neither `allow` nor `deny`"
            " — remove the key or fill the filter"
        )


async def test_a_filter_that_only_denies_grows_no_allow_list(bench: Bench) -> None:
    """behaviour §10.15: an empty allow list would hide everything."""
    tool_filter = (await requested(bench, tool_filter={"deny": ["look"]})).tool_filter
    assert tool_filter is not None
    assert (tool_filter.deny, tool_filter.allow) == (("look",), None)
    assert "allow" not in tool_filter.to_json()


async def test_absent_options_stay_absent(bench: Bench) -> None:
    """behaviour §10.16: no empty object is invented on the way to the provider."""
    request = await requested(bench)
    assert request.agent_options is None
    assert set(request.model_dump(exclude_none=True)) == {"label", "prompt", "maxDepth"}


async def test_everything_configured_reaches_the_provider_unchanged(bench: Bench) -> None:
    """behaviour §10.17: persona, filter, depth and options, in the seed's spelling too."""
    request = await requested(
        bench,
        persona="You are terse.\n",
        toolFilter={"allow": ["look"], "deny": []},
        maxDepth=2,
        agentOptions={"model": "openai:gpt-5-mini", "reasoningEffort": "low", "maxTokens": 100},
    )
    assert request.persona == "You are terse.\n"
    assert request.tool_filter == ToolFilter(allow=("look",), deny=())
    assert request.max_depth == 2
    assert request.agent_options == AgentOptions(
        provider="openai", model="gpt-5-mini", reasoning_effort="low", max_tokens=100
    )


async def test_the_prompt_reaches_the_provider_as_it_was_written(bench: Bench) -> None:
    """behaviour §2.7: one text, the description as its label; any text that UTF-8 can carry."""
    prompt = "  žluťoučký 😀 \x01\x7f \r\n{}\n"
    child = bench.provider._children[prompt] = Child(prompt)  # pyright: ignore[reportPrivateUsage]  # a prompt of ours
    await (await bench.session()).call("subagent", child.arguments(description="čtení"))
    assert [(request.prompt, request.label) for request in child.requests] == [(prompt, "čtení")]


# Declarations that are refused where they are made.


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tool_nam": "x"}, "tool_nam: unknown key; did you mean tool_name?"),
        ({"zzz": 1}, "zzz: unknown key; known keys: provider, tool_name, "),
        ({"provider": ""}, "provider: "),
        ({"provider": 5}, "provider: "),
        ({"tool_name": ""}, "tool_name: string should match pattern"),
        ({"tool_name": "has space"}, 'got "has space"'),
        ({"tool_name": "a" * 65}, "tool_name: "),
        ({"enable_run_in_background": "yes"}, 'enable_run_in_background: input should be a valid boolean, got "yes"'),
        ({"background_mode": "sometimes"}, "background_mode: input should be 'one-shot' or 'continuable'"),
        ({"persona": 5}, "persona: input should be a valid string, got 5"),
        ({"persona": "a\x00"}, "persona: contains a NUL character at position 1; remove it"),
        ({"persona": "a\ud800"}, "persona: contains half of a surrogate pair at position 1; remove it"),
        ({"tool_filter": {"alow": ["x"]}}, "tool_filter.alow: unknown key; did you mean allow?"),
        ({"tool_filter": {"allow": "look"}}, "tool_filter.allow: "),
        ({"agent_options": {"model": ""}}, "agent_options.model: "),
        ({"agent_options": {"max_tokens": 0}}, "agent_options.max_tokens: "),
        ({"agent_options": {"max_tokens": "5"}}, 'agent_options.max_tokens: expected a whole number, got "5"'),
        ({"run_limit_seconds": 0}, "run_limit_seconds: "),
        ({"run_limit_seconds": "60"}, 'run_limit_seconds: input should be a valid number, got "60"'),
        ({"max_depth": -1}, "subagent maxDepth must be a non-negative safe integer"),
        ({"max_depth": "3"}, "subagent maxDepth must be a non-negative safe integer"),
        ({"recovery": "later"}, "recovery: input should be 'resume' or 'fail', got \"later\""),
        ({"tool_name": "x", "toolName": "x"}, "tool_name is also given as toolName; keep one of them"),
    ],
)
def test_a_wrong_declaration_names_key_value_and_fix(values: dict[str, Any], said: str) -> None:
    """P13: a `ConfigurationError` of one line, and the tool is not declared."""
    app = SubagentApp(BrokerSettings(namespace="declared"))
    app.add_provider(ScriptedProvider())
    with pytest.raises(ConfigurationError) as refused:
        app.add_delegation_tool(**{"provider": "scripted", **values})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert app.tools() == {}


def test_a_configuration_is_given_as_one_or_by_keys() -> None:
    """P13: a dict in place of the keys is a common slip."""
    app = SubagentApp(BrokerSettings(namespace="declared"))
    for add in cast("list[Callable[..., None]]", [app.add_delegation_tool, app.add_job_tools]):
        with pytest.raises(ConfigurationError, match="got dict: write the keys as keyword arguments"):
            add({"provider": "spawn"})


@pytest.mark.parametrize(
    ("values", "said", "error"),
    [
        ({}, "cannot enforce maxDepth (no depthLimit capability)", ConfigurationError),
        ({"agent_options": {"model": "m"}}, "does not support child agentOptions", ConfigurationError),
        ({"enable_model_selection": True}, "does not support child model selection", ConfigurationError),
        ({"background_mode": "continuable"}, "does not support `backgroundMode: continuable`", ConfigurationError),
        ({"tool_filter": {"deny": []}}, 'does not support the "toolFilter" capability', UnsupportedCapability),
        ({"persona": ""}, 'does not support the "persona" capability', UnsupportedCapability),
    ],
)
def test_what_a_provider_cannot_honour_is_refused_at_once(
    values: dict[str, Any], said: str, error: type[Exception]
) -> None:
    """behaviour §2.6: whichever of the two is declared first; neither tool nor provider stays behind."""
    values = {"max_depth": "provider-managed", **values} if values else values
    with pytest.raises(error) as refused:
        declared(ScriptedProvider(capabilities=NO_CAPABILITIES), **values)
    assert said in str(refused.value)
    app = SubagentApp(BrokerSettings(namespace="declared"))
    app.add_delegation_tool(**{"provider": "scripted", **values})
    with pytest.raises(error) as refused_later:
        app.add_provider(ScriptedProvider(capabilities=NO_CAPABILITIES))
    assert str(refused_later.value) == str(refused.value)
    assert app.providers == {}


def test_a_tool_name_is_declared_once() -> None:
    """behaviour §2.6: against other delegation tools, the job tools and the children's tools."""
    app = declared()
    app.add_job_tools()
    app.add_tool(named("look"))
    for name in ("subagent", "job_kill", "look"):
        with pytest.raises(ConfigurationError, match=f'tool "{name}" is already registered'):
            app.add_delegation_tool(provider="scripted", tool_name=name)
    with pytest.raises(ConfigurationError, match='tool "subagent" is already registered'):
        app.add_tool(named("subagent"))


def named(name: str) -> Callable[[], None]:
    def tool() -> None:
        """A tool."""

    tool.__name__ = name
    return tool


def test_a_provider_name_is_declared_once() -> None:
    """behaviour §1.1: the exact text and code."""
    app = declared()
    with pytest.raises(DuplicateProvider) as refused:
        app.add_provider(ScriptedProvider())
    assert str(refused.value) == 'a subagent provider named "scripted" is already registered'
    assert refused.value.code == "DUPLICATE_PROVIDER"


@pytest.mark.parametrize("provider", [None, "spawn", ScriptedProvider, object()])
def test_what_is_no_provider_is_refused(provider: Any) -> None:
    """P13"""
    app = SubagentApp(BrokerSettings(namespace="declared"))
    with pytest.raises(ConfigurationError, match="add_provider expects a Provider, got "):
        app.add_provider(provider)


@pytest.mark.parametrize("name", ["", "has space", "a/b", "ž"])
def test_a_provider_name_that_cannot_name_a_queue_is_refused(name: str) -> None:
    """P13"""
    app = SubagentApp(BrokerSettings(namespace="declared"))
    with pytest.raises(ConfigurationError, match=r"has no name|provider \""):
        app.add_provider(ScriptedProvider(name))


@pytest.mark.parametrize("tool", [None, 5, "look"])
def test_what_is_no_tool_is_refused(tool: Any) -> None:
    """P13"""
    with pytest.raises(ConfigurationError, match="add_tool expects a function or a pydantic-ai toolset, got "):
        declared().add_tool(tool)


def test_a_tool_made_with_pydantic_ai_is_taken_as_it_is() -> None:
    """design §4: with what it says of itself, such as that it runs alone."""
    app = declared()
    app.add_tool(Tool(named("look"), sequential=True))
    with pytest.raises(ConfigurationError, match='tool "look" is already registered'):
        app.add_tool(named("look"))


def test_the_jobs_section_stands_before_those_of_delegation_tools() -> None:
    """behaviour §8: orders 106 and 116.5, whatever was declared first."""
    app = SubagentApp(BrokerSettings(namespace="declared"))
    app.add_provider(ScriptedProvider(capabilities=Capabilities(depth_limit=True, prepare_continuable=True)))
    app.add_delegation_tool(provider="scripted", background_mode="continuable")
    app.add_job_tools()
    sections = sections_of(app.tools().values())
    assert [section.partition("\n")[0] for section in sections] == ["# Background jobs", "# Delegating with subagent"]


def test_a_tool_may_be_declared_before_its_provider() -> None:
    """behaviour §2.5: no failure; the tool appears with its provider, worded for it."""
    app = SubagentApp(BrokerSettings(namespace="declared"))
    app.add_delegation_tool(provider="scripted")
    assert app.tools() == {}
    app.add_provider(ScriptedProvider(inherits_parent_context=True))
    assert "starts from this conversation" in shown(app)[0]


def test_a_provider_that_never_comes_is_told_when_the_app_is_used() -> None:
    """P13: once hosts and workers start, none can be declared; the error names tool, provider and fix."""
    app = declared(provider="spwan")
    for use in (app.host, app.sync_host().__enter__, lambda: app.celery):
        with pytest.raises(NoProvider) as refused:
            use()
        assert str(refused.value) == (
            'no subagent provider registered for "spwan", which the delegation tool "subagent" names '
            "(declared: scripted): call app.add_provider first, or correct the tool's provider"
        )


def test_a_provider_declared_too_late_is_refused() -> None:
    """P13: workers have read their queues by then."""
    app = declared()
    assert app.celery
    with pytest.raises(ConfigurationError, match=r'provider "late" is declared after app\.celery was used'):
        app.add_provider(ScriptedProvider("late"))


def test_an_app_leaves_other_celery_apps_alone() -> None:
    """design §4: a deployment has a Celery app of its own, and perhaps two of ours."""
    ours, theirs = (declared().celery for _ in range(2))
    deployment = Celery("deployment", set_as_current=False)
    for celery in (ours, theirs, deployment):
        celery.finalize()
    task = "subagent_tasks.activate"
    assert task in ours.tasks
    assert task in theirs.tasks
    assert task not in deployment.tasks


# A worker whose declaration differs from the host's.


async def test_a_worker_without_the_provider_never_takes_its_work(bench: Bench) -> None:
    """design §8: each provider has a queue of its own; the run waits for a worker that has it, and is not lost."""
    app = bench.other_app(providers=[bench.provider, ScriptedProvider("elsewhere")])
    app.add_delegation_tool(provider="elsewhere")
    app.add_delegation_tool(provider="scripted", tool_name="other")
    app.add_job_tools()
    child = bench.provider.child()
    async with app.host() as host:
        session = await bench.session(host=host)
        job_id = await bench.job(session, child.in_background())
        assert (await session.call("other", child.arguments())).text == "done"
        assert (await session.call("job_list", {})).text == f"{job_id} [subagent] queued — a task"
        assert status_of(await session.call("job_kill", {"job_id": job_id})) == "killed"


async def test_a_worker_that_shares_the_queue_but_not_the_provider_says_so(bench: Bench) -> None:
    """P13: the run fails visibly, with the provider's name and the fix."""
    app = bench.other_app(providers=[ScriptedProvider("elsewhere", queue="scripted")])
    app.add_delegation_tool(provider="elsewhere")
    app.add_job_tools()
    async with app.host() as host:
        session = await bench.session(host=host)
        result = await session.call("subagent", {"description": "d", "prompt": "p"})
    assert result.text == (
        'Error: no subagent provider registered for "elsewhere" on this worker: declare it in the app the worker runs'
    )
    assert result.code == "CHILD_FAILED"


async def test_a_filter_that_names_no_tool_fails_the_start(bench: Bench) -> None:
    """behaviour §5.5: loudly, with the known tools, and the model is never asked."""
    asked = bench.model.requests
    async with bench.declared(provider="spawn", tool_filter={"allow": ["lok"]}) as (session, name):
        result = await session.call(name, {"description": "d", "prompt": "p"})
    known = "job_kill, job_list, job_output, look, subagent"
    assert result.text == f'Error: tools.restrict() names unknown global tool(s) "lok"; known global tools: {known}'
    assert bench.model.requests == asked


async def test_two_tools_on_two_providers_work_side_by_side(bench: Bench) -> None:
    """behaviour §10.4"""
    bench.model.on("answer me", reply("from the model"))
    session, child = await bench.session(), bench.provider.child()
    one = await session.call("subagent", child.arguments())
    two = await session.call("spawn_agent", {"description": "d", "prompt": "answer me"})
    assert (one.text, two.text) == ("done", "from the model")
    assert run_id_of(one) != run_id_of(two)
    await until(lambda: child.log[-1] == "dispose", "the scripted child is released")


def test_spawn_refuses_what_it_cannot_be() -> None:
    """P13: limits and addresses of the shipped provider are checked where it is made."""
    for values in ({"max_requests": 0}, {"max_tokens": 0}, {"base_url": "http://127.0.0.1:1"}, {"model": "nomodel"}):
        with pytest.raises(ConfigurationError):
            SpawnProvider(**cast("dict[str, Any]", values))
