"""The provider `spawn`: a fresh child in this process, with nothing of its parent's conversation.

Decides the child's model, instructions and tools before it starts, so that a wrong request leaves nothing behind.
How the child then runs is `agents.loop`.
"""

from __future__ import annotations

import asyncio

from pydantic_ai.models import Model

from subagent_tasks.agents.delegation_statement import child_instructions
from subagent_tasks.agents.loop import ChildPlan, start_child
from subagent_tasks.agents.output_schema import OutputSchema
from subagent_tasks.agents.structured import OUTPUT_SECTION, OUTPUT_TOOL
from subagent_tasks.agents.tool_filter import admitted, check_filter, filtered_toolsets
from subagent_tasks.errors import ConfigurationError
from subagent_tasks.models.routes import ModelRoutes, Route, chosen_route, request_settings
from subagent_tasks.protocol.interfaces import Drive, Provider, Run
from subagent_tasks.protocol.models import AgentOptions, Capabilities, ChildRequest

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
            output_schema=True,
            depth_limit=True,
            tool_filter=True,
            persona=True,
            agent_options=True,
            prepare_continuable=True,
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
        `CallerError` (unsupported output schema), and `OperatorError` (missing package or API key).
        """
        output_schema = None if request.output_schema is None else OutputSchema.of(request.output_schema)
        settings = request_settings(
            request.agent_options,
            max_tokens=self._max_tokens,
            request_timeout_seconds=drive.model_request_timeout_seconds,
            first_event_timeout_seconds=drive.first_event_timeout_seconds,
        )
        route, model = self._model(request.agent_options)
        events = await drive.transcript()
        if not any(event.kind == "response" for event in events):
            # Once: a child that goes on may find that its deployment has dropped a tool meanwhile.
            await check_filter(request.tool_filter, drive.tools, model=model)
        shadowed = frozenset[str]() if output_schema is None else frozenset({OUTPUT_TOOL})
        plan = ChildPlan(
            model=model,
            route=route.name,
            prompt=request.prompt,
            instructions=child_instructions(
                request.persona,
                deployment_persona=self._instructions,
                sections=drive.tools.sections(admitted(request.tool_filter)),
                own_sections=() if output_schema is None else (OUTPUT_SECTION,),
            ),
            toolsets=filtered_toolsets(drive.tools, request.tool_filter, shadowed=shadowed),
            settings=settings,
            max_requests=self._max_requests,
            output_schema=output_schema,
        )
        return start_child(plan, drive, events)

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


def _default_route(model: str | Model | None, *, base_url: str | None, api_key_env: str | None) -> Route | None:
    if model is None:
        return None
    if isinstance(model, Model):
        return Route(model.system, model.model_name)
    return Route.parse(model, base_url=base_url, api_key_env=api_key_env)
