"""How an in-process child runs: one pydantic-ai agent over one `Drive`.

`TranscriptKeeper` writes every step down around its effect and asks before each effect whether it may start (protocol
§3). `InProcessRun` is the handle: result, cancel, dispose. What a stop means is decided in `stopping`, how events
become messages in `transcript`; who may run, and what settling does, in the executor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

from pydantic_ai import Agent, CancellationToken, ToolFailed
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
from pydantic_ai.models import Model, ModelRequestContext
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import DeferredToolRequests, DeferredToolResults, RunContext, ToolDefinition, ToolDenied
from pydantic_ai.toolsets import AbstractToolset
from pydantic_ai.usage import UsageLimits

from subagent_tasks.agents.stopping import Stop, output_of_responses, stop_of_error, stop_of_responses
from subagent_tasks.agents.transcript import (
    Conversation,
    fold,
    request_event,
    response_event,
    tool_call_event,
    tool_result_event,
    unknown_result_event,
)
from subagent_tasks.errors import DriveStopped
from subagent_tasks.protocol.interfaces import Drive, NewEvent
from subagent_tasks.protocol.models import ChildResult, Usage

MAX_TOOL_ERROR_CHARACTERS = 4000
NEEDS_APPROVAL = (
    "This call needs somebody's approval, which a delegated subagent cannot get. It was rejected and not run."
)
CANNOT_WAIT = "This call would have to be answered from outside, which a delegated subagent cannot wait for."


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """Everything about a child that is settled before it starts.

    `route` names the model in diagnostics. `max_requests` bounds the model requests of the whole conversation, those
    of earlier attempts included.
    """

    model: Model
    route: str
    prompt: str
    instructions: Sequence[str]
    toolsets: Sequence[AbstractToolset[None]]
    settings: ModelSettings
    max_requests: int


async def start_child(
    plan: ChildPlan, drive: Drive, *, cancel_grace_seconds: float = 2.0, dispose_timeout_seconds: float = 5.0
) -> InProcessRun:
    """Begin a child, or go on with it where its transcript ends.

    A cancel leaves a synchronous tool behind at once: its thread ends by itself, its result is dropped. An `async` tool
    that swallows the cancel is given `cancel_grace_seconds` before the result is `aborted` without it, and
    `dispose_timeout_seconds` more before it is left behind. Whoever wants a tool to end first waits before cancelling.
    """
    conversation = fold(await drive.transcript(), prompt=plan.prompt)
    return InProcessRun(
        plan,
        drive,
        conversation,
        cancel_grace_seconds=cancel_grace_seconds,
        dispose_timeout_seconds=dispose_timeout_seconds,
    )


class InProcessRun:
    """A child running as a task of this event loop."""

    def __init__(
        self,
        plan: ChildPlan,
        drive: Drive,
        conversation: Conversation,
        *,
        cancel_grace_seconds: float,
        dispose_timeout_seconds: float,
    ) -> None:
        self._plan = plan
        self._conversation = conversation
        self._usage = conversation.usage
        self._gate = _Gate(drive)
        self._keeper = TranscriptKeeper(self._gate, conversation)
        self._conversation_id = drive.session_id
        self._cancel_grace_seconds = cancel_grace_seconds
        self._dispose_timeout_seconds = dispose_timeout_seconds
        loop = asyncio.get_running_loop()
        self._is_cancelled = False
        self._token = CancellationToken()
        self._grace_over: asyncio.Future[None] = loop.create_future()
        self._grace_timer: asyncio.TimerHandle | None = None
        self._task = loop.create_task(self._run(), name=f"child {drive.session_id}")

    async def result(self) -> ChildResult:
        """How it ended. Raises `DriveStopped` as the drive raised it, and what else a drive's write failed with."""
        await asyncio.wait({self._task, self._grace_over}, return_when=asyncio.FIRST_COMPLETED)
        if not self._task.done():
            self._gate.close()
            return self._ended(Stop("aborted"))
        return self._task.result()

    async def cancel(self, reason: str) -> None:
        """End the child early, once; `reason` may be anybody's words and is not repeated anywhere."""
        if self._is_cancelled or self._task.done():
            return
        self._is_cancelled = True
        self._gate.halt()
        # Cancelling our task instead would reach the step at work through a cancel scope: some rounds later, and again
        # in every round of the event loop while a write is brought to its end.
        self._token.cancel()
        self._grace_timer = asyncio.get_running_loop().call_later(self._cancel_grace_seconds, self._end_grace)

    async def dispose(self) -> None:
        """Stop what still runs and wait for it, at most `dispose_timeout_seconds`. Nothing is written afterwards."""
        self._gate.close()
        await self.cancel("disposed")
        await asyncio.wait({self._task}, timeout=self._dispose_timeout_seconds)
        if self._grace_timer is not None:
            self._grace_timer.cancel()
        self._end_grace()
        self._task.add_done_callback(_forget)

    async def _run(self) -> ChildResult:
        try:
            if not self._conversation.is_finished:
                await self._converse()
            stop = stop_of_responses(self._conversation.responses, model=self._plan.route)
        except BaseException as error:
            self._gate.raise_refusal()
            stop = Stop("aborted") if self._gate.was_ended else self._stop_of(error)
        # A tool may swallow what the drive raised; what the drive said still holds.
        self._gate.raise_refusal()
        return self._ended(Stop("aborted") if self._gate.was_ended else stop)

    async def _converse(self) -> None:
        plan, conversation = self._plan, self._conversation
        if unknown := [unknown_result_event(call) for call in conversation.calls_of_unknown_effect]:
            await self._gate.record(*unknown)
            for event in unknown:
                conversation.add_result(event.data)
        never_started = [call.tool_call_id for call in conversation.calls_never_started]
        self._keeper.resume(never_started)
        agent = Agent(
            plan.model,
            name="child",
            deps_type=type(None),
            # A last message without text is an answer too (behaviour §1.3), not a reason to ask once more.
            output_type=[str, type(None)],
            instructions=list(plan.instructions),
            toolsets=list(plan.toolsets),
            capabilities=[self._keeper],
            # How often a model may err in its calls is bounded by `max_requests`; pydantic-ai's own limit ends the run.
            retries={"tools": plan.max_requests, "output": 1},
        )
        await agent.run(
            None,
            message_history=conversation.history(),
            # "Approved" is pydantic-ai's word for "run it now"; it goes through the same hooks as a fresh call.
            deferred_tool_results=DeferredToolResults(approvals=dict.fromkeys(never_started, True))
            if never_started
            else None,
            conversation_id=self._conversation_id,
            cancellation_token=self._token,
            model_settings=plan.settings,
            usage=self._usage,
            usage_limits=UsageLimits(request_limit=plan.max_requests),
        )

    def _stop_of(self, error: BaseException) -> Stop:
        if isinstance(error, asyncio.CancelledError) and self._is_cancelled:
            return Stop("aborted")
        if isinstance(error, asyncio.CancelledError) and _is_being_cancelled():
            raise error
        if not isinstance(error, Exception | asyncio.CancelledError):
            raise error
        return stop_of_error(error, model=self._plan.route, max_requests=self._plan.max_requests)

    def _ended(self, stop: Stop) -> ChildResult:
        usage = self._usage
        return ChildResult(
            stop_reason=stop.reason,
            output=output_of_responses(self._conversation.responses),
            diagnostic=stop.diagnostic,
            usage=Usage(
                requests=usage.requests,
                input_tokens=usage.input_tokens,
                output_tokens=usage.output_tokens,
                tool_calls=usage.tool_calls,
            ),
        )

    def _end_grace(self) -> None:
        if not self._grace_over.done():
            self._grace_over.set_result(None)


class TranscriptKeeper(AbstractCapability[None]):
    """Writes each step of the agent loop into the transcript, and lets no effect start that the drive does not allow.

    A model request costs one check before and one append after it, a tool call one append before and one after it.
    """

    def __init__(self, gate: _Gate, conversation: Conversation) -> None:
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
        # Next-step input (protocol §3) is to be taken here: its parts are recognised below as already written.
        if new := self._unwritten(_parts_after_last_response(ctx.messages)):
            await self._gate.record(*new)
            self._gate.raise_if_halted()
        else:
            await self._gate.announce(None)
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
        if tool_def.kind == "unapproved":
            raise ToolFailed(NEEDS_APPROVAL)
        try:
            await self._gate.announce(tool_call_event(call))
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
            if _is_being_cancelled():
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
        content = cast(object, written.content)
        return (
            replace(cast("ToolReturn[Any]", value), return_value=content) if isinstance(value, ToolReturn) else content
        )

    async def _failed(self, call: ToolCallPart, text: str) -> ToolFailed:
        failure = text if len(text) <= MAX_TOOL_ERROR_CHARACTERS else text[:MAX_TOOL_ERROR_CHARACTERS] + "…"
        part = ToolReturnPart(call.tool_name, failure, call.tool_call_id, outcome="failed")
        await self._write_result(tool_result_event(part))
        return ToolFailed(failure)

    async def _write_result(self, event: NewEvent) -> ToolReturnPart:
        await self._gate.record(event)
        return self._conversation.add_result(event.data)

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
        events = [tool_result_event(part) for part in results]
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


class _Gate:
    """The one way to the drive: remembers a refusal, and lets a write that has begun come to its end."""

    def __init__(self, drive: Drive) -> None:
        self._drive = drive
        self._stopped: DriveStopped | None = None
        self._fault: Exception | None = None
        self._is_halted = False
        self._is_closed = False

    def halt(self) -> None:
        """The run was cancelled: no further effect may start, what has started may still report."""
        self._is_halted = True

    def close(self) -> None:
        """The run has its result: what still runs in its name may not write any more."""
        self._is_closed = True

    def raise_if_halted(self) -> None:
        if self._is_halted:
            raise asyncio.CancelledError

    def raise_refusal(self) -> None:
        """Raise what the drive raised, if somebody else goes on with the run; an ended one keeps its partial text."""
        if self._stopped is not None and not self.was_ended:
            raise self._stopped
        if self._fault is not None:
            raise self._fault

    @property
    def was_ended(self) -> bool:
        """Whether the drive said that the run is to end here (a kill, its limit)."""
        return self._stopped is not None and self._stopped.reason in ("kill", "limit")

    async def announce(self, event: NewEvent | None) -> None:
        if self._stopped is not None:
            raise self._stopped
        if not self._is_halted:
            await self._write(lambda: self._drive.announce(event))
        # Also after it: a cancel that came during the write has spared the write, not the effect.
        self.raise_if_halted()

    async def record(self, *events: NewEvent) -> None:
        # A run that is being released may still report what it had started: the drive says whether it is in time.
        if self._stopped is not None and self._stopped.reason != "release":
            raise self._stopped
        await self._write(lambda: self._drive.record(*events))

    async def _write(self, write: Callable[[], Awaitable[None]]) -> None:
        if self._is_closed:
            raise DriveStopped("stale")
        if self._fault is not None:
            raise self._fault
        # A cancel that lands inside a write would leave open whether it was committed, and so what comes next.
        writing = asyncio.ensure_future(write())
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            while not writing.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({writing})
            if not writing.cancelled():
                self._remember(writing.exception())
            raise
        except BaseException as error:
            self._remember(error)
            raise

    def _remember(self, error: BaseException | None) -> None:
        if isinstance(error, DriveStopped) and self._stopped is None:
            self._stopped = error
        elif isinstance(error, Exception) and self._fault is None:
            self._fault = error


def _is_being_cancelled() -> bool:
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


def _forget(task: asyncio.Task[ChildResult]) -> None:
    """Nobody will ask for this result any more: a failure in it must not be reported as never retrieved."""
    if not task.cancelled():
        task.exception()
