"""Declaring in any order: tools that wait for their provider, and declarations that differ from process to process.

Providers are declared and never removed. What the contract does by removing one is here another declaration: an app of
a newer deployment, whose hosts open the same sessions.
"""

from __future__ import annotations

from typing import Any

import pytest

from broker_config import BrokerSettings
from subagent_tasks import Capabilities, ConfigurationError, SubagentApp
from subagent_tasks.errors import DuplicateProvider, NoProvider
from tests.behaviour.bench import Bench, status_of
from tests.behaviour.provider import ScriptedProvider

FITTING, UNFIT = ScriptedProvider(), ScriptedProvider(capabilities=Capabilities())


def nothing_declared() -> SubagentApp:
    return SubagentApp(BrokerSettings(namespace="declarations"))


def definitions(app: SubagentApp) -> dict[str, str]:
    """What the model is shown, byte for byte."""
    return {name: tool.definition.model_dump_json() for name, tool in app.tools().items()}


async def test_a_tool_declared_before_its_provider_works_once_both_are_there(bench: Bench) -> None:
    """behaviour §10.5: the tool appears with the provider, and nothing failed before."""
    app, child = bench.other_app(providers=[]), bench.provider.child()
    app.add_delegation_tool(provider="scripted")
    assert definitions(app) == {}
    app.add_provider(bench.provider)
    async with app.host() as host:
        session = await bench.session(host=host)
        assert [tool.name for tool in session.tools] == ["subagent"]
        assert (await session.call("subagent", child.arguments())).text == "done"


async def test_a_provider_declared_anew_is_described_anew(bench: Bench) -> None:
    """behaviour §10.6: a newer declaration's hosts word the tool for its provider; what is open keeps its words."""
    newer = bench.other_app(providers=[ScriptedProvider(inherits_parent_context=True)])
    newer.add_delegation_tool(provider="scripted")
    session = await bench.session()
    before = session.tools
    async with newer.host() as host:
        again = await host.open_session(session.id)
        (tool,) = again.tools
        assert "starts from this conversation" in tool.description
        assert session.tools == before
        assert "starts from this conversation" not in before[0].description


def test_a_declared_provider_stays() -> None:
    """behaviour §10.6: what the app hands out is a copy, so no tool can lose its provider."""
    app = nothing_declared()
    app.add_provider(FITTING)
    app.add_delegation_tool(provider="scripted")
    app.providers.clear()
    assert list(app.providers) == ["scripted"]
    assert list(app.tools()) == ["subagent"]


def test_other_providers_change_no_tool() -> None:
    """behaviour §10.7: neither those declared before nor those that come later."""
    app = nothing_declared()
    app.add_provider(ScriptedProvider("before"))
    app.add_provider(FITTING)
    app.add_delegation_tool(provider="scripted")
    shown = definitions(app)
    app.add_provider(ScriptedProvider("after", inherits_parent_context=True))
    assert definitions(app) == shown


@pytest.mark.parametrize(
    "refused",
    [{"max_depth": -1}, {"tool_filter": {}}, {"no_such_key": 1}, {"tool_name": "job_list"}, {"run_limit_seconds": 1e9}],
)
def test_a_refused_tool_is_not_mounted_by_a_provider_that_comes_later(refused: dict[str, Any]) -> None:
    """behaviour §10.8: what was given up stays away."""
    app = nothing_declared()
    app.add_job_tools()
    shown = definitions(app)
    with pytest.raises(ConfigurationError):
        app.add_delegation_tool(**{"provider": "scripted", **refused})
    app.add_provider(FITTING)
    assert definitions(app) == shown


async def test_a_session_of_a_host_shows_what_was_declared_when_the_host_was_made(bench: Bench) -> None:
    """behaviour §10.8: a later declaration mounts nothing into sessions that are open."""
    app = bench.other_app()
    async with app.host() as host:
        session = await bench.session(host=host)
        app.add_delegation_tool(provider="scripted")
        assert session.tools == []
        assert (await session.call("subagent", bench.provider.child().arguments())).code == "UNKNOWN_TOOL"


@pytest.mark.parametrize("mode", ["continuable", "one-shot"])
@pytest.mark.parametrize("provider_first", [True, False])
def test_the_second_tool_of_a_name_fails_where_it_is_declared(mode: str, provider_first: bool) -> None:
    """behaviour §10.19: also while both would wait for their provider, which is not taken down with them."""
    app = nothing_declared()
    if provider_first:
        app.add_provider(FITTING)
    app.add_delegation_tool(provider="scripted", background_mode=mode)
    with pytest.raises(ConfigurationError, match='tool "subagent" is already registered: give it another tool_name'):
        app.add_delegation_tool(provider="scripted", background_mode=mode)
    if not provider_first:
        app.add_provider(FITTING)
    assert list(app.tools()) == ["subagent"]


async def test_an_app_without_delegation_tools_shows_none(bench: Bench) -> None:
    """behaviour §10.20: a session is opened all the same, and a call of the tool is refused."""
    child = bench.provider.child()
    async with bench.other_app().host() as host:
        session = await bench.session(host=host)
        assert (session.tools, session.system_prompt) == ([], "")
        refused = await session.call("subagent", child.arguments())
    assert (refused.text, refused.code) == ("Error: unknown tool 'subagent': the tools are (none)", "UNKNOWN_TOOL")
    assert child.starts == 0


def test_a_name_that_is_taken_and_one_that_is_missing_are_errors_of_their_own() -> None:
    """behaviour §10.193: by code; the providers that are there stay as they are."""
    app = nothing_declared()
    app.add_provider(FITTING)
    with pytest.raises(DuplicateProvider) as taken:
        app.add_provider(ScriptedProvider(inherits_parent_context=True))
    app.add_delegation_tool(provider="missing")
    with pytest.raises(NoProvider) as missing:
        app.host()
    assert (taken.value.code, missing.value.code) == ("DUPLICATE_PROVIDER", "NO_PROVIDER")
    assert app.providers == {"scripted": FITTING}


def test_a_provider_that_a_waiting_tool_cannot_use_is_taken_back() -> None:
    """behaviour §10.193: nothing of it stays, so one that fits may still come under its name."""
    app = nothing_declared()
    app.add_delegation_tool(provider="scripted", persona="terse", max_depth="provider-managed")
    with pytest.raises(ConfigurationError, match='"persona" capability'):
        app.add_provider(UNFIT)
    assert (app.providers, app.queues, definitions(app)) == ({}, [], {})
    app.add_provider(FITTING)
    assert list(app.tools()) == ["subagent"]


async def test_an_accepted_run_goes_on_where_its_provider_is_declared(bench: Bench) -> None:
    """behaviour §10.154: a newer declaration without the provider starts nothing new, and can read and end the old."""
    session, child = await bench.session(), bench.provider.child(holds_result=True)
    job_id = await bench.running_job(session, child)
    newer = bench.other_app(providers=[ScriptedProvider("another")])
    newer.add_job_tools()
    async with newer.host() as host:
        again = await host.open_session(session.id)
        assert (await again.call("subagent", child.arguments())).code == "UNKNOWN_TOOL"
        assert status_of(await again.call("job_output", {"job_id": job_id})) == "running"
        child.go_on.set()
        assert status_of(await bench.settled(again, job_id)) == "completed"
    assert child.starts == 1
