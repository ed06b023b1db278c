"""The host for Django and scripts: the calls of `host`, blocking, on an event loop in a thread of its own.

One implementation underneath: nothing is decided here but in which thread a call runs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from subagent_tasks.errors import CallerError
from subagent_tasks.host import Host, Session
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
from subagent_tasks.scheduling import DEFAULT_MAX_PARALLEL

T = TypeVar("T")


class SyncHost:
    """`Host` for Django and scripts: the same calls, blocking, on an event loop in a thread of its own."""

    def __init__(self, make_host: Callable[[], Host]) -> None:
        self._make_host = make_host
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._host: Host | None = None

    def __enter__(self) -> Self:
        loop = asyncio.new_event_loop()
        self._loop = loop
        self._thread = threading.Thread(target=loop.run_forever, name="subagent-tasks-host", daemon=True)
        self._thread.start()
        try:
            self._host = self.run(self._make_host().__aenter__())
        except BaseException:
            self._end_loop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._host is not None:
                self.run(self._host.__aexit__(None, None, None))
        finally:
            self._end_loop()

    def open_session(self, session_id: str, *, reader: str = "main") -> SyncSession:
        """As `Host.open_session`."""
        if self._host is None:
            raise CallerError("the host is not running: use it inside `with app.sync_host() as host`")
        return SyncSession(self.run(self._host.open_session(session_id, reader=reader)), self)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Carry out a coroutine on the host's loop; an interrupt (Ctrl-C) cancels it there."""
        if self._loop is None:
            work.close()
            raise CallerError("the host is not running: use it inside `with app.sync_host() as host`")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except (KeyboardInterrupt, SystemExit):
            future.cancel()
            concurrent.futures.wait([future], timeout=10)
            raise

    def _end_loop(self) -> None:
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)
            self._loop.close()
        self._loop = self._thread = self._host = None


class SyncSession:
    """`Session`, blocking."""

    def __init__(self, session: Session, host: SyncHost) -> None:
        self._session = session
        self._host = host
        self.id = session.id

    @property
    def tools(self) -> list[ToolDefinition]:
        return self._session.tools

    @property
    def system_prompt(self) -> str:
        return self._session.system_prompt

    def call(
        self, name: str, arguments: Mapping[str, Any] | str, *, call_id: str | None = None, timeout: float | None = None
    ) -> ToolResult:
        """As `Session.call`."""
        return self._host.run(self._session.call(name, arguments, call_id=call_id, timeout=timeout))

    def call_all(
        self,
        calls: Sequence[ToolCall],
        *,
        max_parallel: int = DEFAULT_MAX_PARALLEL,
        timeout: float | None = None,
    ) -> list[ToolResult]:
        """As `Session.call_all`."""
        return self._host.run(self._session.call_all(calls, max_parallel=max_parallel, timeout=timeout))

    def run_child(
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
        timeout: float | None = None,
    ) -> ChildResult:
        """As `Session.run_child`."""
        return self._host.run(
            self._session.run_child(
                provider,
                prompt,
                output_schema=output_schema,
                label=label,
                persona=persona,
                tool_filter=tool_filter,
                agent_options=agent_options,
                max_depth=max_depth,
                call_id=call_id,
                timeout=timeout,
            )
        )

    def notices(self, *, timeout: float | None = None) -> Iterator[Notice]:
        """As `Session.notices`; ends after `timeout` seconds without a new one, too."""
        notices = self._session.notices()
        try:
            while True:
                try:
                    yield self._host.run(_within(anext(notices), timeout))
                except (TimeoutError, StopAsyncIteration):
                    return
        finally:
            with contextlib.suppress(CallerError):  # the host has stopped, and ended it
                self._host.run(_close(notices))

    def acknowledge(self, notice: Notice) -> None:
        self._host.run(self._session.acknowledge(notice))

    def transcript(self, child_id: str) -> list[TranscriptEvent]:
        """The events so far."""
        return self._host.run(_gather(self._session.transcript(child_id)))

    def kill(self, job_id: str, reason: str | None = None) -> ToolResult:
        return self._host.run(self._session.kill(job_id, reason))

    def close(self, *, cancel_jobs: bool = False) -> None:
        self._host.run(self._session.close(cancel_jobs=cancel_jobs))


async def _within(item: Any, timeout_seconds: float | None) -> Any:
    async with asyncio.timeout(timeout_seconds):
        return await item


async def _gather(events: AsyncIterator[TranscriptEvent]) -> list[TranscriptEvent]:
    return [event async for event in events]


async def _close(notices: Any) -> None:
    await notices.aclose()
