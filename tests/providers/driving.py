"""Driving a child of `spawn` over a drive in memory, its model answering by a script."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from pydantic_ai.messages import FinishReason, ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.usage import RequestUsage

from subagent_tasks.agents.loop import InProcessRun
from subagent_tasks.protocol.models import ChildRequest, ChildResult
from subagent_tasks.providers import SpawnProvider
from tests.providers.fake_drive import FakeDrive

WAIT_SECONDS = 5.0

Step = ModelResponse | Exception


class Script:
    """A model that answers each request with the step its conversation has come to: any process can go on with it."""

    def __init__(self, *steps: Step) -> None:
        self.steps = steps
        self.requests: list[list[ModelMessage]] = []
        self.infos: list[AgentInfo] = []
        self.model = FunctionModel(self._answer, model_name="scripted")

    async def _answer(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        self.requests.append(list(messages))
        self.infos.append(info)
        step = self.steps[sum(isinstance(message, ModelResponse) for message in messages)]
        if isinstance(step, Exception):
            raise step
        return ModelResponse(
            parts=list(step.parts), finish_reason=step.finish_reason, usage=step.usage, state=step.state
        )


def say(text: str, finish: FinishReason | None = "stop") -> ModelResponse:
    return ModelResponse(
        parts=[TextPart(text)], finish_reason=finish, usage=RequestUsage(input_tokens=10, output_tokens=2)
    )


def use(*calls: tuple[str, dict[str, Any]], finish: FinishReason = "tool_call") -> ModelResponse:
    """A model message that calls tools; the ids are `c1`, `c2`, … as many model servers number them."""
    parts = [ToolCallPart(name, arguments, f"c{index}") for index, (name, arguments) in enumerate(calls, 1)]
    return ModelResponse(parts=parts, finish_reason=finish, usage=RequestUsage(input_tokens=10, output_tokens=2))


async def start(script: Script, drive: FakeDrive, request: ChildRequest | None = None, **options: Any) -> InProcessRun:
    if not drive.events:
        drive.give("do it")
    run = await SpawnProvider(script.model, **options).start(request or ask(), drive)
    assert isinstance(run, InProcessRun)
    return run


async def drive_child(
    script: Script, drive: FakeDrive | None = None, request: ChildRequest | None = None, **options: Any
) -> ChildResult:
    run = await start(script, drive or FakeDrive(), request, **options)
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            return await run.result()
    finally:
        await run.dispose()


def ask(**fields: Any) -> ChildRequest:
    return ChildRequest(label="task", prompt="do it", **fields)


def tool_returns(messages: Sequence[ModelMessage]) -> list[ToolReturnPart]:
    return [part for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]


def assert_consistent(messages: Sequence[ModelMessage]) -> None:
    """Every call is answered exactly once, right after the message that made it: what model APIs insist on."""
    open_calls: list[str] = []
    for message in messages:
        if isinstance(message, ModelResponse):
            assert not open_calls
            open_calls = [call.tool_call_id for call in message.tool_calls]
        else:
            answered = [part.tool_call_id for part in message.parts if isinstance(part, ToolReturnPart)]
            assert sorted(answered) == sorted(open_calls)
            open_calls = []
    assert not open_calls
