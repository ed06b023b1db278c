"""P8: no call outlives its stated wait, whatever Redis does. The server is frozen: connections stay, nothing answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest
from conftest import Stage, arguments, start_job

from broker_config import EmbeddedServer
from subagent_tasks.host import Session
from subagent_tasks.testing import wait_until

SLACK_SECONDS = 1.0
"""What a call may take beyond its stated wait: it says so, it does not count milliseconds."""


@pytest.fixture
async def session(
    own_server: EmbeddedServer, make_stage: Callable[..., Stage]
) -> AsyncIterator[tuple[Session, EmbeddedServer]]:
    """A session whose server the test freezes. No worker: nothing that is accepted here ever ends.

    All numbers but the lease are the defaults: five seconds for a command, and redis-py tries four times.
    """
    stage = make_stage(url=own_server.url)
    async with stage.session() as session:
        yield session, own_server
        own_server.thaw()


async def timed(call: object) -> float:
    started_at = time.monotonic()
    await call  # pyright: ignore[reportGeneralTypeIssues]
    return time.monotonic() - started_at


async def test_a_foreground_call_returns_in_time(session: tuple[Session, EmbeddedServer]) -> None:
    """P8: frozen before the call."""
    one, server = session
    server.freeze()
    started_at = time.monotonic()
    result = await one.call("subagent", arguments("p8"), timeout=1)
    assert time.monotonic() - started_at < 1 + SLACK_SECONDS
    assert result.is_error, result


async def test_a_foreground_call_in_progress_returns_in_time(session: tuple[Session, EmbeddedServer]) -> None:
    """P8: frozen while it waits."""
    one, server = session
    started_at = time.monotonic()
    call = asyncio.ensure_future(one.call("subagent", arguments("p8"), timeout=1))
    await asyncio.sleep(0.3)
    server.freeze()
    result = await call
    assert time.monotonic() - started_at < 1 + SLACK_SECONDS
    assert result.code == "TIMEOUT", result


async def test_a_waiting_read_returns_in_time(session: tuple[Session, EmbeddedServer]) -> None:
    """P8, field fault 10."""
    one, server = session
    job_id = await start_job(one, "p8")
    server.freeze()
    started_at = time.monotonic()
    result = await one.call("job_output", {"job_id": job_id, "wait": True, "timeout_ms": 1000})
    assert time.monotonic() - started_at < 1 + SLACK_SECONDS
    assert result.code == "BROKER_UNAVAILABLE", result


async def test_a_waiting_read_in_progress_returns_in_time(session: tuple[Session, EmbeddedServer]) -> None:
    """P8, field fault 10: frozen while it waits."""
    one, server = session
    job_id = await start_job(one, "p8")
    started_at = time.monotonic()
    call = asyncio.ensure_future(one.call("job_output", {"job_id": job_id, "wait": True, "timeout_ms": 1000}))
    await asyncio.sleep(0.3)
    server.freeze()
    result = await call
    assert time.monotonic() - started_at < 1 + SLACK_SECONDS
    assert result.is_error, result
