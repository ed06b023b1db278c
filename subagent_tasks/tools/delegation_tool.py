"""The delegation tool in action: `subagent` and its siblings (behaviour §2).

Checks in the contract's order and starts the run. How a host waits for one is `foreground`'s, what is admitted is
decided in the admitting script, what a result says in `render`.
"""

from __future__ import annotations

from typing import Any

from subagent_tasks.errors import ToolError
from subagent_tasks.own_runs import OwnRuns
from subagent_tasks.protocol.interfaces import Provider
from subagent_tasks.protocol.models import ChildRequest, Mode, ToolDefinition, ToolResult
from subagent_tasks.protocol.records import RunSpec
from subagent_tasks.tools.arguments import (
    DelegationArguments,
    check_job_label,
    foreground_or_background,
    parse_delegation,
)
from subagent_tasks.tools.calls import CallContext, ToolServices, within
from subagent_tasks.tools.config import DelegationToolConfig, check_provider
from subagent_tasks.tools.definitions import delegation_section, delegation_tool
from subagent_tasks.tools.foreground import foreground_ending, run_id_of
from subagent_tasks.tools.render import background_started, foreground_result, timed_out


class DelegationTool:
    """One configured delegation tool over its provider. Raises `ConfigurationError` when they do not fit."""

    exclusive = False
    starts_runs = True
    section_order = 116.5

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
        run_id = run_id_of(services, context)
        if context.own_runs is not None:
            return await self._by_child(context.own_runs, context, run_id, mode, spec)
        if mode == "background":
            starting = services.delegation.start(run_id, owner=context.session_id, mode=mode, spec=spec)
            await within(starting, wait_seconds=context.timeout_seconds)
            return background_started(run_id)
        ending = await foreground_ending(services, context, run_id, spec)
        if ending.timed_out_seconds is not None:
            return timed_out(run_id, ending.outcome, timeout_seconds=ending.timed_out_seconds)
        return foreground_result(run_id, ending.outcome)

    async def _by_child(
        self, own_runs: OwnRuns, context: CallContext, run_id: str, mode: Mode, spec: RunSpec
    ) -> ToolResult:
        call_id = str(context.call_id)
        if mode == "background":
            await own_runs.start(run_id, mode=mode, spec=spec)
            return background_started(run_id)
        async with own_runs.place(call_id=call_id):
            outcome = await own_runs.outcome(run_id)
            if outcome is None:
                await own_runs.start(run_id, mode=mode, spec=spec)
                outcome = await own_runs.ending(run_id, call_id=call_id)
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
