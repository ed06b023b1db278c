"""`job_output`, `job_list` and `job_kill` in action (behaviour §3.5). Texts are in `render`."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

from subagent_tasks.errors import SubagentError
from subagent_tasks.protocol.models import ToolDefinition, ToolResult
from subagent_tasks.protocol.records import RunRecord
from subagent_tasks.tools.arguments import JobOutputArguments, parse_job_kill, parse_job_list, parse_job_output, wait_ms
from subagent_tasks.tools.calls import CallContext, Tool, ToolServices, within
from subagent_tasks.tools.config import JobToolsConfig
from subagent_tasks.tools.definitions import JOBS_SECTION, job_tools
from subagent_tasks.tools.render import (
    foreign_job,
    job_kill_result,
    job_list_result,
    job_output_result,
    unknown_job,
)


def make_job_tools(config: JobToolsConfig) -> tuple[Tool, ...]:
    """The three job tools; the first carries their prompt section."""
    output, listing, kill = job_tools(config)
    return JobOutput(output, config), JobList(listing), JobKill(kill)


class JobOutput:
    """Reads a job; with `wait`, waits for its end up to the cap."""

    section = JOBS_SECTION
    section_order = 106
    exclusive = False
    starts_runs = False

    def __init__(self, definition: ToolDefinition, config: JobToolsConfig) -> None:
        self.definition = definition
        self._config = config

    async def call(self, services: ToolServices, context: CallContext, arguments: dict[str, Any] | str) -> ToolResult:
        parsed = parse_job_output(arguments)
        with services.waiting.reading(parsed.job_id, session_id=context.session_id):
            return await self._read(services, context, parsed)

    async def _read(self, services: ToolServices, context: CallContext, parsed: JobOutputArguments) -> ToolResult:
        timeout_seconds = wait_ms(parsed, self._config) / 1000
        if context.timeout_seconds is not None:
            timeout_seconds = min(timeout_seconds, context.timeout_seconds)
        deadline = time.monotonic() + timeout_seconds
        record = await within(_collect(services, context, parsed.job_id), wait_seconds=timeout_seconds)
        if not parsed.wait or record.is_settled:
            return job_output_result(record.snapshot(), record.outcome)
        if context.own_runs is not None:
            # From when the call was made, however often the child is driven until it is answered.
            until_ms = context.own_runs.last_response_at_ms + int(timeout_seconds * 1000)
            await context.own_runs.ending(parsed.job_id, call_id=str(context.call_id), until_ms=until_ms)
            record = await _collect(services, context, parsed.job_id)
            return job_output_result(record.snapshot(), record.outcome)
        ended = await _wait(services, context, parsed.job_id, timeout_seconds=deadline - time.monotonic())
        if ended == "aborted":
            raise SubagentError("wait aborted", code="ABORTED")
        record = await within(_collect(services, context, parsed.job_id), wait_seconds=deadline - time.monotonic())
        return job_output_result(record.snapshot(), record.outcome)


class JobList:
    """Lists the session's jobs in the order they were registered."""

    section = ""
    section_order = 106
    exclusive = False
    starts_runs = False

    def __init__(self, definition: ToolDefinition) -> None:
        self.definition = definition

    async def call(self, services: ToolServices, context: CallContext, arguments: dict[str, Any] | str) -> ToolResult:
        parse_job_list(arguments)
        jobs = await within(services.delegation.jobs(context.session_id), wait_seconds=context.timeout_seconds)
        return job_list_result(jobs)


class JobKill:
    """Asks a job to end and returns at once."""

    section = ""
    section_order = 106
    exclusive = False
    starts_runs = False

    def __init__(self, definition: ToolDefinition) -> None:
        self.definition = definition

    async def call(self, services: ToolServices, context: CallContext, arguments: dict[str, Any] | str) -> ToolResult:
        parsed = parse_job_kill(arguments)
        asking = kill_job(services, context, parsed.job_id, reason=parsed.reason)
        return await within(asking, wait_seconds=context.timeout_seconds)


async def kill_job(
    services: ToolServices, context: CallContext, job_id: str, *, reason: str | None, by_owner_model: bool = True
) -> ToolResult:
    """Kill a job of the session. Raises `UnknownJob` or `Unauthorized`."""
    before = await services.delegation.record(job_id)
    _check_is_job(job_id, before, owner=context.session_id)
    with services.waiting.reading(job_id, session_id=context.session_id):
        word = await services.delegation.kill(
            job_id, authority=context.session_id, reason=reason, by_owner_model=by_owner_model
        )
    after = await services.delegation.record(job_id)
    if after is None:
        raise unknown_job(job_id)
    return job_kill_result(after.snapshot(), already_finished=word == "already_finished")


async def _collect(services: ToolServices, context: CallContext, job_id: str) -> RunRecord:
    record = await services.delegation.collect(job_id, owner=context.session_id)
    if isinstance(record, str):
        match record:
            case "unauthorized":
                raise foreign_job(job_id)
            case "expired":
                raise unknown_job(job_id, really="expired")
            case "unknown":
                raise unknown_job(job_id)
    _check_is_job(job_id, record, owner=context.session_id)
    return record


def _check_is_job(job_id: str, record: RunRecord | None, *, owner: str) -> None:
    if record is None:
        raise unknown_job(job_id)
    if record.owner != owner:
        raise foreign_job(job_id)
    if record.mode != "background":
        raise unknown_job(job_id, really="foreground")


async def _wait(
    services: ToolServices, context: CallContext, job_id: str, *, timeout_seconds: float
) -> Literal["ended", "timeout", "aborted"]:
    ending = services.waiting.expect(job_id)
    # It may have ended between the reading before this and now.
    services.waiting.look(job_id)
    watched: set[asyncio.Future[Any]] = {ending}
    watcher = None if context.signal is None else asyncio.ensure_future(context.signal.wait())
    if watcher is not None:
        watched.add(watcher)
    try:
        await asyncio.wait(watched, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            ending.result()  # raises when the host stopped
            return "ended"
        return "aborted" if watcher is not None and watcher.done() else "timeout"
    finally:
        if watcher is not None:
            watcher.cancel()
        services.waiting.forget(job_id)
