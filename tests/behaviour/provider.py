"""A provider that does what a test tells it, and remembers what was done to it.

It runs on the worker's event loop while the test runs on its own: everything shared is a `threading.Event` or a list
that one side appends to.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from dataclasses import dataclass, field
from typing import Any

from subagent_tasks import Capabilities, ChildRequest, ChildResult
from subagent_tasks.protocol.interfaces import Drive, Provider, Run
from subagent_tasks.protocol.models import text_block
from subagent_tasks.testing import wait_for

ALL_CAPABILITIES = Capabilities(
    output_schema=True,
    depth_limit=True,
    tool_filter=True,
    persona=True,
    agent_options=True,
    prepare_continuable=True,
)


def ended(text: str = "", *, stop_reason: str = "completed", diagnostic: str | None = None) -> ChildResult:
    """A result whose output is one text block, or nothing."""
    output = (text_block(text),) if text else ()
    return ChildResult(stop_reason=stop_reason, output=output, diagnostic=diagnostic)


@dataclass(slots=True)
class Child:
    """What children with one prompt do, and what was done to them.

    `result` is what they end with, an exception being raised instead; `when_cancelled` the same after a cancel.
    With `holds_start` or `holds_result` they wait there for `go_on`, or for a cancel. `start_error` rejects the start,
    `rollback_error` is what a cancelled start raises instead of giving up cleanly.
    """

    prompt: str
    result: ChildResult | Exception = field(default_factory=lambda: ended("done"))
    when_cancelled: ChildResult | Exception = field(default_factory=lambda: ended(stop_reason="aborted"))
    start_error: Exception | None = None
    rollback_error: Exception | None = None
    dispose_error: Exception | None = None
    holds_start: bool = False
    holds_result: bool = False
    ignores_cancel: bool = False
    go_on: threading.Event = field(default_factory=threading.Event)

    requests: list[ChildRequest] = field(default_factory=list[ChildRequest])
    cancel_reasons: list[str] = field(default_factory=list[str])
    log: list[str] = field(default_factory=list[str])

    @property
    def starts(self) -> int:
        return len(self.requests)

    @property
    def is_running(self) -> bool:
        return self.log[-1:] == ["started"]

    def arguments(self, **more: Any) -> dict[str, Any]:
        """The arguments of a call that delegates to such a child."""
        return {"description": "a task", "prompt": self.prompt, **more}

    def in_background(self, **more: Any) -> dict[str, Any]:
        return self.arguments(run_in_background=True, **more)


class ScriptedProvider(Provider):
    """Children by their prompt; one that no test made completes with `done`."""

    def __init__(
        self,
        name: str = "scripted",
        *,
        capabilities: Capabilities = ALL_CAPABILITIES,
        inherits_parent_context: bool = False,
        queue: str = "",
    ) -> None:
        self.name = name
        self.capabilities = capabilities
        self.inherits_parent_context = inherits_parent_context
        self.queue = queue
        self._children: dict[str, Child] = {}
        self._numbers = itertools.count(1)

    def child(self, **behaviour: Any) -> Child:
        """A new kind of child with a prompt of its own."""
        prompt = f"task {next(self._numbers)} of {self.name}"
        self._children[prompt] = child = Child(prompt, **behaviour)
        return child

    def let_all_go(self) -> None:
        for child in self._children.values():
            child.go_on.set()

    async def start(self, request: ChildRequest, drive: Drive) -> Run:
        child = self._children.get(request.prompt) or Child(request.prompt)
        child.requests.append(request)
        child.log.append("starting")
        if child.holds_start:
            try:
                await wait_for(child.go_on).passed()
            except asyncio.CancelledError:
                child.log.append("start cancelled")
                if child.rollback_error is not None:
                    raise child.rollback_error from None
                raise
        if child.start_error is not None:
            raise child.start_error
        child.log.append("started")
        return _ScriptedRun(child)


class _ScriptedRun:
    def __init__(self, child: Child) -> None:
        self._child = child
        self._cancelled = asyncio.Event()

    async def result(self) -> ChildResult:
        child = self._child
        if child.holds_result:
            waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(wait_for(child.go_on).passed())]
            if not child.ignores_cancel:
                waits.append(asyncio.ensure_future(self._cancelled.wait()))
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        was_cancelled = self._cancelled.is_set() and not child.ignores_cancel
        outcome = child.when_cancelled if was_cancelled else child.result
        child.log.append("result")
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def cancel(self, reason: str) -> None:
        self._child.cancel_reasons.append(reason)
        self._child.log.append("cancel")
        self._cancelled.set()

    async def dispose(self) -> None:
        self._child.log.append("dispose")
        if self._child.dispose_error is not None:
            raise self._child.dispose_error
