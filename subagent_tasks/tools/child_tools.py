"""Our own tools in the hands of a child: the same tools a host has, as a pydantic-ai toolset over one drive.

The calls go the way of `Session.call`; how a child waits is `own_runs`. What a child may call is decided by its filter.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from pydantic_ai import RunContext, ToolFailed
from pydantic_ai.messages import ModelResponse
from pydantic_ai.tools import ToolDefinition
from pydantic_ai.toolsets import AbstractToolset, ToolsetTool

from subagent_tasks.drive import LeasedDrive
from subagent_tasks.errors import SubagentError
from subagent_tasks.own_runs import OwnRuns
from subagent_tasks.protocol.interfaces import OWN_TOOL, ChildTools
from subagent_tasks.protocol.models import ToolCall
from subagent_tasks.scheduling import DEFAULT_MAX_PARALLEL
from subagent_tasks.tools.calls import CallContext, Tool, ToolServices, sections_of
from subagent_tasks.tools.render import error_result


class ChildToolMaker:
    """Makes the tools of each drive in this process."""

    def __init__(self, global_tools: ChildTools, own_tools: Mapping[str, Tool], services: ToolServices) -> None:
        self._global_tools = global_tools
        self._own_tools = own_tools
        self._services = services

    @asynccontextmanager
    async def tools_of(self, drive: LeasedDrive) -> AsyncGenerator[ChildTools]:
        """The tools of the child that is driven, for as long as it is."""
        own_runs = OwnRuns(
            drive,
            delegation=self._services.delegation,
            waiting=self._services.waiting,
            settings=self._services.settings,
            max_parallel=DEFAULT_MAX_PARALLEL,
        )
        try:
            toolset = OwnToolset(self._own_tools, self._services, session_id=drive.session_id, own_runs=own_runs)
            yield DriveTools(self._global_tools, self._own_tools, toolset)
        finally:
            await own_runs.close()


class DriveTools:
    """The app's tools and ours, as one child may use them."""

    def __init__(self, global_tools: ChildTools, own_tools: Mapping[str, Tool], toolset: OwnToolset) -> None:
        self._global_tools = global_tools
        self._own_tools = own_tools
        self._toolset = toolset

    def names(self) -> frozenset[str]:
        return self._global_tools.names() | self._own_tools.keys()

    def toolsets(self) -> Sequence[object]:
        return [*self._global_tools.toolsets(), *([self._toolset] if self._own_tools else [])]

    def sections(self, admits: Callable[[str], bool]) -> Sequence[str]:
        return sections_of(tool for name, tool in self._own_tools.items() if admits(name))


class OwnToolset(AbstractToolset[None]):
    """Our tools, called on behalf of one child."""

    def __init__(
        self, tools: Mapping[str, Tool], services: ToolServices, *, session_id: str, own_runs: OwnRuns
    ) -> None:
        self._tools = tools
        self._services = services
        self._session_id = session_id
        self._own_runs = own_runs

    @property
    def id(self) -> str:
        return "subagent-tasks"

    async def get_tools(self, ctx: RunContext[None]) -> dict[str, ToolsetTool[None]]:
        return {name: self._offered(tool) for name, tool in self._tools.items()}

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[None], tool: ToolsetTool[None]
    ) -> str:
        called = self._tools[name]
        # Which of the conversation's messages asks, and by which id: the same when the child is driven again.
        message = sum(isinstance(known, ModelResponse) for known in ctx.messages)
        context = CallContext(
            self._session_id,
            ctx.tool_call_id,
            own_runs=self._own_runs,
            key=f"{message}:{ctx.tool_call_id}",
        )
        try:
            result = await self._own_runs.carry_out(
                lambda: called.call(self._services, context, tool_args),
                call_id=str(ctx.tool_call_id),
                is_checked=called.starts_runs,
            )
        except SubagentError as error:
            result = error_result(error)
        if result.is_error:
            raise ToolFailed(result.text)
        return result.text

    def _offered(self, tool: Tool) -> ToolsetTool[None]:
        definition = tool.definition
        return ToolsetTool(
            toolset=self,
            tool_def=ToolDefinition(
                name=definition.name,
                description=definition.description,
                parameters_json_schema=dict(definition.parameters),
                sequential=tool.exclusive,
                metadata={OWN_TOOL: True},
            ),
            max_retries=0,
            args_validator=_AsWritten(),
        )


class _AsWritten:
    """Takes a call's arguments as a host does: text that is no JSON object is kept (behaviour §7.13).

    The tools check their arguments themselves, with the contract's texts; refused here, a model's slip would end the
    child.
    """

    def validate_json(self, input: str | bytes | bytearray, **_: Any) -> dict[str, Any] | str:
        text = input if isinstance(input, str) else bytes(input).decode(errors="replace")
        return ToolCall(name="", arguments=text).arguments

    def validate_python(self, input: Any, **_: Any) -> Any:
        return input
