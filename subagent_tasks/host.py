"""A host process: opens parent sessions, passes tool calls in, receives results and notices.

One connection hears of every ending. Whatever waits here is bounded, and losing this process loses nothing: a session
is reopened by its id, a call repeated by its call id finds its run again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from broker_config import BrokerSettings
from subagent_tasks.calling import carry_out
from subagent_tasks.errors import BrokerUnavailable, CallerError, SubagentError, Unauthorized
from subagent_tasks.notice_inbox import NoticeInbox
from subagent_tasks.process import Process
from subagent_tasks.protocol.ids import checked_id
from subagent_tasks.protocol.interfaces import Provider
from subagent_tasks.protocol.models import (
    AgentOptions,
    ChildResult,
    Notice,
    ToolCall,
    ToolDefinition,
    ToolFilter,
    ToolResult,
    TranscriptEvent,
)
from subagent_tasks.protocol.outcomes import OWNER_DISPOSED
from subagent_tasks.protocol.ports import Publisher
from subagent_tasks.scheduling import DEFAULT_MAX_PARALLEL, checked_max_parallel
from subagent_tasks.tools.calls import CallContext, Tool, ToolServices, sections_of
from subagent_tasks.tools.config import JobToolsConfig
from subagent_tasks.tools.job_tools import kill_job
from subagent_tasks.tools.render import aborted_before_dispatch, error_result
from subagent_tasks.tools.run_child import ChildCall, run_child

T = TypeVar("T")


class Host:
    """Opens parent sessions: `async with app.host() as host`."""

    def __init__(
        self,
        settings: BrokerSettings,
        *,
        tools: Mapping[str, Tool],
        providers: Mapping[str, Provider],
        publisher: Publisher,
        queues: Sequence[str],
        job_tools: JobToolsConfig | None = None,
    ) -> None:
        self._settings = settings
        self._job_tools = job_tools or JobToolsConfig()
        self._tools = tools
        self._providers = providers
        self._publisher = publisher
        self._queues = queues
        self._process: Process | None = None

    async def __aenter__(self) -> Self:
        process = Process(self._settings, role="host", publisher=self._publisher, queues=self._queues)
        await process.start()
        self._process = process
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None:
            await self._process.stop()
            self._process = None

    async def open_session(self, session_id: str, *, reader: str = "main") -> Session:
        """Create a parent session, or reopen it; idempotent.

        `reader` names who reads the session's notices: each reader has a place of its own in them. Raises `CallerError`
        for an id that cannot be one, or that is a child's.
        """
        checked_id(session_id, name="session_id")
        checked_id(reader, name="reader")
        process = self.process
        await process.sessions.open(session_id)
        await process.waiting.attach(session_id)
        return Session(
            session_id,
            reader=reader,
            process=process,
            tools=self._tools,
            providers=self._providers,
            job_tools=self._job_tools,
        )

    @property
    def process(self) -> Process:
        """The running process. Raises `CallerError` outside `async with`."""
        if self._process is None:
            raise CallerError("the host is not running: use it inside `async with app.host() as host`")
        return self._process


class Session:
    """A parent session, open in this process."""

    def __init__(
        self,
        session_id: str,
        *,
        reader: str,
        process: Process,
        tools: Mapping[str, Tool],
        providers: Mapping[str, Provider],
        job_tools: JobToolsConfig,
    ) -> None:
        self.id = session_id
        self._reader = reader
        self._held = process
        self._closed = False
        self._in_flight = 0
        self._tools = tools
        self._providers = providers
        self._job_tools = job_tools
        self._services = ToolServices(
            delegation=process.delegation,
            waiting=process.waiting,
            settings=process.settings,
            new_id=process.ids.new,
        )

    @property
    def _is_open(self) -> bool:
        return not self._closed and self._held.is_running

    @property
    def _process(self) -> Process:
        # Once nobody listens any more, a call would wait for an ending that it cannot hear.
        if not self._is_open:
            what = "the session is closed" if self._closed else "its host has stopped"
            raise CallerError(f"session {self.id!r}: {what}; open it again with host.open_session({self.id!r})")
        return self._held

    @property
    def tools(self) -> list[ToolDefinition]:
        """What to hand to the model; the bytes depend on the declaration alone (P12)."""
        return [tool.definition for tool in self._tools.values()]

    @property
    def system_prompt(self) -> str:
        """The prompt sections of the visible tools, in order."""
        return "\n\n".join(sections_of(self._tools.values()))

    async def call(
        self,
        name: str,
        arguments: Mapping[str, Any] | str,
        *,
        call_id: str | None = None,
        signal: asyncio.Event | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - part of the public contract: the call itself bounds the wait
    ) -> ToolResult:
        """Carry out one tool call of the model (behaviour §2.7). Never raises for what a model or broker does wrong.

        `signal` set, or the awaiting task cancelled, ends a foreground child. `timeout` is in seconds; without one a
        foreground call waits at most the run limit. A `call_id` repeated gives the same run and result; with other
        arguments it is refused (`CONFLICT`). Raises `CallerError` for a session that is closed, and for a `timeout` or
        `call_id` that cannot be one.
        """
        _check_timeout(timeout)
        _ = self._process
        if call_id is not None:
            checked_id(call_id, name="call_id")
        if signal is not None and signal.is_set():
            return aborted_before_dispatch().model_copy(update={"call_id": call_id})
        tool = next((tool for known, tool in self._tools.items() if known == name), None)
        if tool is None:
            known = ", ".join(self._tools) or "(none)"
            unknown = SubagentError(f"unknown tool {ascii(name)[:100]}: the tools are {known}", code="UNKNOWN_TOOL")
            return error_result(unknown).model_copy(update={"call_id": call_id})
        context = CallContext(self.id, call_id, signal=signal, timeout_seconds=timeout)
        # What is neither an object nor JSON text of one is for the tool to refuse, in its own words.
        given: Any = ToolCall(name=name, arguments=arguments).arguments if isinstance(arguments, str) else arguments
        async with self._hearing():
            try:
                result = await tool.call(self._services, context, given)
            except SubagentError as error:
                result = error_result(error)
        return result.model_copy(update={"call_id": call_id})

    async def call_all(
        self,
        calls: Sequence[ToolCall],
        *,
        max_parallel: int = DEFAULT_MAX_PARALLEL,
        signal: asyncio.Event | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - as in `call`, and for each call
    ) -> list[ToolResult]:
        """Carry out the calls of one message of the model: at most `max_parallel` at once, results in its order.

        `signal` set lets no further call start: those under way come to their end, the rest were never dispatched
        (behaviour §7). Raises `CallerError` as `call` does, for what is no `ToolCall`, and for a `max_parallel` that is
        no positive whole number.
        """
        checked_max_parallel(max_parallel)
        for position, call in enumerate(calls):
            if not isinstance(call, ToolCall):  # pyright: ignore[reportUnnecessaryIsInstance]  # untyped callers
                kind = type(cast("object", call)).__name__
                raise CallerError(
                    f"calls[{position}] is a {kind}: make each one a ToolCall(name=…, arguments=…, call_id=…)"
                )
        tools = self._tools

        def is_exclusive(position: int) -> bool:
            tool = tools.get(calls[position].name)
            return tool is not None and tool.exclusive

        def one(call: ToolCall) -> Callable[[], Coroutine[Any, Any, ToolResult]]:
            return lambda: self.call(call.name, call.arguments, call_id=call.call_id, signal=signal, timeout=timeout)

        results = await carry_out(
            [one(call) for call in calls], is_exclusive=is_exclusive, max_parallel=max_parallel, signal=signal
        )
        return [
            result or aborted_before_dispatch().model_copy(update={"call_id": call.call_id})
            for call, result in zip(calls, results, strict=True)
        ]

    async def run_child(
        self,
        provider: str,
        prompt: str,
        *,
        output_schema: Mapping[str, Any] | None = None,
        label: str = "",
        persona: str | None = None,
        tool_filter: ToolFilter | Sequence[ToolFilter] | None = None,
        agent_options: AgentOptions | None = None,
        max_depth: int | None = None,
        call_id: str | None = None,
        signal: asyncio.Event | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - as in `call`
    ) -> ChildResult:
        """Run a child of your own code's, without any delegation tool, and wait for its result (behaviour §5.8).

        However the child ends is a result: look at `stop_reason`. With `output_schema` (JSON Schema, the subset that
        `agents.output_schema` states) the child has to hand in a value that fits it, and a completed result has it in
        `structured`. What is left out stays absent; several filters intersect. `call_id`, `signal` and `timeout` are
        those of `call`; a child that is given up on ends `aborted`.

        Raises, before there is a child: `NoProvider`, `UnsupportedCapability`, `CallerError` (`UNSUPPORTED_SCHEMA`, a
        text, `timeout` or `call_id` that cannot be one, a closed session), `ConfigurationError`, `LimitReached` at the
        depth cap, `Conflict` and `BrokerUnavailable`. Raises `ChildFailed` when the provider could not start or release
        the child, or its worker was lost.
        """
        _check_timeout(timeout)
        _ = self._process
        if call_id is not None:
            checked_id(call_id, name="call_id")
        call = ChildCall(
            provider=provider,
            prompt=prompt,
            label=label,
            output_schema=output_schema,
            persona=persona,
            tool_filter=tool_filter,
            agent_options=agent_options,
            max_depth=max_depth,
        )
        context = CallContext(self.id, call_id, signal=signal, timeout_seconds=timeout)
        async with self._hearing():
            return await run_child(self._services, context, call, providers=self._providers)

    async def notices(self) -> AsyncIterator[Notice]:
        """Notices after the last acknowledged one, then live, each once and in order. Ends with the session or host.

        Subscribed before reading, so nothing falls between replay and live; an outage of Redis is waited out.
        """
        process = self._process
        bell = process.waiting.add_bell(self.id)
        try:
            after: str | None = None
            while self._is_open:
                bell.clear()
                readings_ended = process.waiting.readings_ended
                try:
                    after = after or await process.sessions.cursor(self.id, self._reader)
                    # One at a time: the next one may be withdrawn while this one is dealt with.
                    unread = await process.sessions.notices(self.id, after=after, count=1)
                except BrokerUnavailable:
                    await asyncio.sleep(process.settings.lease_seconds / 3)
                    continue
                is_held = any(process.waiting.is_being_read(each.sender_id, session_id=self.id) for each in unread)
                if unread and not is_held and readings_ended != process.waiting.readings_ended:
                    continue
                for notice in () if is_held else unread:
                    after = notice.id
                    yield notice
                if (is_held or not unread) and self._is_open:
                    await bell.wait()
        finally:
            process.waiting.remove_bell(self.id, bell)

    def notice_inbox(self) -> NoticeInbox:
        """The same notices for an agent loop, with the rules of when they open a turn of their own (behaviour §3.7).

        As `app.add_job_tools(completion_delivery=…, max_consecutive_wakes=…)` has it.
        """
        return NoticeInbox(
            self,
            delivery=self._job_tools.completion_delivery,
            max_consecutive_wakes=self._job_tools.max_consecutive_wakes,
        )

    async def acknowledge(self, notice: Notice) -> None:
        """This reader is done with the notice and all before it: a reopened session goes on behind it."""
        if notice.session_id != self.id:
            raise Unauthorized(f"notice {notice.id} belongs to session {notice.session_id!r}, not {self.id!r}")
        await self._process.sessions.acknowledge(self.id, self._reader, notice.id)

    async def transcript(self, child_id: str, *, follow: bool = False) -> AsyncIterator[TranscriptEvent]:
        """The events of a child of this session, in order; with `follow`, until it settles."""
        position = 0
        while True:
            record = await self._process.delegation.record(checked_id(child_id, name="child_id"))
            if record is None:
                raise CallerError(f"unknown child {child_id!r}: it never existed or has expired", code="UNKNOWN_CHILD")
            if record.root != self.id:
                raise Unauthorized(f"child {child_id} belongs to another session")
            for event in await self._process.runs.transcript(child_id, after=position):
                position = event.seq + 1
                yield event
            if not follow or record.is_settled:
                return
            await asyncio.sleep(FOLLOW_SECONDS)

    async def kill(self, job_id: str, reason: str | None = None) -> ToolResult:
        """Ask a job to end; its ending is announced by a notice. Raises `UnknownJob`, `Unauthorized`."""
        _ = self._process
        context = CallContext(self.id, None)
        return await kill_job(
            self._services, context, checked_id(job_id, name="job_id"), reason=reason, by_owner_model=False
        )

    async def close(self, *, cancel_jobs: bool = False) -> None:
        """Take no further call; those under way come to their end. Its jobs go on, unless `cancel_jobs` ends them.

        With `cancel_jobs` it returns once they have ended, or after two leases: what does not end by then was asked to.
        """
        if cancel_jobs:
            await self._cancel_jobs()
        if not self._closed:
            self._closed = True
            await self._leave()

    async def _cancel_jobs(self) -> None:
        process = self._process
        live = [job.id for job in await process.delegation.jobs(self.id) if not job.is_settled]
        endings = [process.waiting.expect(job_id) for job_id in live]
        try:
            for job_id in live:
                await process.delegation.kill(job_id, authority=self.id, reason=OWNER_DISPOSED)
                process.waiting.look(job_id)
            if endings:
                await asyncio.wait(endings, timeout=2 * process.settings.lease_seconds)
        finally:
            for job_id in live:
                process.waiting.forget(job_id)

    @asynccontextmanager
    async def _hearing(self) -> AsyncGenerator[None]:
        """Around a call: whoever closes the session meanwhile must not keep it from hearing of its ending."""
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            await self._leave()

    async def _leave(self) -> None:
        if self._closed and not self._in_flight:
            await self._held.waiting.detach(self.id)


def _check_timeout(timeout_seconds: object) -> None:
    number = timeout_seconds if isinstance(timeout_seconds, int | float) else 0
    if timeout_seconds is not None and (isinstance(timeout_seconds, bool) or not number > 0):
        raise CallerError(
            f"timeout must be a positive number of seconds, got {timeout_seconds!r}: leave it out for the default"
        )


FOLLOW_SECONDS = 0.2
"""How often a followed transcript is read again: appending rings no bell."""
