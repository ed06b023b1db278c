"""The transcript of an in-process child, kept around each step of pydantic-ai's loop (protocol §3).

`TranscriptKeeper` writes every step down around its effect and asks before each effect whether it may start, through
the `gate`. The loop itself, and what an ending means, are elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from pydantic_ai import ToolFailed
from pydantic_ai.capabilities import (
    AbstractCapability,
    RawToolArgs,
    ValidatedToolArgs,
    WrapToolExecuteHandler,
)
from pydantic_ai.exceptions import (
    ApprovalRequired,
    CallDeferred,
    SkipToolExecution,
    ToolFailedError,
    ToolRetryError,
)
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelRequestPart,
    ModelResponse,
    ToolCallPart,
    ToolReturn,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models import ModelRequestContext
from pydantic_ai.tools import DeferredToolRequests, DeferredToolResults, RunContext, ToolDefinition, ToolDenied

from subagent_tasks.agents.gate import Gate
from subagent_tasks.agents.structured import ALREADY_RECORDED, denied
from subagent_tasks.agents.transcript import (
    Conversation,
    request_event,
    response_event,
    tool_call_event,
    tool_result_event,
)
from subagent_tasks.errors import DriveStopped
from subagent_tasks.protocol.interfaces import IN_THREAD, OWN_TOOL, NewEvent

MAX_TOOL_ERROR_CHARACTERS = 4000
NEEDS_APPROVAL = (
    "This call needs somebody's approval, which a delegated subagent cannot get. It was rejected and not run."
)
CANNOT_WAIT = "This call would have to be answered from outside, which a delegated subagent cannot wait for."


class TranscriptKeeper(AbstractCapability[None]):
    """Writes each step of the agent loop into the transcript, and lets no effect start that the drive does not allow.

    A model request costs one check before and one append after it, a tool call one append before and one after it.
    """

    def __init__(self, gate: Gate, conversation: Conversation) -> None:
        self._gate = gate
        self._conversation = conversation
        self._others_logged = len(conversation.tail.others)
        self._resumed: frozenset[str] = frozenset()
        self._running = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    def resume(self, never_started: Sequence[str]) -> None:
        """Name the calls that run for the first time although an earlier attempt already received them."""
        self._resumed = frozenset(never_started)

    async def before_model_request(
        self, ctx: RunContext[None], request_context: ModelRequestContext
    ) -> ModelRequestContext:
        if new := self._unwritten(_parts_after_last_response(ctx.messages)):
            await self._gate.record(*new)
        if self._conversation.completing_call is not None:
            raise RunCompleted
        # What has come for the next step (protocol §3); asks at the same time whether there may be one.
        if inputs := await self._gate.take_input():
            message = ModelRequest(
                parts=[UserPromptPart(entry.text) for entry in inputs], conversation_id=ctx.conversation_id
            )
            # Both: appending to the request's own list would double it in the history.
            request_context.messages = [*request_context.messages, message]
            ctx.messages.append(message)
            self._conversation.tail.inputs.extend(UserPromptPart(entry.text) for entry in inputs)
        self._gate.raise_if_halted()
        return request_context

    async def after_model_request(
        self, ctx: RunContext[None], *, request_context: ModelRequestContext, response: ModelResponse
    ) -> ModelResponse:
        await self._gate.record(response_event(response))
        self._conversation.add_response(response)
        self._others_logged = 0
        return response

    async def before_tool_validate(
        self,
        ctx: RunContext[None],
        *,
        call: ToolCallPart,
        tool_def: ToolDefinition,
        args: RawToolArgs,
    ) -> RawToolArgs:
        if call.tool_call_id in self._resumed:
            # Running a call for the first time is not an approval anybody gave.
            ctx.tool_call_approved = False
        return args

    async def wrap_tool_execute(
        self,
        ctx: RunContext[None],
        *,
        call: ToolCallPart,
        tool_def: ToolDefinition,
        args: ValidatedToolArgs,
        handler: WrapToolExecuteHandler,
    ) -> object:
        if self._conversation.completing_call is not None:
            # Written down with the rest of the message, before what would be the next request.
            return ToolDenied(ALREADY_RECORDED)
        if tool_def.kind == "unapproved":
            raise ToolFailed(NEEDS_APPROVAL)
        if call.tool_name == self._conversation.completing_tool:
            # Asked but not announced: its record is all its effect, so one without a record is simply made again.
            await self._gate.announce(None)
            return await self._run_tool(call, args, handler)
        if (tool_def.metadata or {}).get(OWN_TOOL):
            try:
                return await self._run_tool(call, args, handler)
            except DriveStopped as stop:
                self._gate.heed(stop)
                raise
        try:
            in_thread = bool((tool_def.metadata or {}).get(IN_THREAD))
            await self._gate.announce(tool_call_event(call, is_interruptible=not in_thread))
        except DriveStopped as stop:
            if stop.reason == "release":
                # The run goes on elsewhere: calls already running end and are recorded, or their effect is unknown.
                await self._quiet.wait()
            raise
        self._enter()
        try:
            return await self._run_tool(call, args, handler)
        finally:
            self._leave()

    async def handle_deferred_tool_calls(
        self, ctx: RunContext[None], *, requests: DeferredToolRequests
    ) -> DeferredToolResults:
        """Refuse what would need somebody else: a delegated child cannot ask (behaviour §4.13)."""
        return DeferredToolResults(
            approvals={call.tool_call_id: ToolDenied(NEEDS_APPROVAL) for call in requests.approvals},
            calls={call.tool_call_id: ToolFailed(CANNOT_WAIT) for call in requests.calls},
        )

    async def _run_tool(
        self,
        call: ToolCallPart,
        args: ValidatedToolArgs,
        handler: WrapToolExecuteHandler,
    ) -> object:
        try:
            value: object = await handler(args)
        except (CallDeferred, ApprovalRequired, SkipToolExecution):
            raise
        except ToolRetryError as error:
            if isinstance(error.tool_retry, ToolReturnPart):
                await self._write_result(tool_result_event(error.tool_retry))
            raise
        except ToolFailedError as error:
            await self._write_result(tool_result_event(error.tool_failed))
            raise
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            raise await self._failed(call, "the tool cancelled itself") from error
        except (Exception, SystemExit) as error:
            # What a tool raises is for its model to deal with, and must end neither the child nor the worker.
            raise await self._failed(call, f"{type(error).__name__}: {error}") from error
        try:
            event = _success_event(call, value)
        except Exception as error:
            text = f"the tool ran, but returned a {type(value).__name__} that cannot be written as JSON"
            raise await self._failed(call, text) from error
        written = await self._write_result(event)
        # The model gets what the transcript holds: a resumed child sees the same bytes.
        content = cast("object", written.content)
        return (
            replace(cast("ToolReturn[Any]", value), return_value=content) if isinstance(value, ToolReturn) else content
        )

    async def _failed(self, call: ToolCallPart, text: str) -> ToolFailed:
        failure = text if len(text) <= MAX_TOOL_ERROR_CHARACTERS else text[:MAX_TOOL_ERROR_CHARACTERS] + "…"
        part = ToolReturnPart(call.tool_name, failure, call.tool_call_id, outcome="failed")
        await self._write_result(tool_result_event(part))
        return ToolFailed(failure)

    async def _write_result(self, event: NewEvent) -> ToolReturnPart:
        added: list[ToolReturnPart] = []
        # With the write, not behind it: a cancel in between must not forget what the transcript holds.
        await self._gate.record(event, then=lambda: added.append(self._conversation.add_result(event.data)))
        return added[0]

    def _unwritten(self, parts: Sequence[ModelRequestPart]) -> list[NewEvent]:
        """Events for the parts of the coming request that no event tells yet.

        pydantic-ai merges adjacent requests of a resumed history, so what is written is told by call id and by count
        since the last model message, never by the position of a message.
        """
        results = [
            part
            for part in parts
            if isinstance(part, ToolReturnPart) and part.tool_call_id not in self._conversation.tail.results
        ]
        # User prompts are either taken input or what a tool added to its result: both are written already.
        others = [part for part in parts if not isinstance(part, ToolReturnPart | UserPromptPart)]
        behind = self._conversation.calls_behind_completion
        events = [tool_result_event(denied(part) if part.tool_call_id in behind else part) for part in results]
        for event in events:
            self._conversation.add_result(event.data)
        if fresh := others[self._others_logged :]:
            events.append(request_event(fresh))
            self._conversation.tail.others.extend(fresh)
            self._others_logged = len(others)
        return events

    def _enter(self) -> None:
        self._running += 1
        self._quiet.clear()

    def _leave(self) -> None:
        self._running -= 1
        if not self._running:
            self._quiet.set()


class RunCompleted(BaseException):
    """Raised in place of the next model request: the run is complete.

    A `BaseException`, so that no error handling takes it for a failure of the request.
    """


def is_being_cancelled() -> bool:
    """Somebody cancelled this task; otherwise the code it runs raised a cancellation of its own making."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _success_event(call: ToolCallPart, value: object) -> NewEvent:
    if not isinstance(value, ToolReturn):
        return tool_result_event(ToolReturnPart(call.tool_name, value, call.tool_call_id))
    returned = cast("ToolReturn[Any]", value)
    part = ToolReturnPart(call.tool_name, returned.return_value, call.tool_call_id, metadata=returned.metadata)
    return tool_result_event(part, user_content=returned.content)


def _parts_after_last_response(messages: Sequence[ModelMessage]) -> list[ModelRequestPart]:
    parts: list[ModelRequestPart] = []
    for message in reversed(messages):
        if not isinstance(message, ModelRequest):
            break
        parts[:0] = message.parts
    return parts
