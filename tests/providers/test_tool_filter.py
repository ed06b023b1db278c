"""The tool filter over toolsets of every kind, and the child's persona: what a child of `spawn` is given."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Self

import pytest
from pydantic_ai.tools import RunContext, ToolDefinition
from pydantic_ai.toolsets import AbstractToolset, FunctionToolset, ToolsetTool
from pydantic_core import SchemaValidator, core_schema

from subagent_tasks.agents.delegation_statement import DELEGATION_STATEMENT
from subagent_tasks.agents.structured import OUTPUT_TOOL
from subagent_tasks.agents.tool_filter import intersection
from subagent_tasks.errors import ConfigurationError
from subagent_tasks.protocol.models import ToolFilter
from subagent_tasks.providers import SpawnProvider
from subagent_tasks.toolbox import Toolbox
from tests.providers.driving import Script, ask, drive_child, say, start, tool_returns, use
from tests.providers.fake_drive import FakeDrive, FakeTools


class RemoteTools(AbstractToolset[None]):
    """Tools that are known only while the toolset is open, as those of an MCP server; `names` may change meanwhile."""

    def __init__(self, *names: str, fails_with: Exception | None = None) -> None:
        self.names = list(names)
        self.fails_with = fails_with
        self.opened = 0
        self.is_open = 0
        self.called: list[str] = []

    @property
    def id(self) -> str:
        return "remote"

    async def __aenter__(self) -> Self:
        if self.fails_with is not None:
            raise self.fails_with
        self.opened += 1
        self.is_open += 1
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.is_open -= 1

    async def get_tools(self, ctx: RunContext[None]) -> dict[str, ToolsetTool[None]]:
        assert self.is_open, "asked for its tools while it was closed"
        return {
            name: ToolsetTool(
                toolset=self,
                tool_def=ToolDefinition(name=name),
                max_retries=1,
                args_validator=SchemaValidator(core_schema.any_schema()),
            )
            for name in self.names
        }

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[None], tool: ToolsetTool[None]
    ) -> str:
        self.called.append(name)
        if name == "grow":
            self.names.append("late")
        return f"{name} done"


class MixedTools(FakeTools):
    """Functions beside toolsets of another kind."""

    def __init__(self, *others: AbstractToolset[None]) -> None:
        super().__init__([look])
        self.others = others

    def toolsets(self) -> Sequence[object]:
        return [*super().toolsets(), *self.others]


async def look() -> str:
    return "seen"


def shown(script: Script, request: int = 0) -> list[str]:
    return sorted(tool.name for tool in script.infos[request].function_tools)


# --- names that only an open toolset tells


@pytest.mark.parametrize(
    ("tool_filter", "expected"),
    [
        (ToolFilter(allow=("remote_a",)), ["remote_a"]),
        (ToolFilter(allow=("look", "remote_b")), ["look", "remote_b"]),
        (ToolFilter(deny=("remote_a", "look")), ["remote_b"]),
        (ToolFilter(allow=("remote_a", "remote_b"), deny=("remote_b",)), ["remote_a"]),
    ],
)
async def test_a_filter_may_name_tools_that_only_an_open_toolset_tells(
    tool_filter: ToolFilter, expected: list[str]
) -> None:
    """behaviour §5.5: a global tool is a global tool, wherever it comes from."""
    remote, script = RemoteTools("remote_a", "remote_b"), Script(say("done"))
    result = await drive_child(script, FakeDrive(tools=MixedTools(remote)), ask(tool_filter=tool_filter))
    assert result.stop_reason == "completed"
    assert shown(script) == expected
    assert remote.is_open == 0


@pytest.mark.parametrize("named", [{"allow": ("remote_a", "typo")}, {"deny": ("typo",)}])
async def test_a_name_that_no_open_toolset_has_fails_the_start(named: dict[str, tuple[str, ...]]) -> None:
    """behaviour §5.5, §10.152: loud, with every known name; nothing was begun and nothing stays open."""
    remote, script = RemoteTools("remote_a"), Script(say("done"))
    drive = FakeDrive(tools=MixedTools(remote))
    with pytest.raises(ConfigurationError) as caught:
        await start(script, drive, ask(tool_filter=ToolFilter(**named)))
    assert str(caught.value) == (
        'tools.restrict() names unknown global tool(s) "typo"; known global tools: look, remote_a'
    )
    assert (drive.calls, script.requests, remote.is_open) == (0, [], 0)


async def test_a_toolset_that_does_not_open_fails_the_start() -> None:
    """behaviour §1.2: whether the name is right cannot be told, so nothing is begun."""
    remote, script = RemoteTools("remote_a", fails_with=ConnectionError("no server")), Script(say("done"))
    drive = FakeDrive(tools=MixedTools(remote))
    with pytest.raises(ConnectionError):
        await start(script, drive, ask(tool_filter=ToolFilter(deny=("remote_a",))))
    assert (drive.calls, script.requests) == (0, [])


@pytest.mark.parametrize("tool_filter", [None, ToolFilter(deny=("look",)), ToolFilter(allow=())])
async def test_nothing_is_opened_only_for_names_that_are_known(tool_filter: ToolFilter | None) -> None:
    """design §7: an MCP server may be a process; it is started once for a run, not twice."""
    remote = RemoteTools("remote_a")
    await drive_child(Script(say("done")), FakeDrive(tools=MixedTools(remote)), ask(tool_filter=tool_filter))
    assert remote.opened == 1


async def test_a_denied_tool_of_an_open_toolset_is_refused() -> None:
    """behaviour §5.5, §10.152: hidden, and refused when called all the same."""
    remote, script = RemoteTools("remote_a", "remote_b"), Script(use(("remote_a", {}), ("remote_b", {})), say("done"))
    request = ask(tool_filter=ToolFilter(deny=("remote_a",)))
    await drive_child(script, FakeDrive(tools=MixedTools(remote)), request)
    assert remote.called == ["remote_b"]
    assert [part.outcome for part in tool_returns(script.requests[1])] == ["retried", "success"]


@pytest.mark.parametrize("tool_filter", [ToolFilter(deny=("remote_a",)), ToolFilter(allow=("look", "remote_a"))])
async def test_a_child_that_goes_on_is_not_stopped_by_a_name(tool_filter: ToolFilter) -> None:
    """design §7: names are checked when a child begins; later a deployment may have dropped the tool."""
    script = Script(use(("look", {})), say("done"))
    drive = FakeDrive(tools=MixedTools(RemoteTools("remote_a")))
    await drive_child(script, drive, ask(tool_filter=tool_filter))
    survived = drive.resumed_at(2)
    survived.tools = MixedTools()
    result = await drive_child(script, survived, ask(tool_filter=tool_filter))
    assert result.stop_reason == "completed"
    assert shown(script, -1) == ["look"]


# --- tools that come later


@pytest.mark.parametrize(
    ("tool_filter", "expected"),
    [
        (ToolFilter(deny=("look",)), ["grow", "late"]),
        (ToolFilter(allow=("grow",)), ["grow"]),
        (None, ["grow", "late", "look"]),
    ],
)
async def test_a_tool_that_comes_later_passes_a_deny_but_no_allow(
    tool_filter: ToolFilter | None, expected: list[str]
) -> None:
    """behaviour §5.5: the filter is live."""
    script = Script(use(("grow", {})), say("done"))
    await drive_child(script, FakeDrive(tools=MixedTools(RemoteTools("grow"))), ask(tool_filter=tool_filter))
    assert shown(script) == [name for name in expected if name != "late"]
    assert shown(script, 1) == expected


async def test_a_function_that_is_added_later_is_known_to_filters() -> None:
    """behaviour §5.5: a toolset of functions may grow after it was declared."""
    functions: FunctionToolset[None] = FunctionToolset()
    toolbox = Toolbox()
    toolbox.add(functions, taken=frozenset())
    functions.add_function(look)
    script = Script(say("done"))
    await drive_child(script, FakeDrive(tools=toolbox), ask(tool_filter=ToolFilter(allow=("look",))))
    assert shown(script) == ["look"]


# --- several restrictions


NAMES = ("a", "b", "c", "d")
FILTERS = [
    ToolFilter(),
    ToolFilter(allow=()),
    ToolFilter(deny=()),
    ToolFilter(allow=("a", "b")),
    ToolFilter(allow=("b", "c"), deny=("c",)),
    ToolFilter(deny=("a",)),
    ToolFilter(deny=("a", "d")),
]


@pytest.mark.parametrize("filters", [*itertools.product(FILTERS, repeat=1), *itertools.product(FILTERS, repeat=2)])
def test_several_restrictions_intersect(filters: tuple[ToolFilter, ...]) -> None:
    """behaviour §5.5: what one of them does not admit, all together do not; and no name is lost, misspelt ones too."""
    both = intersection(filters)
    assert both is not None
    for name in NAMES:
        assert both.admits(name) == all(each.admits(name) for each in filters)
    named = {name for each in filters for name in (*(each.allow or ()), *(each.deny or ()))}
    assert named == {*(both.allow or ()), *(both.deny or ())}


def test_denials_alone_grow_no_allow_list() -> None:
    """behaviour §2.1: an empty `allow` would hide everything."""
    both = intersection([ToolFilter(deny=("a",)), ToolFilter(deny=("b", "a"))])
    assert both == ToolFilter(deny=("a", "b"))


def test_no_restriction_is_none() -> None:
    """behaviour §2.1: absent stays absent."""
    assert intersection([]) is None


# --- the child's own tool


def test_the_childs_own_name_is_reserved() -> None:
    """behaviour §5.8: a global tool of that name could not be told from the child's own."""

    def structured_output() -> None:
        """A tool of the app's."""

    with pytest.raises(ConfigurationError, match=f'tool "{OUTPUT_TOOL}" is what children hand in'):
        Toolbox().add(structured_output, taken=frozenset())
    with pytest.raises(ConfigurationError, match=f'tool "{OUTPUT_TOOL}" is what children hand in'):
        Toolbox().add(FunctionToolset[None]([structured_output]), taken=frozenset())


def test_a_name_may_be_taken_once() -> None:
    """P13: by a function or by a toolset of functions."""
    toolbox = Toolbox()
    toolbox.add(FunctionToolset[None]([look]), taken=frozenset())
    with pytest.raises(ConfigurationError, match='tool "look" is already registered'):
        toolbox.add(look, taken=frozenset())
    with pytest.raises(ConfigurationError, match='tool "look" is already registered'):
        toolbox.add(FunctionToolset[None]([look]), taken=frozenset())


# --- the persona


@pytest.mark.parametrize(
    ("persona", "expected"),
    [
        (None, ["You serve ACME.", "How to use look.", DELEGATION_STATEMENT]),
        ("You are a critic.", ["You are a critic.", "How to use look.", DELEGATION_STATEMENT]),
        ("", ["How to use look.", DELEGATION_STATEMENT]),
    ],
)
async def test_a_persona_shadows_the_deployments_in_its_place(persona: str | None, expected: list[str]) -> None:
    """behaviour §5.4, §10.152: of order 0, before every other section; absent keeps, empty shadows with nothing."""
    script = Script(say("hello"))
    drive = FakeDrive(tools=FakeTools([look], has_sections=True))
    await drive_child(script, drive, ask(persona=persona), instructions="You serve ACME.")
    assert script.infos[0].instructions == "\n\n".join(expected)


async def test_a_persona_is_one_childs_own() -> None:
    """behaviour §5.4, §10.152: the next child of the same provider has the deployment's again."""
    script = Script(say("hello"))
    provider = SpawnProvider(script.model, instructions="You serve ACME.")
    for persona in ("You are a critic.", None):
        run = await provider.start(ask(persona=persona), FakeDrive())
        await run.result()
        await run.dispose()
    first, second = (str(info.instructions) for info in script.infos)
    assert first.startswith("You are a critic.\n\n")
    assert second.startswith("You serve ACME.\n\n")
