"""Which of the global tools a child sees and may call (behaviour §5.5).

A filter is applied anew at every step: one that denies admits tools that come later, one that allows does not. A name
that no tool has is refused before the child begins. The child's own tools are none of the filter's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from pydantic_ai.models import Model
from pydantic_ai.tools import RunContext, ToolDefinition
from pydantic_ai.toolsets import AbstractToolset
from pydantic_ai.usage import RunUsage

from subagent_tasks.errors import ConfigurationError
from subagent_tasks.protocol.interfaces import ChildTools
from subagent_tasks.protocol.models import ToolFilter


def intersection(filters: Sequence[ToolFilter]) -> ToolFilter | None:
    """One filter that admits what all admit; None for none.

    Every name stays in it: one that only some allow is denied, so that a misspelt one is still found out.
    """
    allowed = [dict.fromkeys(each.allow) for each in filters if each.allow is not None]
    denied = dict.fromkeys(name for each in filters for name in each.deny or ())
    if not allowed:
        return ToolFilter(deny=tuple(denied)) if filters else None
    named = dict.fromkeys(name for names in allowed for name in names)
    kept = tuple(name for name in named if all(name in names for names in allowed))
    denied |= dict.fromkeys(name for name in named if name not in kept)
    return ToolFilter(allow=kept, deny=tuple(denied) or None)


async def check_filter(tool_filter: ToolFilter | None, tools: ChildTools, *, model: Model) -> None:
    """Raise `ConfigurationError` for a filter that names what is no global tool.

    Toolsets whose tools are known only while they are open are opened for that, if nothing else has the name; what they
    raise is raised. `model` is the child's: toolsets may ask for it.
    """
    if tool_filter is None:
        return
    named = {*(tool_filter.allow or ()), *(tool_filter.deny or ())}
    known = tools.names()
    if named <= known:
        return
    known |= await _names_when_open(_toolsets_of(tools), model)
    if unknown := sorted(named - known):
        quoted = ", ".join(f'"{name}"' for name in unknown)
        raise ConfigurationError(
            f"tools.restrict() names unknown global tool(s) {quoted}; known global tools: {', '.join(sorted(known))}"
        )


def filtered_toolsets(
    tools: ChildTools, tool_filter: ToolFilter | None, *, shadowed: frozenset[str] = frozenset()
) -> Sequence[AbstractToolset[None]]:
    """The global tools that the filter admits. `shadowed` are the names that the child's own tools have."""
    toolsets = _toolsets_of(tools)
    if tool_filter is None and not shadowed:
        return toolsets
    admits = admitted(tool_filter)

    def shows(ctx: RunContext[None], definition: ToolDefinition) -> bool:
        return admits(definition.name) and definition.name not in shadowed

    return [toolset.filtered(shows) for toolset in toolsets]


def admitted(tool_filter: ToolFilter | None) -> Callable[[str], bool]:
    """Whether a global tool of that name passes."""
    return (lambda name: True) if tool_filter is None else tool_filter.admits


def _toolsets_of(tools: ChildTools) -> Sequence[AbstractToolset[None]]:
    return cast("Sequence[AbstractToolset[None]]", tools.toolsets())


async def _names_when_open(toolsets: Sequence[AbstractToolset[None]], model: Model) -> set[str]:
    context = RunContext[None](deps=None, model=model, usage=RunUsage())
    names: set[str] = set()
    for toolset in toolsets:
        # As an agent run does it; closed again, since the run is another task and opens it for itself.
        async with await toolset.for_run(context) as opened:
            names |= (await (await opened.for_run_step(context)).get_tools(context)).keys()
    return names
