"""The declaration: tools, providers and delegation tools of one application, imported by hosts and workers alike.

Everything wrong with it is said where it is declared. Nothing connects before a host is opened or a worker starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic.alias_generators import to_snake

from broker_config import BrokerSettings, load_settings
from subagent_tasks.errors import ConfigurationError, DuplicateProvider, NoProvider
from subagent_tasks.events import Listener, Listeners
from subagent_tasks.host import Host
from subagent_tasks.protocol.interfaces import Provider
from subagent_tasks.queue.app import Celery, make_celery, make_publisher
from subagent_tasks.sync_host import SyncHost
from subagent_tasks.toolbox import Toolbox, ToolLike
from subagent_tasks.tools.calls import Tool
from subagent_tasks.tools.config import (
    DeclaredConfig,
    DelegationToolConfig,
    JobToolsConfig,
    load_delegation_config,
    load_job_tools_config,
)
from subagent_tasks.tools.delegation_tool import DelegationTool
from subagent_tasks.tools.job_tools import make_job_tools
from subagent_tasks.worker import WorkerDriver, queue_of


class SubagentApp:
    """One declaration. `settings` are read from the environment unless given.

    app = SubagentApp()
    app.add_tool(read_file)
    app.add_provider(SpawnProvider(model="openai:gpt-5-mini"))
    app.add_delegation_tool(provider="spawn")
    celery = app.celery
    """

    def __init__(self, settings: BrokerSettings | None = None) -> None:
        try:
            self.settings = settings or load_settings()
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        self._providers: dict[str, Provider] = {}
        self._toolbox = Toolbox()
        self._listeners = Listeners()
        # tool name -> its configuration; mounted once its provider is there (behaviour §2.5)
        self._declared: dict[str, DelegationToolConfig] = {}
        self._job_tools: JobToolsConfig | None = None
        self._celery: Celery | None = None
        self._driver: WorkerDriver | None = None

    def add_tool(self, tool: ToolLike) -> None:
        """A tool every child may use: a function, sync or async, or a pydantic-ai toolset."""
        self._toolbox.add(tool, taken=frozenset(self._own_names()))

    def add_provider(self, provider: Provider) -> None:
        """A way to run children. Delegation tools declared for it before are checked now; if one does not fit, the
        provider is refused, and they go on waiting."""
        if not isinstance(provider, Provider):  # pyright: ignore[reportUnnecessaryIsInstance]  # untyped callers
            raise ConfigurationError(f"add_provider expects a Provider, got {type(provider).__name__}")
        if not getattr(provider, "name", ""):
            raise ConfigurationError(f"the provider {type(provider).__name__} has no name: set its `name`")
        if provider.name in self._providers:
            raise DuplicateProvider(f'a subagent provider named "{provider.name}" is already registered')
        if self._celery is not None:
            raise ConfigurationError(
                f'provider "{provider.name}" is declared after app.celery was used: declare all providers first'
            )
        try:
            queue = queue_of(provider, self.settings.namespace)
        except ValueError as error:
            raise ConfigurationError(f'provider "{provider.name}": {error}') from error
        for config in self._declared.values():
            if config.provider == provider.name:
                DelegationTool(config, provider, queue=queue)
        self._providers[provider.name] = provider

    def add_delegation_tool(self, config: DelegationToolConfig | None = None, /, **values: Any) -> None:
        """A tool that delegates to one provider: keys of `DelegationToolConfig`, in either spelling.

        It is visible once its provider is declared. Raises `ConfigurationError` for a key, value or combination that
        cannot work, and for a tool name that is taken.
        """
        _check_given(config, values, DelegationToolConfig)
        config = config or load_delegation_config(**values)
        if config.tool_name in self._own_names() or config.tool_name in self._toolbox.names():
            raise ConfigurationError(f'tool "{config.tool_name}" is already registered: give it another tool_name')
        limit_seconds = self.settings.run_limit_seconds
        if config.run_limit_seconds is not None and config.run_limit_seconds > limit_seconds:
            raise ConfigurationError(
                f"tool-subagent: run_limit_seconds ({config.run_limit_seconds:g}) exceeds the deployment's "
                f"SUBAGENT_TASKS_RUN_LIMIT_SECONDS ({limit_seconds:g}): lower the one or raise the other"
            )
        provider = self._providers.get(config.provider)
        if provider is not None:
            DelegationTool(config, provider, queue=queue_of(provider, self.settings.namespace))
        self._declared[config.tool_name] = config

    def add_job_tools(self, config: JobToolsConfig | None = None, /, **values: Any) -> None:
        """`job_output`, `job_list` and `job_kill`: off until called."""
        _check_given(config, values, JobToolsConfig)
        if self._job_tools is not None:
            raise ConfigurationError('tool "job_output" is already registered: call add_job_tools once')
        for name in JOB_TOOL_NAMES:
            if name in self._own_names() or name in self._toolbox.names():
                raise ConfigurationError(f'tool "{name}" is already registered: rename it')
        if config is None:
            # The deployment's waits, unless the declaration names its own.
            waits = {
                "wait_timeout_ms": int(self.settings.wait_timeout_seconds * 1000),
                "max_wait_timeout_ms": int(self.settings.max_wait_timeout_seconds * 1000),
            }
            given = {to_snake(name) for name in values}
            config = load_job_tools_config(**{name: ms for name, ms in waits.items() if name not in given}, **values)
        self._job_tools = config

    def on_event(self, listener: Listener) -> None:
        """Call `listener` with `RunStarted` and `RunEnded` in the worker that drives the run.

        It is called on the worker's event loop, so it must not block. What an async one returns is awaited beside the
        run, which does not wait for it.
        """
        self._listeners.add(listener)

    def tools(self) -> dict[str, Tool]:
        """The tools a parent's model sees, by name, in the order they were declared."""
        tools: dict[str, Tool] = {}
        for name, config in self._declared.items():
            provider = self._providers.get(config.provider)
            if provider is not None:
                tools[name] = DelegationTool(
                    config,
                    provider,
                    queue=queue_of(provider, self.settings.namespace),
                    has_job_tools=self._job_tools is not None,
                )
        if self._job_tools is not None:
            tools |= {tool.definition.name: tool for tool in make_job_tools(self._job_tools)}
        return tools

    @property
    def providers(self) -> dict[str, Provider]:
        """The declared providers, in the order they were declared."""
        return dict(self._providers)

    @property
    def queues(self) -> list[str]:
        """The Celery queues of the declared providers."""
        return sorted({queue_of(provider, self.settings.namespace) for provider in self._providers.values()})

    @property
    def celery(self) -> Celery:
        """The Celery app: `celery -A agents worker`, Flower and `celery inspect` work on it."""
        self._check_providers()
        if self._celery is None:
            self._driver = WorkerDriver(
                self.settings,
                providers=self._providers,
                tools=self._toolbox,
                own_tools=self.tools,
                listener=self._listeners,
            )
            self._celery = make_celery(
                self.settings,
                queues=[provider.queue or provider.name for provider in self._providers.values()],
                driver=self._driver,
            )
            self._driver.publisher = make_publisher(self.settings, self._celery)
        return self._celery

    def host(self) -> Host:
        """A process that opens parent sessions: `async with app.host() as host`."""
        return Host(
            self.settings,
            tools=self.tools(),
            providers=self.providers,
            publisher=make_publisher(self.settings, self.celery),
            queues=self.queues,
            job_tools=self._job_tools,
        )

    def sync_host(self) -> SyncHost:
        """The same, blocking: `with app.sync_host() as host`."""
        return SyncHost(self.host)

    def _check_providers(self) -> None:
        """From here on no provider can be declared any more, so a tool without one would be missing for ever."""
        for name, config in self._declared.items():
            if config.provider not in self._providers:
                declared = ", ".join(self._providers) or "none"
                raise NoProvider(
                    f'no subagent provider registered for "{config.provider}", which the delegation tool "{name}" '
                    f"names (declared: {declared}): call app.add_provider first, or correct the tool's provider"
                )

    def _own_names(self) -> set[str]:
        return {*self._declared, *(JOB_TOOL_NAMES if self._job_tools is not None else ())}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # `celery -A agents` takes the module's `app` before its `celery`: what Celery's command line asks of this
            # object, the Celery app answers. Typed code does not see this.
            if name.startswith("__"):
                raise AttributeError(name)
            return getattr(self.celery, name)


def _check_given(config: object, values: dict[str, Any], expected: type[DeclaredConfig]) -> None:
    if config is not None and values:
        raise ConfigurationError(f"pass a {expected.__name__} or its keys, not both")
    if config is not None and not isinstance(config, expected):
        raise ConfigurationError(
            f"expected a {expected.__name__} or its keys, got {type(config).__name__}: "
            "write the keys as keyword arguments"
        )


JOB_TOOL_NAMES = ("job_output", "job_list", "job_kill")
