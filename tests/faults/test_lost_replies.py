"""Each move's reply lost once while a host and a worker are at work: nothing happens twice (protocol §1)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from subagent_tasks.protocol import scripts
from subagent_tasks.protocol.models import Notice
from subagent_tasks.protocol.scripts import Script
from subagent_tasks.testing import Kit, ScriptedModel, call_tool, fake_app, reply, wait_for, wait_until
from subagent_tasks.testing.faults import FaultyServer

TASK = {"description": "a task", "prompt": "say hello"}
JOB = {**TASK, "run_in_background": True}

every_move_of_a_run = pytest.mark.parametrize(
    "script",
    [scripts.OPEN, scripts.ADMIT, scripts.CLAIM, scripts.TAKE, scripts.APPEND, scripts.SETTLE, scripts.BEAT],
    ids=lambda script: script.name,
)


class Counter:
    """A tool with an effect that must not happen twice."""

    def __init__(self) -> None:
        self.calls = 0

    def count(self) -> str:
        """Count once more."""
        self.calls += 1
        return f"counted {self.calls}"


def hello() -> ScriptedModel:
    model = ScriptedModel()
    model.on("hello", [call_tool("count", {}), reply("hi there")])
    return model


@asynccontextmanager
async def behind(faulty: FaultyServer, model: ScriptedModel, counter: Counter | None = None) -> AsyncGenerator[Kit]:
    """Host and worker behind the proxy; nothing unsettled and no leaked key at the end."""
    tools = [] if counter is None else [counter.count]
    async with fake_app(model, url=faulty.url, tools=tools) as kit:
        yield kit


async def first_notice(kit: Kit) -> Notice:
    async for notice in kit.session.notices():
        return notice
    raise AssertionError("unreachable: notices never end")


async def start_job(kit: Kit) -> str:
    result = await kit.session.call("subagent", JOB, call_id="c1")
    return str(cast("dict[str, Any]", result.value)["jobId"])


@every_move_of_a_run
async def test_a_foreground_call_answers_as_if_nothing_was_lost(bundled_server_url: str, script: Script) -> None:
    """P7: one run, one effect, one answer."""
    counter, model = Counter(), hello()
    with FaultyServer(bundled_server_url) as faulty:
        faulty.lose_reply(script)
        async with behind(faulty, model, counter) as kit:
            result = await kit.session.call("subagent", TASK, call_id="c1", timeout=5)
        assert faulty.replies_lost == 1
    assert (result.text, result.is_error) == ("hi there", False)
    assert (counter.calls, model.requests) == (1, 2)


@every_move_of_a_run
async def test_a_job_is_done_and_told_once(bundled_server_url: str, script: Script) -> None:
    """P3, P4."""
    counter, model = Counter(), hello()
    with FaultyServer(bundled_server_url) as faulty:
        faulty.lose_reply(script)
        async with behind(faulty, model, counter) as kit:
            job_id = await start_job(kit)
            notice = await first_notice(kit)
            stored = await kit.host.process.sessions.notices(kit.session.id, after="0-0")
        assert faulty.replies_lost == 1
    assert notice.sender_id == job_id
    assert [other.sender_id for other in stored] == [job_id]
    assert (counter.calls, model.requests) == (1, 2)


async def test_a_read_whose_reply_was_lost_is_answered(bundled_server_url: str) -> None:
    """protocol §5: the notice was withdrawn by the first try, and the second answers the same."""
    with FaultyServer(bundled_server_url) as faulty:
        async with behind(faulty, hello(), Counter()) as kit:
            job_id = await start_job(kit)
            await first_notice(kit)
            faulty.lose_reply(scripts.COLLECT)
            result = await kit.session.call("job_output", {"job_id": job_id})
        assert faulty.replies_lost == 1
    assert not result.is_error
    assert "hi there" in result.text


async def test_an_acknowledgement_whose_reply_was_lost_holds(bundled_server_url: str) -> None:
    """protocol §5."""
    with FaultyServer(bundled_server_url) as faulty:
        async with behind(faulty, hello(), Counter()) as kit:
            await start_job(kit)
            notice = await first_notice(kit)
            faulty.lose_reply(scripts.ACK_NOTICE)
            await kit.session.acknowledge(notice)
            assert await kit.host.process.sessions.cursor(kit.session.id, "main") == notice.id
        assert faulty.replies_lost == 1


async def test_a_kill_whose_reply_was_lost_ends_the_job_once(bundled_server_url: str) -> None:
    """P5: settled as killed, announced once."""
    never = asyncio.Event()
    model = ScriptedModel()
    model.on("hello", [wait_for(never), reply("too late")])
    with FaultyServer(bundled_server_url) as faulty:
        async with behind(faulty, model) as kit:
            job_id = await start_job(kit)
            await wait_until(lambda: model.requests, description="the child asks its model")
            faulty.lose_reply(scripts.KILL)
            await kit.session.kill(job_id)
            notice = await first_notice(kit)
        assert faulty.replies_lost == 1
    assert notice.sender_id == job_id
    assert "[status: killed" in notice.text


# Celery warns at each lost connection of a change it once planned; here a warning would end the worker.
@pytest.mark.filterwarnings("ignore::celery.exceptions.CPendingDeprecationWarning")
async def test_a_call_survives_that_every_connection_is_cut(bundled_server_url: str) -> None:
    """Field faults 9 and 10: doorbell, heartbeat and worker come back by themselves."""
    gate = asyncio.Event()
    model = ScriptedModel()
    model.on("hello", [wait_for(gate), reply("hi there")])
    with FaultyServer(bundled_server_url) as faulty:
        async with behind(faulty, model) as kit:
            call = asyncio.ensure_future(kit.session.call("subagent", TASK, timeout=20))
            await wait_until(lambda: model.requests, description="the child asks its model")
            faulty.cut()
            gate.set()
            async with asyncio.timeout(5):
                result = await call
    assert result.text == "hi there"
