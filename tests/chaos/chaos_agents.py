"""The declaration of a chaos run. A child's whole behaviour is its prompt, so any worker goes on with it the same way.

The prompt is the JSON of a plan (`plan.py`); step n is what the model answers the n-th time.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, TextPart, ToolCallPart, UserPromptPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from subagent_tasks import SubagentApp
from subagent_tasks.providers import SpawnProvider

NOTES = Path(os.environ.get("CHAOS_NOTES", os.devnull))


async def act(text: str, seconds: float) -> str:
    """Have an effect, and take a while."""
    note(text)
    await asyncio.sleep(seconds)
    return f"did {text}"


def grind(text: str, seconds: float) -> str:
    """The same, in a thread that nothing interrupts."""
    note(text)
    time.sleep(seconds)
    return f"did {text}"


def note(text: str) -> None:
    # One write to a file opened for appending: lines of several processes stay whole.
    with NOTES.open("ab", buffering=0) as notes:
        notes.write(f"{text}\n".encode())


async def answer(messages: list[ModelMessage], _: AgentInfo) -> ModelResponse:
    """The plan's next step."""
    plan = plan_of(messages)
    await asyncio.sleep(float(plan["think_seconds"]))
    answered = sum(isinstance(message, ModelResponse) for message in messages)
    if answered == len(plan["steps"]):
        return ModelResponse(parts=[TextPart(f"done {plan['id']}")])
    calls = plan["steps"][answered]
    return ModelResponse(
        parts=[
            ToolCallPart(tool, arguments, tool_call_id=f"{plan['id']}/{answered}/{number}")
            for number, (tool, arguments) in enumerate(calls)
        ]
    )


def plan_of(messages: list[ModelMessage]) -> dict[str, Any]:
    """What the first prompt says."""
    for message in messages:
        for part in message.parts if isinstance(message, ModelRequest) else ():
            if isinstance(part, UserPromptPart) and isinstance(part.content, str):
                return json.loads(part.content)
    raise ValueError("a child without a prompt")


app = SubagentApp()
app.add_tool(act)
app.add_tool(grind)
app.add_provider(SpawnProvider(model=FunctionModel(answer)))
app.add_delegation_tool(provider="spawn", max_depth=3)
app.add_job_tools()
celery = app.celery
