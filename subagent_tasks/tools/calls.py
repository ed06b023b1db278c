"""What every tool of ours is: a definition, and a call made on behalf of one session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from broker_config import BrokerSettings
from subagent_tasks.delegation import Delegation
from subagent_tasks.errors import BrokerUnavailable
from subagent_tasks.own_runs import OwnRuns
from subagent_tasks.protocol.models import ToolDefinition, ToolResult
from subagent_tasks.waiting import Waiting

T = TypeVar("T")

ANSWER_SECONDS = 1.0
"""What Redis gets to answer a question at the end of a stated wait, or when the wait is shorter than this."""


@dataclass(frozen=True, slots=True)
class ToolServices:
    """What the tools work with in one process."""

    delegation: Delegation
    waiting: Waiting
    settings: BrokerSettings
    new_id: Any


@dataclass(frozen=True, slots=True)
class CallContext:
    """On whose behalf a call is made. `timeout_seconds`: how long the caller waits; None is the tool's limit.

    `own_runs` is set when a child makes the call. `key` tells the call from all others of its session where the call id
    may not: models use one again in a later message.
    """

    session_id: str
    call_id: str | None
    signal: asyncio.Event | None = None
    timeout_seconds: float | None = None
    own_runs: OwnRuns | None = None
    key: str | None = None


class Tool(Protocol):
    """A tool the model sees. `call` raises `SubagentError` for what the model is told as `Error: …`."""

    @property
    def definition(self) -> ToolDefinition: ...
    @property
    def section(self) -> str:
        """Its part of the system prompt; empty when it has none."""
        ...

    @property
    def section_order(self) -> float:
        """Where that part stands among others (behaviour §8)."""
        ...

    @property
    def exclusive(self) -> bool:
        """Whether it runs alone among the calls of one message (behaviour §7.3)."""
        ...

    @property
    def starts_runs(self) -> bool:
        """Whether its own move asks if a child may make the call."""
        ...

    async def call(
        self, services: ToolServices, context: CallContext, arguments: dict[str, Any] | str
    ) -> ToolResult: ...


def sections_of(tools: Iterable[Tool]) -> list[str]:
    """The prompt sections of the tools, in the contract's order."""
    return [tool.section for tool in sorted(tools, key=lambda tool: tool.section_order) if tool.section]


async def within(work: Awaitable[T], *, wait_seconds: float | None) -> T:
    """Ask Redis no longer than the caller said it would wait (P8), None if it said nothing.

    Raises `BrokerUnavailable`.
    """
    if wait_seconds is None:
        return await work
    seconds = max(wait_seconds, ANSWER_SECONDS)
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError as error:
        raise BrokerUnavailable(
            f"Redis did not answer within {seconds:g} s, which is as long as this call may wait: try again"
        ) from error
