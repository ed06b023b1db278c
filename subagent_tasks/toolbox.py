"""The app's global tools: what a child may use, plain functions and pydantic-ai toolsets alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

from pydantic_ai.tools import RunContext, ToolDefinition
from pydantic_ai.tools import Tool as FunctionTool
from pydantic_ai.toolsets import AbstractToolset, FunctionToolset

from subagent_tasks.agents.structured import OUTPUT_TOOL
from subagent_tasks.errors import ConfigurationError
from subagent_tasks.protocol.interfaces import IN_THREAD

ToolLike = Callable[..., Any] | FunctionTool[None] | AbstractToolset[None]


class Toolbox:
    """Implements `ChildTools` for every child of one app."""

    def __init__(self) -> None:
        self._functions: FunctionToolset[None] = FunctionToolset()
        self._others: list[AbstractToolset[None]] = []

    def add(self, tool: ToolLike, *, taken: frozenset[str]) -> None:
        """Add a function or a toolset. Raises `ConfigurationError` for a taken name and for what is no tool."""
        if isinstance(tool, AbstractToolset):
            toolset = cast("AbstractToolset[None]", tool)
            if isinstance(toolset, FunctionToolset):
                self._claim(toolset.tools, taken)
            self._others.append(toolset)
            return
        if not isinstance(tool, FunctionTool) and not callable(tool):
            raise ConfigurationError(
                f"add_tool expects a function or a pydantic-ai toolset, got {type(tool).__name__}: "
                "pass the function itself"
            )
        try:
            made = cast(
                "FunctionTool[None]",
                tool if isinstance(tool, FunctionTool) else FunctionTool(tool),
            )
        except Exception as error:
            name = getattr(cast("object", tool), "__name__", "?")
            raise ConfigurationError(
                f"tool {name!r} cannot be described to a model ({type(error).__name__}: {error}): "
                "annotate its parameters with types that JSON can carry"
            ) from error
        self._claim((made.name,), taken)
        self._functions.add_tool(made)

    def names(self) -> frozenset[str]:
        """The names known by now: a toolset of functions may grow, others tell theirs only while they are open."""
        return frozenset(
            name
            for toolset in (self._functions, *self._others)
            if isinstance(toolset, FunctionToolset)
            for name in toolset.tools
        )

    def toolsets(self) -> Sequence[AbstractToolset[None]]:
        return [_with_threads_marked(toolset) for toolset in (self._functions, *self._others)]

    def sections(self, admits: Callable[[str], bool]) -> Sequence[str]:
        return ()

    def _claim(self, names: Iterable[str], taken: frozenset[str]) -> None:
        for name in names:
            if name in self.names() or name in taken:
                raise ConfigurationError(f'tool "{name}" is already registered: rename one of the two')
            if name == OUTPUT_TOOL:
                raise ConfigurationError(f'tool "{name}" is what children hand in structured output with: rename yours')


def _with_threads_marked(toolset: AbstractToolset[None]) -> AbstractToolset[None]:
    """The toolset, its plain functions marked as what they are."""
    if not isinstance(toolset, FunctionToolset):
        return toolset

    def is_plain(name: str) -> bool:
        return name in toolset.tools and not toolset.tools[name].function_schema.is_async

    async def mark(_: RunContext[None], definitions: list[ToolDefinition]) -> list[ToolDefinition]:
        return [
            replace(each, metadata={**(each.metadata or {}), IN_THREAD: True}) if is_plain(each.name) else each
            for each in definitions
        ]

    return toolset.prepared(mark)
