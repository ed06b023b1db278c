"""The extension point: what a provider is, what it returns, and what the executor lends it.

Pure declarations. A provider runs a child; it never settles it, counts it or tells anybody: the executor does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import JsonValue

from subagent_tasks.protocol.models import Capabilities, ChildRequest, ChildResult, InboxEntry, TranscriptEvent


@dataclass(frozen=True, slots=True)
class NewEvent:
    """A transcript event before it has a place: its kind and its JSON data."""

    kind: str
    data: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])


class ChildTools(Protocol):
    """The app's tools as one child may use them, those for delegating further among them."""

    def names(self) -> frozenset[str]:
        """The global tool names, before any filter."""
        ...

    def toolsets(self) -> Sequence[object]:
        """pydantic-ai toolsets holding those tools."""
        ...

    def sections(self, admits: Callable[[str], bool]) -> Sequence[str]:
        """The prompt sections of the tools whose names are admitted, in order."""
        ...


OWN_TOOL = "subagent_tasks"
"""The key in a pydantic-ai tool definition's metadata that marks a tool of ours: its effect is never unknown, since its
moves are made to be repeated; it asks by itself whether it may start, so nothing is announced for it (protocol §3)."""

IN_THREAD = "subagent_tasks.in_thread"
"""The key in a pydantic-ai tool definition's metadata that marks a plain function: once begun, nothing interrupts it,
so a worker that shuts down waits for it as long as it may (protocol §4)."""


class Drive(Protocol):
    """What the executor lends to a provider for one attempt at one run.

    Every method that writes checks, in one script, that this process still drives the run and that it was not killed;
    otherwise it raises `DriveStopped` and nothing was written.
    """

    @property
    def session_id(self) -> str: ...
    @property
    def depth(self) -> int: ...
    @property
    def attempt(self) -> int:
        """1 for the first taking; one more for each taking from a dead worker."""
        ...

    @property
    def model_request_timeout_seconds(self) -> float: ...
    @property
    def first_event_timeout_seconds(self) -> float: ...
    @property
    def tools(self) -> ChildTools: ...

    async def transcript(self) -> Sequence[TranscriptEvent]:
        """All events so far, in order, the taken input among them."""
        ...

    async def take_input(self) -> Sequence[InboxEntry]:
        """Move what waits in the inbox into the transcript and return it. Empty if nothing waits."""
        ...

    async def announce(self, call: NewEvent | None = None) -> None:
        """Ask, right before an effect, whether it may start. A tool call is written down first (P7)."""
        ...

    async def record(self, *events: NewEvent) -> None:
        """Append what happened. Committed when this returns."""
        ...


class Run(Protocol):
    """One started child."""

    async def result(self) -> ChildResult:
        """How it ended. A child-level failure is a result; raising means an infrastructure fault."""
        ...

    async def cancel(self, reason: str) -> None:
        """Ask it to end early; `result` then returns `aborted`."""
        ...

    async def dispose(self) -> None:
        """Release everything it holds. Idempotent, bounded, always called once the result is known."""
        ...


class Provider(ABC):
    """A named way to run a child.

    `resumable` says that a run taken from a dead worker may go on from its transcript; others end `failed`.
    `queue` names the Celery queue its runs wait in, without the namespace; the default is the provider's name.
    """

    name: str
    capabilities: Capabilities = Capabilities()
    inherits_parent_context: bool = False
    resumable: bool = False
    queue: str = ""

    async def prepare(self) -> None:  # noqa: B027 - most providers have nothing to prepare
        """Called once in each worker process before its first run: what is slow to load, off the event loop.

        Raising a `SubagentError` warns the operator; the runs that need it then fail with the same words.
        """

    @abstractmethod
    async def start(self, request: ChildRequest, drive: Drive) -> Run:
        """Begin (or, when the transcript already holds steps, go on with) the child. Raising leaves nothing behind."""
