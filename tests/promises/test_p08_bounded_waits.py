"""P8: no call outlives its stated wait. The server is frozen: connections stay and nothing is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from stage import MakeStage, Stage, arguments, start_job

from broker_config import EmbeddedServer
from subagent_tasks.host import Session
from subagent_tasks.protocol.models import Outcome
from subagent_tasks.testing import wait_until
from subagent_tasks.waiting import Waiting

SLACK_SECONDS = 2.0
"""One second for a last question to Redis (`ANSWER_SECONDS`), one for a busy machine."""


@pytest.fixture
async def stage_session(own_server: EmbeddedServer, make_stage: MakeStage) -> AsyncIterator[tuple[Stage, Session]]:
    """A session whose server the test freezes. No worker: nothing that is accepted here ever ends.

    All numbers but the lease are the defaults: five seconds for a command.
    """
    stage = make_stage(url=own_server.url)
    async with stage.session() as session:
        yield stage, session
        own_server.thaw()


async def test_a_foreground_call_returns_in_time(
    stage_session: tuple[Stage, Session], own_server: EmbeddedServer
) -> None:
    """P8: frozen before the call."""
    _, session = stage_session
    own_server.freeze()
    started_at = time.monotonic()
    result = await session.call("subagent", arguments("p8"), timeout=1)
    assert time.monotonic() - started_at < 1 + SLACK_SECONDS
    assert result.code == "BROKER_UNAVAILABLE", result


async def test_a_foreground_call_in_progress_returns_in_time(
    stage_session: tuple[Stage, Session], own_server: EmbeddedServer
) -> None:
    """P8: frozen while it waits."""
    stage, session = stage_session
    started_at = time.monotonic()
    call = asyncio.ensure_future(session.call("subagent", arguments("p8"), timeout=1))
    await wait_until(lambda: stage.redis.llen(stage.queue()), description="it is accepted")
    own_server.freeze()
    result = await call
    assert time.monotonic() - started_at < 1 + SLACK_SECONDS
    assert result.code == "TIMEOUT", result


async def test_what_a_caller_gave_up_is_ended_once_redis_answers(
    stage_session: tuple[Stage, Session], own_server: EmbeddedServer
) -> None:
    """Protocol §3: a foreground run belongs to its caller; a call that returned must not leave one behind."""
    stage, session = stage_session
    call = asyncio.ensure_future(session.call("subagent", arguments("p8"), timeout=0.5))
    await wait_until(lambda: stage.redis.llen(stage.queue()), description="it is accepted")
    own_server.freeze()
    await call
    own_server.thaw()
    await wait_until(lambda: stage.states() == ["settled"], description="the run is settled")


async def test_a_waiting_read_returns_in_time(stage_session: tuple[Stage, Session], own_server: EmbeddedServer) -> None:
    """P8, field fault 10: frozen before the call."""
    _, session = stage_session
    job_id = await start_job(session, "p8")
    own_server.freeze()
    started_at = time.monotonic()
    result = await session.call("job_output", {"job_id": job_id, "wait": True, "timeout_ms": 1000})
    assert time.monotonic() - started_at < 1 + SLACK_SECONDS
    assert result.code == "BROKER_UNAVAILABLE", result


async def test_a_waiting_read_in_progress_returns_in_time(
    stage_session: tuple[Stage, Session], own_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P8, field fault 10: frozen while it waits."""
    _, session = stage_session
    job_id = await start_job(session, "p8")
    waits = asyncio.Event()
    expect = Waiting.expect

    def spied(self: Waiting, run_id: str) -> asyncio.Future[Outcome]:
        waits.set()
        return expect(self, run_id)

    monkeypatch.setattr(Waiting, "expect", spied)
    started_at = time.monotonic()
    call = asyncio.ensure_future(session.call("job_output", {"job_id": job_id, "wait": True, "timeout_ms": 1000}))
    await asyncio.wait_for(waits.wait(), 5)
    own_server.freeze()
    result = await call
    assert time.monotonic() - started_at < 1 + SLACK_SECONDS
    assert result.code == "BROKER_UNAVAILABLE", result


async def test_a_command_waits_no_longer_than_its_setting_says(
    own_server: EmbeddedServer, make_stage: MakeStage
) -> None:
    """`redis_timeout_seconds` is for a command with all its tries, not for each of them."""
    stage = make_stage(url=own_server.url, environment={"SUBAGENT_TASKS_REDIS_TIMEOUT_SECONDS": "0.5"})
    async with stage.session() as session:
        own_server.freeze()
        started_at = time.monotonic()
        result = await session.call("subagent", arguments("p8", background=True))
        assert time.monotonic() - started_at < 1.5
        assert result.code == "BROKER_UNAVAILABLE", result
        own_server.thaw()
