"""The provider `spawn`: a fresh child in this process, with nothing of its parent's conversation.

Decides the child's model, instructions and tools before it starts, so that a wrong request leaves nothing behind.
How the child then runs is `agents.loop`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from pydantic_ai.models import Model
from pydantic_ai.tools import RunContext, ToolDefinition
from pydantic_ai.toolsets import AbstractToolset

from subagent_tasks.agents.delegation_statement import child_instructions
from subagent_tasks.agents.loop import ChildPlan, start_child
from subagent_tasks.errors import ConfigurationError, UnsupportedCapability
from subagent_tasks.models.routes import ModelRoutes, Route, chosen_route, request_settings
from subagent_tasks.protocol.interfaces import ChildTools, Drive, Provider, Run
from subagent_tasks.protocol.models import AgentOptions, Capabilities, ChildRequest, ToolFilter

MAX_REQUESTS = 200


class SpawnProvider(Provider):
    """Runs a child as an agent loop on the worker.

    `model` is `provider:model`, or a pydantic-ai model to use as it is; None leaves the choice to each request.
    `instructions` are the deployment's persona, which a request's persona replaces. `base_url` points at an
    OpenAI-compatible (or, for `anthropic:`, a Messages) server; `api_key_env` names the worker's environment variable
    that holds its key. `max_tokens` bounds one model answer, `max_requests` the model requests of one child: a child
    that reaches it ends `error`. `routes` adds model providers of the deployment's own.
    """

    def __init__(
        self,
        model: str | Model | None = None,
        *,
        name: str = "spawn",
        instructions: str | None = None,
        base_url: str | None = None,
        api_key_env: str | None = None,
        queue: str = "",
        max_tokens: int | None = None,
        max_requests: int = MAX_REQUESTS,
        routes: ModelRoutes | None = None,
    ) -> None:
        if model is None and base_url is not None:
            raise ConfigurationError(f'provider "{name}" has a base_url but no model: name the model it serves')
        if max_requests < 1:
            raise ConfigurationError(f'provider "{name}": max_requests is {max_requests}, it must be at least 1')
        if max_tokens is not None and max_tokens < 1:
            raise ConfigurationError(f'provider "{name}": max_tokens is {max_tokens}, it must be at least 1')
        self.name = name
        self.queue = queue
        self.capabilities = Capabilities(
            depth_limit=True, tool_filter=True, persona=True, agent_options=True, prepare_continuable=True
        )
        self.inherits_parent_context = False
        self.resumable = True
        self._instance = model if isinstance(model, Model) else None
        self._default = _default_route(model, base_url=base_url, api_key_env=api_key_env)
        self._instructions = instructions
        self._max_tokens = max_tokens
        self._max_requests = max_requests
        self._routes = routes if routes is not None else ModelRoutes()

    async def prepare(self) -> None:
        """Import the model's client: on the event loop its second or two would hold up every other child.

        Raises `ConfigurationError` or `OperatorError` for a model that no child could be run on.
        """
        if self._default is not None and self._instance is None:
            await asyncio.to_thread(self._routes.preload, self._default)

    async def start(self, request: ChildRequest, drive: Drive) -> Run:
        """Start a child, or go on with it where its transcript ends.

        Raises `ConfigurationError` (unknown tool in the filter, no or unknown model, unknown reasoning effort),
        `UnsupportedCapability`, and `OperatorError` (missing package or API key).
        """
        if request.output_schema is not None:
            raise UnsupportedCapability(f'provider "{self.name}" does not support an output schema')
        toolsets = filtered_toolsets(drive.tools, request.tool_filter)
        sections = drive.tools.sections(request.tool_filter.admits if request.tool_filter else _everything)
        settings = request_settings(
            request.agent_options,
            max_tokens=self._max_tokens,
            request_timeout_seconds=drive.model_request_timeout_seconds,
            first_event_timeout_seconds=drive.first_event_timeout_seconds,
        )
        route, model = self._model(request.agent_options)
        plan = ChildPlan(
            model=model,
            route=route.name,
            prompt=request.prompt,
            instructions=child_instructions(request.persona, deployment_persona=self._instructions, sections=sections),
            toolsets=toolsets,
            settings=settings,
            max_requests=self._max_requests,
        )
        return await start_child(plan, drive)

    def _model(self, options: AgentOptions | None) -> tuple[Route, Model]:
        route = chosen_route(options, default=self._default)
        if route is None:
            raise ConfigurationError(
                f'provider "{self.name}" has no model: give SpawnProvider(model="provider:model") or name one in the '
                "agent options"
            )
        if self._instance is not None and route == self._default:
            return route, self._instance
        return route, self._routes.model(route)


def filtered_toolsets(tools: ChildTools, tool_filter: ToolFilter | None) -> Sequence[AbstractToolset[None]]:
    """The child's toolsets: a name that does not pass the filter is neither shown nor callable (behaviour §5.5)."""
    toolsets = cast("Sequence[AbstractToolset[None]]", tools.toolsets())
    if tool_filter is None:
        return toolsets
    known = tools.names()
    if unknown := sorted({*(tool_filter.allow or ()), *(tool_filter.deny or ())} - known):
        quoted = ", ".join(f'"{name}"' for name in unknown)
        raise ConfigurationError(
            f"tools.restrict() names unknown global tool(s) {quoted}; known global tools: {', '.join(sorted(known))}"
        )

    def admits(ctx: RunContext[None], definition: ToolDefinition) -> bool:
        return tool_filter.admits(definition.name)

    return [toolset.filtered(admits) for toolset in toolsets]


def _everything(name: str) -> bool:
    return True


def _default_route(model: str | Model | None, *, base_url: str | None, api_key_env: str | None) -> Route | None:
    if model is None:
        return None
    if isinstance(model, Model):
        return Route(model.system, model.model_name)
    return Route.parse(model, base_url=base_url, api_key_env=api_key_env)
