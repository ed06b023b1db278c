"""A `Drive` in memory: keeps the transcript in a list and can be told to refuse, to fail or to hold a write.

It checks what the real one checks (nothing is written once it refuses) and nothing else.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_ai.toolsets import FunctionToolset

from subagent_tasks.errors import DriveStopped
from subagent_tasks.protocol.interfaces import ChildTools, NewEvent
from subagent_tasks.protocol.models import InboxEntry, TranscriptEvent


@dataclass
class FakeTools:
    """The app's tools: plain functions, sync or async."""

    functions: Sequence[Callable[..., Any]] = ()
    has_sections: bool = False

    def names(self) -> frozenset[str]:
        return frozenset(function.__name__ for function in self.functions)

    def toolsets(self) -> Sequence[object]:
        toolset: FunctionToolset[None] = FunctionToolset()
        for function in self.functions:
            toolset.add_function(function, takes_ctx=False)
        return [toolset]

    def sections(self, admits: Callable[[str], bool]) -> Sequence[str]:
        return [f"How to use {name}." for name in sorted(self.names()) if admits(name)] if self.has_sections else []


@dataclass
class FakeDrive:
    """`refuse_after` writes and checks the drive raises `stop_reason`; `fail_with` is raised instead when given."""

    tools: ChildTools = field(default_factory=FakeTools)
    events: list[TranscriptEvent] = field(default_factory=list[TranscriptEvent])
    session_id: str = "child-1"
    depth: int = 1
    attempt: int = 1
    model_request_timeout_seconds: float = 5.0
    first_event_timeout_seconds: float = 5.0
    refuse_after: int | None = None
    stop_reason: str = "kill"
    fail_with: Exception | None = None
    calls: int = 0
    checks: int = 0
    waiting: list[InboxEntry] = field(default_factory=list[InboxEntry])
    hold: asyncio.Event | None = None
    held: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    async def transcript(self) -> Sequence[TranscriptEvent]:
        return list(self.events)

    async def take_input(self) -> Sequence[InboxEntry]:
        self.checks += 1
        await self._write()
        taken, self.waiting = self.waiting, []
        for entry in taken:
            self.add(NewEvent("input", entry.model_dump(mode="json")))
        return taken

    async def announce(self, call: NewEvent | None = None) -> None:
        if call is None:
            self.checks += 1
            await self._write()
        else:
            await self._write(call)

    async def record(self, *events: NewEvent) -> None:
        await self._write(*events)

    def give(self, text: str) -> None:
        """What `take_input` of the executor leaves behind."""
        self.add(NewEvent("input", {"message_id": "m1", "text": text, "source": "user", "lane": "next-turn"}))

    def add(self, *events: NewEvent) -> None:
        """Put events at the end of the transcript, unasked."""
        for event in events:
            data = json.loads(json.dumps(dict(event.data), allow_nan=False))
            json.dumps(data, ensure_ascii=False).encode()
            self.events.append(TranscriptEvent(seq=len(self.events), kind=event.kind, data=data))

    def resumed_at(self, length: int) -> FakeDrive:
        """Another worker's drive of the same run, the first `length` events of whose transcript survived."""
        return FakeDrive(tools=self.tools, events=list(self.events[:length]), attempt=2)

    async def _write(self, *events: NewEvent) -> None:
        self.calls += 1
        if self.refuse_after is not None and self.calls > self.refuse_after:
            raise self.fail_with or DriveStopped(self.stop_reason)
        if self.hold is not None:
            self.held.set()
            await self.hold.wait()
        self.add(*events)
