"""One run that delegates, and who works on it: what the tests of suspension share.

Runs of its own are named by their labels; each answers at its first request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from driving_kit import OWNER
from fleet import Fleet, Member, fleet_on

from subagent_tasks.protocol.lifecycle import State
from subagent_tasks.providers import SpawnProvider
from subagent_tasks.testing import ScriptedModel, call_tool, call_tools, reply
from subagent_tasks.testing.script import Step, ToolCalls

RUN = "run-1"


def delegate(label: str, **more: Any) -> ToolCalls:
    """The call that starts the own run of this name."""
    return call_tool("subagent", {"description": label, "prompt": f"do {label}", **more}, call_id=label)


class Effect:
    """A tool whose effect must not happen twice; it may be held in the middle."""

    def __init__(self) -> None:
        self.count = 0
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def effect(self) -> str:
        """Have an effect."""
        self.count += 1
        self.begun.set()
        await self.go_on.wait()
        return "had an effect"


@dataclass
class Scene:
    """A run that delegates, admitted and not yet handed to the worker. It may have a tool with an effect besides."""

    fleet: Fleet
    host: Member
    worker: Member
    model: ScriptedModel
    effect: Effect = field(default_factory=Effect)

    async def heir(self, number: int = 2) -> Member:
        """Another worker."""
        return await self.fleet.member(f"worker-{number}")

    async def own(self, label: str) -> str:
        """The id of the one own run of that name."""
        runs = [run_id for run_id in await self.fleet.runs() if (await self.fleet.record(run_id)).spec.label == label]
        assert len(runs) == 1, f"{len(runs)} runs named {label}"
        return runs[0]

    async def drive_own(self, label: str, worker: Member) -> None:
        """Drive an own run to its end."""
        run_id = await self.own(label)
        await self.fleet.drive(run_id, worker)
        assert await self.fleet.state(run_id) is State.SETTLED

    async def suspend(self) -> None:
        """Drive the run until it is suspended."""
        await self.fleet.drive(RUN, self.worker)
        assert await self.fleet.state(RUN) is State.SUSPENDED

    async def bury(self, dead: Member) -> None:
        """Let the host find a dead process."""
        await self.fleet.bury(dead, by=self.host)

    async def suspensions(self) -> int:
        return [event.kind for event in await self.fleet.transcript(RUN)].count("suspended")

    def requests(self, prompt: str) -> int:
        """How often the model was asked on behalf of the run with this prompt."""
        return sum(
            any(message.role == "user" and prompt in message.text for message in seen.messages)
            for seen in self.model.seen
        )

    async def assert_done_once(
        self, *results: str, own: tuple[str, ...] = ("first",), requests: int = 2, effects: int = 0
    ) -> None:
        """The run has completed, each of its calls has one result, and nothing on the way was done twice."""
        assert (await self.fleet.outcome(RUN)).text == "all done"
        assert sorted(await self.fleet.results(RUN)) == sorted(results or [f"{label} found" for label in own])
        assert len(await self.fleet.runs()) == 1 + len(own)
        assert {label: self.requests(f"do {label}") for label in own} == dict.fromkeys(own, 1)
        assert (self.requests("main task"), self.effect.count) == (requests, effects)
        assert self.fleet.told.ended_runs.count(RUN) <= 1
        assert [notice.sender_id for notice in await self.host.sessions.notices(OWNER, after="0-0")] == [RUN]
        assert await self.fleet.messages() == []


@asynccontextmanager
async def scene(
    url: str,
    *own: str,
    steps: tuple[Step, ...] = (),
    with_effect: bool = False,
    provider: type[SpawnProvider] = SpawnProvider,
    worker_url: str | None = None,
    **settings: Any,
) -> AsyncGenerator[Scene]:
    """The run delegates to `own` in one message (or goes through `steps`), and then says that all is done."""
    model, effect = ScriptedModel(), Effect()
    if not steps:
        calls = [delegate(label) for label in own]
        steps = (call_tools(*([call_tool("effect", {})] if with_effect else []), *calls),)
    model.on("main task", [*steps, reply("all done")])
    for label in own:
        model.on(f"do {label}", reply(f"{label} found"))
    async with fleet_on(url, provider(model), tools=[effect.effect], **settings) as fleet:
        host = await fleet.member("host-1")
        await host.sessions.open(OWNER)
        worker = await fleet.member("worker-1", url=worker_url)
        await fleet.accept(host, RUN, prompt="main task")
        yield Scene(fleet, host, worker, model, effect)
