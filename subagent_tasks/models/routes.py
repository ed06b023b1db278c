"""Model routes: from `provider:model` to a pydantic-ai model, built on the worker when a child first needs it.

Decides which route a request means and builds its model once per event loop (HTTP connections belong to a loop).
Provider SDKs are imported here and only when used: each costs a second or more. Keys are read by the SDKs, or from the
variable a route names; none is ever kept, shown or put into a message.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args
from weakref import WeakKeyDictionary

from pydantic_ai.exceptions import UserError
from pydantic_ai.models import KnownModelName, Model, infer_model
from pydantic_ai.providers import Provider, infer_provider, infer_provider_class
from pydantic_ai.settings import ModelSettings, ThinkingEffort

from subagent_tasks.errors import ConfigurationError, OperatorError
from subagent_tasks.protocol.models import AgentOptions

OUR_EXTRAS = frozenset({"anthropic", "openai"})
EFFORTS: tuple[str, ...] = get_args(ThinkingEffort)
# A passing 429 or 503 should not end a child; the request's time bound holds over all tries.
MAX_RETRIES = 2

NO_EFFORT = "none"
LOCAL_KEY = "not-needed"

_ENVIRONMENT_VARIABLE = re.compile(r"`([A-Z][A-Z0-9]*_[A-Z0-9_]+)`")
_EXTRA = re.compile(r"pydantic-ai-slim\[([\w-]+)\]")


@dataclass(frozen=True, slots=True)
class Route:
    """Where a child's model requests go. `api_key_env` names an environment variable of the worker, never a key."""

    provider: str
    model: str
    base_url: str | None = None
    api_key_env: str | None = None

    @property
    def name(self) -> str:
        return f"{self.provider}:{self.model}"

    @classmethod
    def parse(cls, text: str, *, base_url: str | None = None, api_key_env: str | None = None) -> Route:
        """`provider:model`; with a `base_url` the provider may be left out: any OpenAI-compatible server will do."""
        provider, found, model = text.partition(":")
        if found and provider and model:
            return cls(provider, model, base_url, api_key_env)
        if base_url is not None and text and not found:
            return cls("openai-compatible", text, base_url, api_key_env)
        raise ConfigurationError(f'model "{text}" names no provider: write it as "provider:model", or give a base_url')


def chosen_route(options: AgentOptions | None, *, default: Route | None) -> Route | None:
    """The route `options` mean over `default`, field by field (behaviour §5.6). None if neither names one.

    Address and key variable belong to the default's provider and are kept only while the provider stays the same.
    """
    if options is None or (options.provider is None and options.model is None):
        return default
    provider = options.provider or (default.provider if default else None)
    model = options.model or (default.model if default else None)
    if provider is None or model is None:
        missing = "provider" if provider is None else "model"
        raise ConfigurationError(
            f'agent options name no {missing} (provider: {provider}; model: {model}): name both, or "provider:model"'
        )
    if default is not None and default.provider == provider:
        return Route(provider, model, default.base_url, default.api_key_env)
    return Route(provider, model)


def request_settings(
    options: AgentOptions | None,
    *,
    max_tokens: int | None,
    request_timeout_seconds: float,
    first_event_timeout_seconds: float,
) -> ModelSettings:
    """Settings of every request of a child: what the caller chose, our time bounds, and few retries."""
    settings = ModelSettings(
        request_timeout=request_timeout_seconds,
        first_event_timeout=first_event_timeout_seconds,
        max_retries=MAX_RETRIES,
    )
    limit = options.max_tokens if options and options.max_tokens is not None else max_tokens
    if limit is not None:
        settings["max_tokens"] = limit
    if options is not None and options.reasoning_effort is not None:
        settings["thinking"] = thinking_of(options.reasoning_effort)
    return settings


def thinking_of(effort: str) -> ThinkingEffort | Literal[False]:
    """A reasoning effort as pydantic-ai's setting; `none` turns reasoning off. Unknown words are refused."""
    if effort == NO_EFFORT:
        return False
    if effort not in EFFORTS:
        raise ConfigurationError(
            f'reasoning effort "{effort}" is not known; use one of: {", ".join([NO_EFFORT, *EFFORTS])}'
        )
    return cast("ThinkingEffort", effort)


@dataclass(slots=True)
class ModelRoutes:
    """The models of one worker process.

    `custom` maps provider names of a deployment's own to a function from model name to model; they come first.
    """

    custom: Mapping[str, Callable[[str], Model]] = field(default_factory=dict[str, Callable[[str], Model]])
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    _built: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Route, Model]] = field(
        default_factory=WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Route, Model]], init=False, repr=False
    )

    def model(self, route: Route) -> Model:
        """The model of `route` for the running event loop.

        Raises `ConfigurationError` for a provider nobody knows, `OperatorError` for a missing package or key.
        """
        built = self._built.setdefault(asyncio.get_running_loop(), {})
        if route not in built:
            built[route] = self._build(route)
        return built[route]

    def preload(self, route: Route) -> None:
        """Import what `route` needs. Raises as `model` does."""
        self._build(route)

    async def aclose(self) -> None:
        """Close the connections of the running event loop's models."""
        for model in self._built.pop(asyncio.get_running_loop(), {}).values():
            # Leaving a model closes the HTTP client its provider made; there is no other way to close one.
            async with model:
                pass

    def _build(self, route: Route) -> Model:
        if (factory := self.custom.get(route.provider)) is not None:
            return factory(route.model)
        key = self._key(route)
        try:
            if route.base_url is not None:
                return _model_at(route, base_url=route.base_url, key=key)
            _require_known(route.provider, self.custom)
            return infer_model(route.name, provider_factory=lambda name: _provider(name, key))
        except ImportError as error:
            raise OperatorError(_missing_package(route, error)) from error
        except UserError as error:
            raise OperatorError(_missing_setting(route, error)) from error

    def _key(self, route: Route) -> str | None:
        if route.api_key_env is None:
            return None
        key = self.environ.get(route.api_key_env)
        if not key:
            raise OperatorError(
                f'model "{route.name}" has no API key: set {route.api_key_env} in the environment of the worker'
            )
        return key


def known_providers() -> tuple[str, ...]:
    """Provider names that occur in pydantic-ai's list of models; it knows some more."""
    names = {str(name).partition(":")[0] for name in get_args(KnownModelName.__value__)}
    return tuple(sorted(name for name in names if "/" not in name and name != "test"))


def _require_known(provider: str, custom: Mapping[str, object]) -> None:
    try:
        infer_provider_class(provider)
    except ValueError as error:
        known = ", ".join([*custom, *known_providers()])
        raise ConfigurationError(
            f'model provider "{provider}" is not known; known providers: {known}. '
            "For an OpenAI-compatible server give a base_url"
        ) from error


def _provider(name: str, key: str | None) -> Provider[Any]:
    if key is None:
        return infer_provider(name)
    # Every provider that takes a key takes it under this name; the abstract class does not say so.
    return cast("Any", infer_provider_class(name))(api_key=key)


def _model_at(route: Route, *, base_url: str, key: str | None) -> Model:
    if route.provider == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel  # noqa: PLC0415  # the SDK takes 1.7 s to import
        from pydantic_ai.providers.anthropic import AnthropicProvider  # noqa: PLC0415  # as above

        return AnthropicModel(route.model, provider=AnthropicProvider(api_key=key or LOCAL_KEY, base_url=base_url))
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # noqa: PLC0415  # imported when used
    from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider  # noqa: PLC0415  # as above

    # Another server under OpenAI's name would be priced as OpenAI, and never gets OPENAI_API_KEY.
    name = "openai-compatible" if route.provider.startswith("openai") else route.provider
    provider = OpenAICompatibleProvider(name, base_url=base_url, api_key=key)
    if route.provider == "openai-responses":
        return OpenAIResponsesModel(route.model, provider=provider)
    return OpenAIChatModel(route.model, provider=provider)


def _missing_package(route: Route, error: ImportError) -> str:
    found = _EXTRA.search(str(error))
    extra = found.group(1) if found else route.provider
    package = "subagent-tasks" if extra in OUR_EXTRAS else "pydantic-ai-slim"
    return f"model \"{route.name}\" needs a package that is not installed: pip install '{package}[{extra}]'"


def _missing_setting(route: Route, error: UserError) -> str:
    names = list(dict.fromkeys(_ENVIRONMENT_VARIABLE.findall(str(error))))
    if not names:
        return f'model "{route.name}" cannot be built: its provider refused the configuration'
    return f'model "{route.name}" is not configured: set {" or ".join(names)} in the environment of the worker'
