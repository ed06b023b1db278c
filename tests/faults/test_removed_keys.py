"""Keys removed from outside (an operator's DEL, an eviction): each loss has an answer, and nobody spins over it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest

from subagent_tasks.protocol.models import Notice
from subagent_tasks.testing import Kit, ScriptedModel, WorkerThread, fake_app, reply, wait_for, wait_until

JOB = {"description": "a task", "prompt": "say hello", "run_in_background": True}
LEASE_SECONDS = 0.3


async def start_job(kit: Kit) -> str:
    return str(cast("dict[str, Any]", (await kit.session.call("subagent", JOB)).value)["jobId"])


def saying(*steps: Any) -> ScriptedModel:
    model = ScriptedModel()
    model.on("hello", [*steps])
    return model


async def first_notice(kit: Kit) -> Notice:
    async for notice in kit.session.notices():
        return notice
    raise AssertionError("unreachable: notices never end")


async def test_a_run_whose_prompt_was_removed_fails_and_says_so(fake_server_url: str) -> None:
    """Field fault 20: it is announced like any ending."""
    async with fake_app(saying(reply("hi")), url=fake_server_url, worker=False) as kit:
        job_id = await start_job(kit)
        await kit.redis.delete(kit.host.process.keys.inbox(job_id))
        with WorkerThread(kit.app.celery):
            notice = await asyncio.wait_for(first_notice(kit), 5)
    assert notice.sender_id == job_id
    assert "failed, the run's prompt is missing from its inbox: it was removed from outside" in notice.text


async def test_a_driver_whose_run_was_removed_lets_go_and_says_so_once(
    bundled_server_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Field fault 20, P8: its owner is told that there is no such job, and who waits for it does so as long as said."""
    gate = asyncio.Event()
    model = saying(wait_for(gate), reply("too late"))
    settings = {"lease_seconds": LEASE_SECONDS}
    async with fake_app(model, url=bundled_server_url, settings=settings, check_leaks=False) as kit:
        job_id = await start_job(kit)
        call = asyncio.ensure_future(kit.session.call("subagent", {**JOB, "run_in_background": False}, timeout=1))
        await wait_until(lambda: model.requests == 2, description="both children ask their model")
        keys = kit.host.process.keys
        runs = cast("set[str]", await cast("Any", kit.redis.smembers(keys.unsettled(kit.session.id))))
        await kit.redis.delete(*(keys.session(run_id) for run_id in runs))
        gate.set()
        assert (await kit.session.call("job_output", {"job_id": job_id})).code == "UNKNOWN_JOB"
        assert (await call).code == "TIMEOUT"

        async def nobody_drives() -> bool:
            return len(said()) >= 2 and not await kit.redis.keys(keys.driven("*"))

        def said() -> list[str]:
            """What the driver of both warns of."""
            drives = [record for record in caplog.records if record.name == "subagent_tasks.execution"]
            return [record.getMessage() for record in drives if record.levelno >= logging.WARNING]

        await wait_until(nobody_drives, description="the worker let go of both, and says so")
        await kit.redis.flushdb()  # what counted for the removed records
    assert [line.partition(" run_id")[0] for line in said()] == ["run lost to another worker"] * 2


async def test_a_queued_run_that_was_removed_is_forgotten_by_its_queue(
    bundled_server_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Field fault 20, P10: its message finds nothing to do, and no sweep looks for it for ever."""
    async with fake_app(
        saying(reply("hi")),
        url=bundled_server_url,
        settings={"lease_seconds": LEASE_SECONDS},
        worker=False,
        check_leaks=False,
    ) as kit:
        job_id = await start_job(kit)
        keys, [provider] = kit.host.process.keys, kit.app.providers.values()
        await kit.redis.delete(keys.session(job_id), keys.inbox(job_id))
        queued = keys.queued(f"{kit.app.settings.namespace}.subagents.{provider.name}")
        assert await kit.redis.exists(queued) == 1
        with WorkerThread(kit.app.celery):

            async def is_forgotten() -> bool:
                return not await kit.redis.exists(queued)

            await wait_until(is_forgotten, description="the queue has forgotten it")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_reader_whose_notices_were_removed_hears_the_next_one(
    bundled_server_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Field fault 20: the stream is made anew behind its cursor, nothing is told twice, and nobody complains."""
    async with fake_app(saying(reply("hi")), url=bundled_server_url) as kit:
        reading = kit.session.notices()
        first = await start_job(kit)
        notice = await asyncio.wait_for(anext(aiter(reading)), 5)
        await kit.session.acknowledge(notice)
        waiting = asyncio.ensure_future(anext(aiter(reading)))
        await kit.redis.delete(kit.host.process.keys.notices(kit.session.id))
        second = await start_job(kit)
        assert [notice.sender_id, (await asyncio.wait_for(waiting, 5)).sender_id] == [first, second]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
