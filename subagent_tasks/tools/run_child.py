"""A child without a tool: what a host's own code asks of a provider, structured output among it (behaviour §5.8).

Checks in the contract's order before any run exists, waits as a foreground call does, and hands back the child's own
result. What a model may ask for is `delegation_tool`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from broker_config import queue_name
from subagent_tasks.agents.output_schema import OutputSchema
from subagent_tasks.agents.tool_filter import intersection
from subagent_tasks.errors import CallerError, ChildFailed, NoProvider, UnsupportedCapability
from subagent_tasks.protocol.interfaces import Provider
from subagent_tasks.protocol.models import AgentOptions, ChildRequest, ChildResult, ToolFilter
from subagent_tasks.protocol.outcomes import failure_message
from subagent_tasks.protocol.records import RunSpec
from subagent_tasks.tools.arguments import MAX_SHORT_TEXT_BYTES
from subagent_tasks.tools.calls import CallContext, ToolServices
from subagent_tasks.tools.config import (
    PROVIDER_MANAGED,
    DelegationToolConfig,
    display_value,
    load_delegation_config,
    text_flaw,
)
from subagent_tasks.tools.foreground import ForegroundEnding, foreground_ending, run_id_of

ABORTED_BEFORE_START = "subagent request was aborted before child publication"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildCall:
    """What is asked of a provider. None is left out of the request; several filters intersect (behaviour §5.5)."""

    provider: str
    prompt: str
    label: str = ""
    output_schema: Mapping[str, Any] | None = None
    persona: str | None = None
    tool_filter: ToolFilter | Sequence[ToolFilter] | None = None
    agent_options: AgentOptions | None = None
    max_depth: int | None = None


async def run_child(
    services: ToolServices, context: CallContext, call: ChildCall, *, providers: Mapping[str, Provider]
) -> ChildResult:
    """Run one child and wait for its result.

    However the child ends is a result, also when the caller gave up. Raises, before there is a run and in this order:
    `NoProvider`, `ConfigurationError` for a value that cannot be, `UnsupportedCapability`, `CallerError` for a schema
    (`UNSUPPORTED_SCHEMA`) or a text that cannot be, and what a start raises (`LimitReached`, `Conflict`,
    `BrokerUnavailable`). Raises `ChildFailed` when the provider could not start or release the child, or its worker was
    lost.
    """
    provider = providers.get(call.provider)
    if provider is None:
        error = NoProvider(f'no subagent provider registered for "{call.provider}"')
        error.add_note(f"declared: {', '.join(providers) or 'none'}")
        raise error
    request = _request(call, provider, max_prompt_bytes=services.settings.max_prompt_bytes)
    if context.signal is not None and context.signal.is_set():
        return ChildResult(stop_reason="aborted", diagnostic=ABORTED_BEFORE_START)
    spec = RunSpec(
        provider=provider.name,
        queue=queue_name(services.settings.namespace, provider.queue or provider.name),
        label=request.label,
        call_id=context.call_id,
        request=request,
        may_resume=provider.resumable,
        run_limit_seconds=services.settings.run_limit_seconds,
    )
    return _result(await foreground_ending(services, context, run_id_of(services, context), spec))


def _request(call: ChildCall, provider: Provider, *, max_prompt_bytes: int) -> ChildRequest:
    # What stands in a tool's configuration follows its rules here too.
    config = load_delegation_config(
        provider=provider.name,
        persona=call.persona,
        tool_filter=_one_filter(call.tool_filter, provider.name),
        agent_options=call.agent_options,
        max_depth=PROVIDER_MANAGED if call.max_depth is None else call.max_depth,
    )
    _check_capabilities(config, provider, output_schema=call.output_schema)
    output_schema = None if call.output_schema is None else OutputSchema.of(call.output_schema)
    prompt = _checked_text("prompt", call.prompt, max_bytes=max_prompt_bytes)
    if not prompt.strip():
        raise CallerError("prompt is empty: say what the child is to do")
    return ChildRequest(
        label=_checked_text("label", call.label, max_bytes=MAX_SHORT_TEXT_BYTES),
        prompt=prompt,
        agent_options=config.agent_options,
        persona=config.persona,
        tool_filter=config.tool_filter,
        max_depth=config.depth_cap,
        output_schema=None if output_schema is None else output_schema.parameters,
    )


def _one_filter(given: ToolFilter | Sequence[ToolFilter] | None, provider_name: str) -> ToolFilter | None:
    if not isinstance(given, Sequence):
        return given
    filters = [load_delegation_config(provider=provider_name, tool_filter=each).tool_filter for each in given]
    return intersection([each for each in filters if each is not None])


def _check_capabilities(config: DelegationToolConfig, provider: Provider, *, output_schema: object) -> None:
    """Behaviour §2.7 step 11, in its order."""
    can = provider.capabilities
    for name, is_asked, is_there in (
        ("outputSchema", output_schema is not None, can.output_schema),
        ("depthLimit", config.depth_cap is not None, can.depth_limit),
        ("toolFilter", config.tool_filter is not None, can.tool_filter),
        ("persona", config.persona is not None, can.persona),
        ("agentOptions", config.agent_options is not None, can.agent_options),
    ):
        if is_asked and not is_there:
            raise UnsupportedCapability(f'subagent provider "{provider.name}" does not support the "{name}" capability')


def _checked_text(name: str, text: object, *, max_bytes: int) -> str:
    if not isinstance(text, str):
        raise CallerError(f"{name} must be a string, got {display_value(text)}")
    if flaw := text_flaw(text):
        raise CallerError(f"{name} {flaw}")
    size = len(text.encode())
    if size > max_bytes:
        raise CallerError(f"{name}: {size} bytes of UTF-8 exceed the limit of {max_bytes}; shorten it")
    return text


def _result(ending: ForegroundEnding) -> ChildResult:
    outcome = ending.outcome
    if outcome.error is not None or outcome.dispose_error is not None:
        raise ChildFailed((failure_message(outcome) or "").removeprefix("Error: "))
    result = ChildResult(
        stop_reason=outcome.stop_reason,
        output=outcome.output,
        diagnostic=outcome.diagnostic,
        structured=outcome.structured,
        usage=outcome.usage,
    )
    if ending.timed_out_seconds is None or result.stop_reason == "completed":
        return result
    diagnostic = f"the call timed out after {ending.timed_out_seconds:g} s"
    return result.model_copy(update={"stop_reason": "aborted", "diagnostic": diagnostic})
