"""A process's way to Redis that a test may hold up at a move, cut for good, or leave without an answer."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import redis.asyncio

from broker_config import BrokerSettings
from subagent_tasks.errors import BrokerUnavailable
from subagent_tasks.protocol.scripts import Script
from subagent_tasks.store.connection import Moves

T = TypeVar("T")

When = Literal["before", "after"]
Fault = Literal["dies before", "dies after", "reply lost"]

WAIT_SECONDS = 5.0


class Died(BaseException):
    """What the code of a dead process gets from every move: nothing of it reaches Redis any more."""


@dataclass(eq=False)
class Hold:
    """A place where a process stops: right before a move, or after it and before its answer.

    With `alone` only what makes the move stops, and the process goes on around it.
    """

    script: Script | None
    when: When
    run_id: str | None = None
    skip: int = 0
    alone: bool = False
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def holds_all(self) -> bool:
        return self.reached.is_set() and not self.alone and not self.go_on.is_set()

    async def until_reached(self) -> None:
        try:
            await asyncio.wait_for(self.reached.wait(), WAIT_SECONDS)
        except TimeoutError:
            what = "a move" if self.script is None else self.script.name
            raise AssertionError(f"never came to {self.when} {what}") from None


class Line(Moves):
    """One process's way to Redis: it can be held at a move, cut for good, and lose a reply."""

    def __init__(self, client: redis.asyncio.Redis, settings: BrokerSettings) -> None:
        super().__init__(client, settings)
        self.made: list[str] = []
        self.is_cut = False
        self._fault: tuple[int, Fault] | None = None
        self._holds: list[Hold] = []
        self._unanswered: set[Script] = set()

    @property
    def has_stopped(self) -> bool:
        """Whether the process is dead, or held as a whole."""
        return self.is_cut or any(hold.holds_all for hold in self._holds)

    def hold(
        self, script: Script | None, when: When, *, run_id: str | None = None, skip: int = 0, alone: bool = False
    ) -> Hold:
        """Stop at the next such move (None: at any), after letting `skip` pass."""
        hold = Hold(script, when, run_id, skip, alone)
        self._holds.append(hold)
        return hold

    def fail_at(self, number: int, fault: Fault) -> None:
        """Let the fault happen at the move of this number, the first from now on being 0."""
        self._fault = (len(self.made) + number, fault)

    def answer(self, script: Script, *, given: bool) -> None:
        """Whether Redis answers such moves: those that it does not answer happen all the same."""
        (self._unanswered.discard if given else self._unanswered.add)(script)

    def cut(self) -> None:
        """The process is dead: it asks for nothing any more, and gets no answer."""
        self.is_cut = True
        for hold in self._holds:
            hold.go_on.set()

    async def run(
        self,
        script: Script,
        *,
        keys: Mapping[str, str],
        args: Mapping[str, str | int],
        rest: Sequence[str | int] = (),
    ) -> list[Any]:
        fault = self._count(script)
        if fault == "dies before":
            self._die()
        await self._pass(script, "before", keys)
        self._check()
        answer = await super().run(script, keys=keys, args=args, rest=rest)
        if fault == "reply lost":
            # As redis-py does: it asks again.
            answer = await super().run(script, keys=keys, args=args, rest=rest)
        if fault == "dies after":
            self._die()
        if script in self._unanswered:
            raise BrokerUnavailable("Redis did not answer")
        await self._pass(script, "after", keys)
        self._check()
        return answer

    async def read(self, command: Awaitable[T]) -> T:
        try:
            await self._thawed()
            self._check()
        except BaseException:
            if inspect.iscoroutine(command):
                command.close()
            raise
        answer = await super().read(command)
        await self._thawed()
        return answer

    async def _thawed(self) -> None:
        for hold in self._holds:
            if hold.holds_all:
                await hold.go_on.wait()

    def _count(self, script: Script) -> Fault | None:
        number = len(self.made)
        self.made.append(script.name)
        return self._fault[1] if self._fault is not None and self._fault[0] == number else None

    def _die(self) -> None:
        self.cut()
        raise Died

    def _check(self) -> None:
        if self.is_cut:
            raise Died

    async def _pass(self, script: Script, when: When, keys: Mapping[str, str]) -> None:
        for hold in self._holds:
            if hold.script not in (None, script) or hold.when != when or hold.reached.is_set():
                continue
            if hold.run_id is not None and not keys.get("record", "").endswith(f":{hold.run_id}"):
                continue
            if hold.skip:
                hold.skip -= 1
                continue
            hold.reached.set()
            await hold.go_on.wait()
