"""What the tests of this folder need again and again: sessions, further declarations, jobs and their readings."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from subagent_tasks import Host, Notice, Session, SubagentApp, ToolResult
from subagent_tasks.protocol.interfaces import Provider
from subagent_tasks.protocol.keys import Keys
from subagent_tasks.protocol.models import text_block
from subagent_tasks.testing import Kit, ScriptedModel, wait_until
from tests.behaviour.provider import Child, ScriptedProvider


@dataclass
class Bench:
    """A running app: provider `scripted` behind the tool `subagent`, `spawn` with `model` behind `spawn_agent`."""

    kit: Kit
    host: Host
    provider: ScriptedProvider
    model: ScriptedModel
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    async def session(self, *, host: Host | None = None) -> Session:
        """A session that no other test uses."""
        return await (host or self.host).open_session(f"session-{next(self.numbers)}")

    @asynccontextmanager
    async def declared(self, **tool: Any) -> AsyncGenerator[tuple[Session, str]]:
        """A session of a host whose app has one more delegation tool, and the tool's name."""
        config = {"provider": "scripted", "tool_name": f"tool_{next(self.numbers)}", **tool}
        self.kit.app.add_delegation_tool(**config)
        async with self.kit.app.host() as host:
            yield await self.session(host=host), str(config["tool_name"])

    def other_app(self, *, providers: Sequence[Provider] | None = None, **settings: Any) -> SubagentApp:
        """Another declaration in the same namespace, with providers (the same unless given) and without a tool."""
        app = SubagentApp(self.kit.app.settings.model_copy(update=settings))
        for provider in self.kit.app.providers.values() if providers is None else providers:
            app.add_provider(provider)
        return app

    async def job(self, session: Session, arguments: dict[str, Any], *, call_id: str | None = None) -> str:
        """Start a background job and return its id."""
        return job_id_of(await session.call("subagent", arguments, call_id=call_id))

    async def running_job(self, session: Session, child: Child) -> str:
        """Start a background job and return its id once the child runs."""
        job_id = await self.job(session, child.in_background())
        await until(lambda: child.is_running, "the child runs")
        return job_id

    async def settled(self, session: Session, job_id: str) -> ToolResult:
        """The job's reading once it has ended."""
        result = await session.call("job_output", {"job_id": job_id, "wait": True, "timeout_ms": 5000})
        assert status_of(result) in ("completed", "failed", "killed"), result.text
        return result


def job_id_of(result: ToolResult) -> str:
    """The id in the value of a background call."""
    assert isinstance(result.value, dict), result.text
    return str(result.value["jobId"])


def job_of(result: ToolResult) -> dict[str, Any]:
    """The public snapshot in a job tool's value."""
    assert isinstance(result.value, dict), result.text
    return cast("dict[str, Any]", result.value["job"])


def status_of(result: ToolResult) -> str:
    return str(job_of(result)["status"])


def run_id_of(result: ToolResult) -> str:
    """The id in the value of a foreground call."""
    assert isinstance(result.value, dict), result.text
    return str(result.value["runId"])


def foreground_value(run_id: str, *texts: str) -> dict[str, Any]:
    return {"kind": "foreground", "runId": run_id, "output": [text_block(text) for text in texts]}


async def until(condition: Any, description: str) -> None:
    """Wait for a condition, at most 5 s."""
    await wait_until(condition, description=description)


async def first_notices(session: Session, count: int) -> list[Notice]:
    """The next notices; fails when there are not that many within 5 s."""
    found: list[Notice] = []
    notices = session.notices()
    try:
        async with asyncio.timeout(5):
            while len(found) < count:
                found.append(await anext(notices))
    finally:
        await cast("Any", notices).aclose()
    return found


async def pending_notices(bench: Bench, session: Session) -> int:
    """How many notices a new reader of the session would find."""
    keys = Keys(bench.kit.app.settings.namespace)
    return int(await bench.kit.redis.xlen(keys.notices(session.id)))
