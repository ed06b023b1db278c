"""The tool filter through the whole stack, where some tools are known only while their toolset is open."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic_ai.tools import RunContext, ToolDefinition
from pydantic_ai.toolsets import AbstractToolset, ToolsetTool
from pydantic_core import SchemaValidator, core_schema

from subagent_tasks import ToolFilter
from subagent_tasks.errors import ChildFailed
from subagent_tasks.testing import ScriptedModel, call_tool, fake_app, reply


class RemoteTools(AbstractToolset[None]):
    """As an MCP server: its names are known while it is open."""

    @property
    def id(self) -> str:
        return "remote"

    async def get_tools(self, ctx: RunContext[None]) -> dict[str, ToolsetTool[None]]:
        validator = SchemaValidator(core_schema.any_schema())
        tool = ToolsetTool(
            toolset=self, tool_def=ToolDefinition(name="fetch_page"), max_retries=1, args_validator=validator
        )
        return {"fetch_page": tool}

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[None], tool: ToolsetTool[None]
    ) -> str:
        return "a page"


async def test_a_filter_on_remote_tools_is_checked_where_they_are() -> None:
    """behaviour §5.5, §10.152: known names pass, an unknown one fails the start: no orphan, no model request."""
    model = ScriptedModel()
    model.on("fetch", [call_tool("fetch_page", {}), reply("fetched")])
    async with fake_app(model, tools=[RemoteTools()]) as kit:
        allowed = ToolFilter(allow=("fetch_page",))
        assert (await kit.session.run_child("spawn", "fetch", tool_filter=allowed)).text == "fetched"
        assert model.seen[0].tools == ("fetch_page",)
        with pytest.raises(ChildFailed) as caught:
            await kit.session.run_child("spawn", "fetch", tool_filter=ToolFilter(deny=("fetch_pag",)), call_id="c1")
    assert str(caught.value) == (
        'tools.restrict() names unknown global tool(s) "fetch_pag"; '
        "known global tools: fetch_page, job_kill, job_list, job_output, subagent"
    )
    assert model.requests == 2
