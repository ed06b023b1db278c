"""The delegation tool in action: `subagent` and its siblings (behaviour §2).

Checks in the contract's order, starts the run, and for a foreground call waits for its ending. What is admitted is
decided in the admitting script, what a result says in `render`.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from subagent_tasks.errors import BrokerUnavailable, CallerError, ToolError
from subagent_tasks.own_runs import OwnRuns
from subagent_tasks.protocol.ids import run_id_for_call
from subagent_tasks.protocol.interfaces import Provider
from subagent_tasks.protocol.models import ChildRequest, Mode, Outcome, ToolDefinition, ToolResult
from subagent_tasks.protocol.records import RunSpec
from subagent_tasks.tools.arguments import (
    DelegationArguments,
    check_job_label,
    foreground_or_background,
    parse_delegation,
)
from subagent_tasks.tools.calls import ANSWER_SECONDS, CallContext, ToolServices, within
from subagent_tasks.tools.config import DelegationToolConfig, check_provider
from subagent_tasks.tools.definitions import delegation_section, delegation_tool
from subagent_tasks.tools.render import background_started, foreground_result, timed_out

PARTIAL_SECONDS = 1.0
"""How long a caller that gives up still waits for the child to say how far it came."""


class DelegationTool:
    """One configured delegation tool over its provider. Raises `ConfigurationError` when they do not fit."""

    exclusive = False
    starts_runs = True

    def __init__(
        self, config: DelegationToolConfig, provider: Provider, *, queue: str, has_job_tools: bool = True
    ) -> None:
        check_provider(config, provider_name=provider.name, capabilities=provider.capabilities)
        self._config = config
        self._provider = provider
        self._queue = queue
        self._has_job_tools = has_job_tools
        self.definition: ToolDefinition = delegation_tool(
            config, inherits_parent_context=provider.inherits_parent_context
        )
        self.section = delegation_section(config)

    async def call(self, services: ToolServices, context: CallContext, arguments: dict[str, Any] | str) -> ToolResult:
        """Delegate (behaviour §2.7, §2.8, §3.1)."""
        parsed = parse_delegation(arguments, max_prompt_bytes=services.settings.max_prompt_bytes)
        mode = foreground_or_background(parsed, self._config)
        self._refuse_what_is_to_come(parsed, mode)
        if mode == "background":
            self._check_collectable()
            check_job_label(parsed.description)
        run_limit_seconds = self._config.run_limit_seconds or services.settings.run_limit_seconds
        spec = RunSpec(
            provider=self._provider.name,
            tool=self._config.tool_name,
            queue=self._queue,
            label=parsed.description,
            call_id=context.call_id,
            request=ChildRequest(
                label=parsed.description,
                prompt=parsed.prompt,
                agent_options=self._config.agent_options,
                persona=self._config.persona,
                tool_filter=self._config.tool_filter,
                max_depth=self._config.depth_cap,
            ),
            may_resume=self._provider.resumable and self._config.recovery != "fail",
            run_limit_seconds=run_limit_seconds,
            owner_queue=context.own_runs.queue if context.own_runs else None,
        )
        run_id = self._run_id(services, context)
        if context.own_runs is not None:
            return await self._by_child(context.own_runs, run_id, mode, spec)
        if mode == "background":
            starting = services.delegation.start(run_id, owner=context.session_id, mode=mode, spec=spec)
            await within(starting, wait_seconds=context.timeout_seconds)
            return background_started(run_id)
        return await self._foreground(services, context, run_id, spec)

    async def _by_child(self, own_runs: OwnRuns, run_id: str, mode: Mode, spec: RunSpec) -> ToolResult:
        if mode == "background":
            await own_runs.start(run_id, mode=mode, spec=spec)
            return background_started(run_id)
        async with own_runs.place():
            await own_runs.start(run_id, mode=mode, spec=spec)
            outcome = await own_runs.ending(run_id)
            assert outcome is not None, "a wait without a limit ends with the run"
            return foreground_result(run_id, outcome)

    def _check_collectable(self) -> None:
        """A job that nobody could read or stop is refused before anything starts (behaviour §2.7 step 10)."""
        if self._config.background_mode == "one-shot" and not self._has_job_tools:
            raise ToolError(
                "background jobs unavailable: this app declares no job_output, job_list and job_kill; "
                "call app.add_job_tools() where it is declared, or delegate without run_in_background"
            )

    def _refuse_what_is_to_come(self, parsed: DelegationArguments, mode: Mode) -> None:
        """The configuration may name what this version cannot carry out; a call that needs it must not do less."""
        if mode == "background" and self._config.background_mode == "continuable":
            raise ToolError(
                "continuable subagents are not available in this version: pass run_in_background: false",
                code="UNSUPPORTED_CAPABILITY",
            )
        if parsed.selects_model:
            raise ToolError(
                "choosing the child's model is not available in this version: leave out provider, model and "
                "reasoning_effort",
                code="UNSUPPORTED_CAPABILITY",
            )

    def _run_id(self, services: ToolServices, context: CallContext) -> str:
        key = context.key or context.call_id
        if key is None:
            return services.new_id()
        return run_id_for_call(namespace=services.settings.namespace, session_id=context.session_id, call_id=key)

    async def _foreground(self, services: ToolServices, context: CallContext, run_id: str, spec: RunSpec) -> ToolResult:
        # Expected before it is admitted: a child that ends at once is not missed.
        ending = services.waiting.expect(run_id)
        starting = asyncio.ensure_future(
            services.delegation.start(run_id, owner=context.session_id, mode="foreground", spec=spec)
        )
        try:
            timeout_seconds = min(context.timeout_seconds or spec.run_limit_seconds, spec.run_limit_seconds)
            deadline = time.monotonic() + timeout_seconds
            try:
                known = await within(asyncio.shield(starting), wait_seconds=timeout_seconds)
                if known:
                    services.waiting.look(run_id)
                outcome = await _first(ending, context.signal, timeout_seconds=deadline - time.monotonic())
            except asyncio.CancelledError:
                # The caller's task is cancelled: the child goes with it, and the cancellation goes on.
                await asyncio.shield(_withdraw(services, context, run_id, starting))
                raise
            except BrokerUnavailable:
                # It may have been admitted all the same: the caller repeats the call, or nobody waits for the run.
                services.delegation.withdraw(
                    run_id,
                    owner=context.session_id,
                    starting=starting,
                    unless=lambda: services.waiting.is_expected(run_id),
                )
                raise
            except CallerError:
                # The host stops, and the call with it.
                services.delegation.withdraw(run_id, owner=context.session_id, starting=starting)
                raise
            if outcome is not None:
                return foreground_result(run_id, outcome)
            asked = await _withdraw(services, context, run_id, starting)
            # Whoever could not be asked has nothing to say.
            outcome = await _first(ending, None, timeout_seconds=PARTIAL_SECONDS if asked else 0)
            outcome = outcome or Outcome(status="killed", stop_reason="aborted")
            if context.signal is not None and context.signal.is_set():
                return foreground_result(run_id, outcome)
            return timed_out(run_id, outcome, timeout_seconds=timeout_seconds)
        finally:
            services.waiting.forget(run_id)


async def _withdraw(services: ToolServices, context: CallContext, run_id: str, starting: asyncio.Future[bool]) -> bool:
    """The caller gave up: ask the child to end. Whether it was asked by now; if not, the asking goes on (P8)."""
    withdrawal = services.delegation.withdraw(run_id, owner=context.session_id, starting=starting)
    await asyncio.wait({withdrawal}, timeout=ANSWER_SECONDS)
    return withdrawal.done()


async def _first(
    ending: asyncio.Future[Outcome], signal: asyncio.Event | None, *, timeout_seconds: float
) -> Outcome | None:
    """The outcome, or None when the signal was set or the time was over first. An outcome that is there wins."""
    watched: set[asyncio.Future[Any]] = {ending}
    watcher = None if signal is None else asyncio.ensure_future(signal.wait())
    if watcher is not None:
        watched.add(watcher)
    try:
        await asyncio.wait(watched, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if watcher is not None:
            watcher.cancel()
    return ending.result() if ending.done() else None
