"""The parent: a fixed sequence of tool calls, as a model would make them, and what came back.

Decides what is asked, in which order. It sees tool results and notices, nothing else; how the runs went is read from
their records by `show`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from subagent_tasks.demo.files import SourceFile, cut
from subagent_tasks.errors import OperatorError
from subagent_tasks.host import Session
from subagent_tasks.protocol.lifecycle import State
from subagent_tasks.protocol.models import Notice, ToolResult

PARALLEL = 3
CALL_TIMEOUT_SECONDS = 120.0
JOB_START_SECONDS = 30.0
POLL_SECONDS = 0.02
MAX_JOB_PROMPT_BYTES = 2000


@dataclass(frozen=True, slots=True)
class Exchange:
    """One tool call of the parent's model and its result. `run_id` is the child's, where there is one."""

    name: str
    arguments: dict[str, Any]
    call_id: str
    result: ToolResult
    seconds: float


Tell = Callable[[Exchange | Notice], None]
StateOf = Callable[[str], Awaitable[State | None]]


@dataclass(slots=True)
class Story:
    """What happened, in the parent's eyes."""

    summaries: list[Exchange] = field(default_factory=list[Exchange])
    started: list[Exchange] = field(default_factory=list[Exchange])
    listing: Exchange | None = None
    killing: Exchange | None = None
    notices: list[Notice] = field(default_factory=list[Notice])
    collected: Exchange | None = None
    after_kill: Exchange | None = None

    @property
    def job_ids(self) -> list[str]:
        return [job_id_of(exchange.result) for exchange in self.started]


class Parent:
    """Plays the script in one session. `tell` hears of each exchange and notice when it is there."""

    def __init__(self, session: Session, *, tell: Tell, state_of: StateOf) -> None:
        self._session = session
        self._tell = tell
        self._state_of = state_of
        self.story = Story()

    async def summarise(self, files: Sequence[SourceFile]) -> None:
        """One child per file, in the foreground, three at a time."""
        free = asyncio.Semaphore(PARALLEL)

        async def one(number: int, file: SourceFile) -> Exchange:
            async with free:
                question = f"{file.name}:\n{file.text}\n\nIn one sentence, what is this text about?"
                return await self._delegate(f"file-{number}", f"Summarise {file.name}", question)

        self.story.summaries = list(await asyncio.gather(*(one(number, file) for number, file in enumerate(files, 1))))

    async def background(self, files: Sequence[SourceFile]) -> None:
        """Two jobs: the first ends by itself and is collected, the second is killed at work.

        Raises `OperatorError` when a job does not start or no notice comes in time.
        """
        story = self.story
        told = "\n".join(exchange.result.text for exchange in story.summaries if not exchange.result.is_error)
        everything = "\n".join(file.text for file in files)
        overview = f"{cut(told, MAX_JOB_PROMPT_BYTES)}\n\nIn one sentence, what do these texts have in common?"
        essay = f"{cut(everything, MAX_JOB_PROMPT_BYTES)}\n\nWrite a long, detailed essay about all of this."
        story.started.append(await self._delegate("overview", "Overview of all", overview, background=True))
        story.started.append(await self._delegate("essay", "Long essay", essay, background=True))
        first, second = story.job_ids

        # A model would go on with other work; the script waits for the one moment it wants to show.
        await self._until_taken(second)
        story.listing = await self._call("job_list", {}, call_id="list")
        story.killing = await self._call("job_kill", {"job_id": second, "reason": "too long"}, call_id="kill")

        try:
            async with asyncio.timeout(CALL_TIMEOUT_SECONDS):
                async for notice in self._session.notices():
                    self._tell(notice)
                    story.notices.append(notice)
                    await self._session.acknowledge(notice)
                    if notice.sender_id == first:
                        break
        except TimeoutError as error:
            raise OperatorError(f"no notice of job {first} within {CALL_TIMEOUT_SECONDS:g} s") from error
        wait = {"wait": True, "timeout_ms": 30_000}
        story.collected = await self._call("job_output", {"job_id": first, **wait}, call_id="collect")
        story.after_kill = await self._call("job_output", {"job_id": second, **wait}, call_id="collect-killed")

    async def _delegate(self, call_id: str, description: str, prompt: str, *, background: bool = False) -> Exchange:
        arguments: dict[str, Any] = {"description": description, "prompt": prompt}
        if background:
            arguments["run_in_background"] = True
        return await self._call("subagent", arguments, call_id=call_id)

    async def _call(self, name: str, arguments: dict[str, Any], *, call_id: str) -> Exchange:
        began = time.monotonic()
        result = await self._session.call(name, arguments, call_id=call_id, timeout=CALL_TIMEOUT_SECONDS)
        exchange = Exchange(name, arguments, call_id, result, time.monotonic() - began)
        self._tell(exchange)
        return exchange

    async def _until_taken(self, job_id: str) -> None:
        try:
            async with asyncio.timeout(JOB_START_SECONDS):
                while await self._state_of(job_id) is State.QUEUED:  # noqa: ASYNC110  # a claim rings no bell
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError as error:
            raise OperatorError(f"no worker took job {job_id} within {JOB_START_SECONDS:g} s") from error


def job_id_of(result: ToolResult) -> str:
    """The id in a background call's result. Raises `OperatorError` with what came instead."""
    value = cast("dict[str, Any]", result.value) if isinstance(result.value, dict) else {}
    if "jobId" not in value:
        raise OperatorError(f"the background call started no job: {result.text}")
    return str(value["jobId"])
