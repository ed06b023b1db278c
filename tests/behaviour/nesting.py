"""What the tests of children that delegate share: an app with many delegation tools, and a model that knows its jobs.

A test makes its children with `Nest.child`: each has a prompt of its own, so that tests may share one running app.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic_ai.messages import ModelMessage, ModelResponse, ToolCallPart, ToolReturnPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.settings import ModelSettings

from subagent_tasks import Host, Session
from subagent_tasks.protocol.lifecycle import State
from subagent_tasks.protocol.models import TranscriptEvent
from subagent_tasks.protocol.records import RunRecord
from subagent_tasks.testing import (
    Kit,
    ScriptedModel,
    WorkerThread,
    assert_settled,
    call_tool,
    fake_app,
    wait_until,
)
from subagent_tasks.testing.script import SeenRequest, Step, ToolCalls
from subagent_tasks.toolbox import ToolLike
from tests.behaviour.bench import until


class NestingModel(ScriptedModel):
    """Remembers the jobs it started: `JOB1` in a call's arguments is the id of the first one of its conversation."""

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        response = await super().request(messages, model_settings, model_request_parameters)
        jobs = [
            job_id
            for message in messages
            for part in message.parts
            if isinstance(part, ToolReturnPart)
            for job_id in re.findall(r"started background subagent job (\S+)", part.model_response_str())
        ]
        for part in response.parts:
            if isinstance(part, ToolCallPart) and isinstance(part.args, str):
                part.args = re.sub(r"JOB(\d)", lambda named: jobs[int(named[1]) - 1], part.args)
        return response


@dataclass(frozen=True, slots=True)
class Child:
    """Children with one prompt; what they do is a rule of the model."""

    prompt: str

    def arguments(self, **more: Any) -> dict[str, Any]:
        """The arguments of a call that delegates to such a child."""
        return {"description": "a task", "prompt": self.prompt, **more}

    def call(self, tool: str = "subagent", *, call_id: str | None = None, **more: Any) -> ToolCalls:
        """The message by which another child delegates to such a child."""
        return call_tool(tool, self.arguments(**more), call_id=call_id)

    def job(self) -> ToolCalls:
        """The message by which another child makes such a child its job."""
        return self.call(run_in_background=True)


@dataclass(frozen=True, slots=True)
class Nest:
    """A running app whose children delegate with `subagent` and whatever else was declared."""

    kit: Kit
    host: Host
    model: NestingModel
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    gates: list[threading.Event] = field(default_factory=list[threading.Event])

    async def session(self) -> Session:
        """A session that no other test uses."""
        return await self.host.open_session(f"session-{next(self.numbers)}")

    def child(self, *steps: Step) -> Child:
        """A new kind of child that answers with these steps."""
        prompt = f"[{next(self.numbers)}]"
        self.model.on(prompt, list(steps))
        return Child(prompt)

    async def all_settled(self) -> None:
        """Wait until every run of every test has ended."""
        await wait_until(lambda: _is_settled(self.kit), description="all runs have ended")

    def gate(self) -> threading.Event:
        """Something for a child to wait for; set at the end at the latest."""
        self.gates.append(threading.Event())
        return self.gates[-1]

    def requests(self, child: Child) -> list[SeenRequest]:
        """What the model was asked on behalf of such children, in the order it was."""
        return [seen for seen in self.model.seen if any(child.prompt in text for text in told(seen))]

    def id_of(self, child: Child) -> str:
        """The session id of the one such child there was."""
        # A message that came in on the way, such as a notice, does not name the conversation.
        (session_id,) = {seen.conversation_id for seen in self.requests(child) if seen.conversation_id}
        return session_id

    async def record(self, child: Child) -> RunRecord:
        """The record of the one such child there was."""
        record = await self.host.process.delegation.record(self.id_of(child))
        assert record is not None
        return record

    async def asked(self, *children: Child, times: int = 1) -> None:
        """Wait until the model has been asked `times` on behalf of each."""
        await until(lambda: all(len(self.requests(child)) >= times for child in children), "the model was asked")

    async def suspended(self, child: Child) -> None:
        """Wait until the child holds no slot."""
        await self._reaches(child, State.SUSPENDED)

    async def settled(self, child: Child) -> RunRecord:
        """Wait until the child has ended."""
        await self._reaches(child, State.SETTLED)
        return await self.record(child)

    async def transcript(self, session: Session, child: Child) -> list[TranscriptEvent]:
        return [event async for event in session.transcript(self.id_of(child))]

    async def _reaches(self, child: Child, state: State) -> None:
        async def reached() -> bool:
            return bool(self.requests(child)) and (await self.record(child)).state is state

        await until(reached, f"the child is {state}")


def returns(request: SeenRequest) -> list[ToolReturnPart]:
    """The tool results a request carried, in order, as no model API has wrapped them yet."""
    messages = cast("list[ModelMessage]", request.raw)
    return [part for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]


def results(request: SeenRequest) -> list[str]:
    """Their texts."""
    return [str(cast("object", part.content)) for part in returns(request)]


def told(request: SeenRequest) -> list[str]:
    """What a request carried in the user's voice, the prompt first."""
    return [message.text for message in request.messages if message.role == "user"]


@asynccontextmanager
async def nesting(
    *,
    model: NestingModel | None = None,
    tools: Sequence[dict[str, Any]] = (),
    functions: Sequence[ToolLike] = (),
    concurrency: int = 100,
    **kit: Any,
) -> AsyncGenerator[Nest]:
    """`fake_app` with further delegation tools, which a worker only knows when they were declared before it started."""
    model = model or NestingModel()
    async with fake_app(model, tools=functions, worker=False, **kit) as made:
        for tool in tools:
            made.app.add_delegation_tool(**{"provider": "spawn", **tool})
        worker = WorkerThread(made.app.celery, concurrency=concurrency)
        await asyncio.to_thread(worker.__enter__)
        try:
            async with made.app.host() as host:
                nest = Nest(made, host, model)
                yield nest
                for gate in nest.gates:
                    gate.set()
                await nest.all_settled()
        finally:
            await asyncio.to_thread(worker.__exit__, None, None, None)


async def _is_settled(kit: Kit) -> bool:
    try:
        await assert_settled(kit.redis, kit.app.settings.namespace)
    except AssertionError:
        return False
    return True
