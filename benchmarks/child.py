"""What a child that waits for its model is made of, the same on both sides of `waiting`: prompt, tool, model.

Two model requests and a tool call, of the sizes that looking something up has: 1 kB of prompt, 4 kB of tool result,
1 kB of answer. The first request is answered after a moment, the second when the gate opens: by then the child holds
most of its conversation. Imports nothing of the product, because the bare side is to run without it.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, UserPromptPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from benchmarks.gate import GATE_VARIABLE, Turnstile

INSTRUCTIONS = "You are one of many assistants. Look up what you need, then answer in a few sentences."
FIRST_ANSWER_SECONDS = 1.0

_SENTENCE = "The river bends here, and whoever follows it meets the old road again a mile further down. "
_SENTENCES_PER_KB = 11


def prompt_of(number: int) -> str:
    """The task of one child; no two are the same."""
    return f"Task {number}: find out where the road and the river meet. " + _SENTENCE * _SENTENCES_PER_KB


async def look_up(topic: str) -> str:
    """Look something up in the notes."""
    # Made anew each time: children must not share one string where real ones could not.
    return f"Notes on {topic}: " + _SENTENCE * (4 * _SENTENCES_PER_KB)


def waiting_model() -> FunctionModel:
    """The model of both sides; one serves all children of a process."""
    turnstile = Turnstile(Path(os.environ.get(GATE_VARIABLE, os.devnull)))

    async def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        if len(messages) == 1:
            await asyncio.sleep(FIRST_ANSWER_SECONDS)
            call = ToolCallPart("look_up", {"topic": "the river and the road"})
            return ModelResponse(parts=[TextPart("I look into the notes first."), call])
        await turnstile.passed(_name_of(messages))
        return ModelResponse(parts=[TextPart("They meet twice. " + _SENTENCE * _SENTENCES_PER_KB)])

    return FunctionModel(answer, model_name="waiting")


def _name_of(messages: list[ModelMessage]) -> str:
    prompt = next(part.content for part in messages[0].parts if isinstance(part, UserPromptPart))
    return str(prompt).partition(":")[0]
