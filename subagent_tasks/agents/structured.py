"""Structured output: the tool a child hands its result in with, and what counts as its result (behaviour §5.8).

Running a call only stages it. What counts is its result in the transcript: once that stands there as a success the run
is complete, for whoever drives it, and the value is read from the arguments of that very call. Which schemas there are
is `output_schema`'s; when the loop ends, `keeper`'s.
"""

from __future__ import annotations

from typing import Any

import pydantic_core
from pydantic import JsonValue
from pydantic_ai import RunContext, ToolFailed
from pydantic_ai.messages import ToolReturn, ToolReturnPart
from pydantic_ai.tools import ToolDefinition
from pydantic_ai.toolsets import AbstractToolset, ToolsetTool

from subagent_tasks.agents.output_schema import OutputSchema
from subagent_tasks.agents.stopping import Stop
from subagent_tasks.agents.transcript import Conversation

OUTPUT_TOOL = "structured_output"
RECORDED = "Structured output recorded."
ALREADY_RECORDED = "structured output already recorded: the run is complete, so this call was not run"
NOT_RECORDED = f"the child finished without a valid call of {OUTPUT_TOOL}"

OUTPUT_SECTION = (
    "# Structured output\n\n"
    f"Hand in your result with {OUTPUT_TOOL}: its arguments are what is handed back, in place of your last message. "
    "Call it once, when all other work is done and by itself or as the last call of a message: it ends your work, and "
    "calls behind it are not run. If it answers that the arguments are invalid, correct them and call it again. If you "
    "cannot produce the result, do not make one up: say in a plain message what stopped you."
)
"""The child's prompt section of order 190: behind the delegation statement, which says that the last message counts."""


class OutputToolset(AbstractToolset[None]):
    """The child's own tool `structured_output`: outside any tool filter, and alone among the calls of its message."""

    def __init__(self, schema: OutputSchema) -> None:
        self._schema = schema

    @property
    def id(self) -> str:
        return "subagent-tasks-output"

    async def get_tools(self, ctx: RunContext[None]) -> dict[str, ToolsetTool[None]]:
        definition = ToolDefinition(
            name=OUTPUT_TOOL,
            description="Hand in the result of the task. The arguments are the result; a valid call ends your work.",
            parameters_json_schema=self._schema.parameters,
            sequential=True,
        )
        return {OUTPUT_TOOL: ToolsetTool(toolset=self, tool_def=definition, max_retries=0, args_validator=_Unread())}

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[None], tool: ToolsetTool[None]
    ) -> ToolReturn[str]:
        try:
            violations = self._schema.violations(_read(tool_args["given"]))
        except ValueError as error:
            violations = [f"arguments: not JSON: {error}"]
        if violations:
            raise ToolFailed(f"invalid arguments: {'; '.join(violations)}")
        return ToolReturn(RECORDED, metadata={"recorded": True})


def structured_ending(conversation: Conversation, stop: Stop) -> tuple[Stop, JsonValue | None]:
    """How a child that had to hand in a result has ended, and that result.

    Once it is recorded nothing that happens later changes the ending. Finished without it is an error, and the model is
    not asked again; every other ending stays what it is.
    """
    call = conversation.completing_call
    if call is not None:
        return Stop("completed"), _read(call.args)
    return (Stop("error", NOT_RECORDED) if stop.reason == "completed" else stop), None


def denied(result: ToolReturnPart) -> ToolReturnPart:
    """In place of the result of a call that stands behind the completing one, whatever else was wrong with it."""
    return ToolReturnPart(result.tool_name, ALREADY_RECORDED, result.tool_call_id, outcome="denied")


def _read(arguments: str | dict[str, Any] | None) -> JsonValue:
    """What a call hands in: model APIs give an object, or its text. Raises `ValueError`."""
    return pydantic_core.from_json(arguments or "{}") if isinstance(arguments, str | None) else arguments


class _Unread:
    """Passes the arguments on as the model gave them: what is wrong with them is told in the contract's words."""

    def validate_json(self, input: str | bytes | bytearray, **options: Any) -> dict[str, Any]:
        return {"given": input}

    def validate_python(self, input: Any, **options: Any) -> dict[str, Any]:
        return {"given": input}
