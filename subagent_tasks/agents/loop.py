"""How an in-process child runs: one pydantic-ai agent over one `Drive`.

`InProcessRun` is the handle: result, cancel, dispose. What is written down around each step is `keeper`'s, what a stop
means `stopping`'s, how events become messages `transcript`'s; who may run, and what settling does, the executor's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from pydantic_ai import Agent, CancellationToken
from pydantic_ai.models import Model
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import DeferredToolResults
from pydantic_ai.toolsets import AbstractToolset
from pydantic_ai.usage import UsageLimits

from subagent_tasks.agents.gate import Gate
from subagent_tasks.agents.keeper import RunCompleted, TranscriptKeeper, is_being_cancelled
from subagent_tasks.agents.output_schema import OutputSchema
from subagent_tasks.agents.stopping import Stop, output_of_responses, stop_of_error, stop_of_responses
from subagent_tasks.agents.structured import OUTPUT_TOOL, OutputToolset, structured_ending
from subagent_tasks.agents.transcript import (
    Conversation,
    fold,
    unknown_result_event,
)
from subagent_tasks.protocol.interfaces import Drive
from subagent_tasks.protocol.models import ChildResult, TranscriptEvent, Usage


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """Everything about a child that is settled before it starts.

    `route` names the model in diagnostics. `max_requests` bounds the model requests of the whole conversation, those
    of earlier attempts included. With `output_schema` the child has to hand in a result that fits it.
    """

    model: Model
    route: str
    prompt: str
    instructions: Sequence[str]
    toolsets: Sequence[AbstractToolset[None]]
    settings: ModelSettings
    max_requests: int
    output_schema: OutputSchema | None = None


def start_child(
    plan: ChildPlan,
    drive: Drive,
    events: Sequence[TranscriptEvent],
    *,
    cancel_grace_seconds: float = 2.0,
    dispose_timeout_seconds: float = 5.0,
) -> InProcessRun:
    """Begin a child, or go on with it where its transcript ends: `events` are all of it so far.

    A cancel leaves a synchronous tool behind at once: its thread ends by itself, its result is dropped. An `async` tool
    that swallows the cancel is given `cancel_grace_seconds` before the result is `aborted` without it, and
    `dispose_timeout_seconds` more before it is left behind. Whoever wants a tool to end first waits before cancelling.
    """
    completing_tool = None if plan.output_schema is None else OUTPUT_TOOL
    conversation = fold(events, prompt=plan.prompt, completing_tool=completing_tool)
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
        self._gate = Gate(drive)
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
        own = [] if plan.output_schema is None else [OutputToolset(plan.output_schema)]
        never_started = [call.tool_call_id for call in conversation.calls_never_started]
        self._keeper.resume(never_started)
        agent = Agent(
            plan.model,
            name="child",
            deps_type=type(None),
            # A last message without text is an answer too (behaviour §1.3), not a reason to ask once more.
            output_type=[str, type(None)],
            instructions=list(plan.instructions),
            toolsets=[*plan.toolsets, *own],
            capabilities=[self._keeper],
            # How often a model may err in its calls is bounded by `max_requests`; pydantic-ai's own limit ends the run.
            retries={"tools": plan.max_requests, "output": 1},
        )
        with suppress(RunCompleted):
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
        if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
            raise error
        if not isinstance(error, Exception | asyncio.CancelledError):
            raise error
        return stop_of_error(error, model=self._plan.route, max_requests=self._plan.max_requests)

    def _ended(self, stop: Stop) -> ChildResult:
        usage, structured = self._usage, None
        if self._plan.output_schema is not None:
            stop, structured = structured_ending(self._conversation, stop)
        return ChildResult(
            stop_reason=stop.reason,
            output=output_of_responses(self._conversation.responses),
            diagnostic=stop.diagnostic,
            structured=structured,
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


def _forget(task: asyncio.Task[ChildResult]) -> None:
    """Nobody will ask for this result any more: a failure in it must not be reported as never retrieved."""
    if not task.cancelled():
        task.exception()
