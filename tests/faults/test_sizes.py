"""What is too large (protocol §5, §6): outputs, announcements, prompts and the notices nobody reads, through a host."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from celery.result import AsyncResult

from subagent_tasks.protocol.models import Notice
from subagent_tasks.testing import Kit, ScriptedModel, fake_app, reply, wait_until

TASK = {"description": "a task", "prompt": "say hello"}
JOB = {**TASK, "run_in_background": True}


def saying(text: str) -> ScriptedModel:
    model = ScriptedModel()
    model.on("hello", reply(text))
    return model


async def start_job(kit: Kit) -> str:
    return str(cast("dict[str, Any]", (await kit.session.call("subagent", JOB)).value)["jobId"])


async def test_an_output_over_the_limit_fails_with_the_text_that_fits(server: str) -> None:
    """Protocol §6: told to the caller, to `job_output` and to plain Celery, with the setting to raise."""
    said = "output of 6000 bytes exceeds the limit of 5000 bytes (SUBAGENT_TASKS_MAX_OUTPUT_BYTES)"
    async with fake_app(saying("x" * 6000), url=server, settings={"max_output_bytes": 5000}) as kit:
        called = await kit.session.call("subagent", TASK)
        assert (called.is_error, said in called.text) == (True, True)
        assert called.text.endswith("Partial output before the run ended:\n" + "x" * 5000)
        job_id = await start_job(kit)
        read = await kit.session.call("job_output", {"job_id": job_id, "wait": True})
        assert read.text.startswith("x" * 5000 + "\n[status: failed, error; diagnostic: output of 6000 bytes")
        result = cast("Any", AsyncResult)(job_id, app=kit.app.celery)
        assert (result.state, said in str(result.result)) == ("FAILURE", True)


async def test_a_large_output_is_read_from_its_record_and_not_announced(server: str) -> None:
    """Field fault 23: five megabytes to the caller, a hundred bytes to everybody who listens."""
    text = "x" * 5_000_000
    async with fake_app(saying(text), url=server, settings={"max_inline_bytes": 1000}) as kit:
        channel = kit.host.process.keys.session_channel(kit.session.id)
        async with cast("Any", kit.redis).pubsub() as listener:
            await listener.subscribe(channel)
            called = await kit.session.call("subagent", TASK, timeout=10)
            await start_job(kit)
            notice = await asyncio.wait_for(first_notice(kit), 10)
            heard: list[str] = []

            async def all_heard() -> bool:
                message = await listener.get_message(ignore_subscribe_messages=True, timeout=0.1)
                heard.extend([message["data"]] if message else [])
                return len(heard) == 3

            await wait_until(all_heard, description="both endings and the notice are announced")
        assert called.text == text
        read = await kit.session.call("job_output", {"job_id": notice.sender_id})
        assert read.text == text + "\n[status: completed]"
    assert max(len(message) for message in heard) < 1000


async def test_a_small_output_is_announced_whole(server: str) -> None:
    """Protocol §5: a waiting host needs no second trip."""
    async with fake_app(saying("hi there"), url=server) as kit:
        channel = kit.host.process.keys.session_channel(kit.session.id)
        async with cast("Any", kit.redis).pubsub() as listener:
            await listener.subscribe(channel)
            await kit.session.call("subagent", TASK)
            heard = await wait_until(
                lambda: listener.get_message(ignore_subscribe_messages=True, timeout=0.1), description="it is announced"
            )
    assert "hi there" in heard["data"]


async def test_a_prompt_over_the_limit_is_refused_by_name_before_anything_is_kept(server: str) -> None:
    """Protocol §6, P13."""
    async with fake_app(saying("hi"), url=server, settings={"max_prompt_bytes": 70_000}, worker=False) as kit:
        result = await kit.session.call("subagent", {**JOB, "prompt": "é" * 35_001})
        assert (result.code, result.is_error) == ("INVALID_ARGS", True)
        assert "prompt: 70002 bytes of UTF-8 exceed the limit of 70000; shorten it" in result.text
        assert not await kit.redis.exists(kit.host.process.keys.unsettled(kit.session.id))
        assert (await kit.session.call("subagent", {**JOB, "prompt": "é" * 35_000})).is_error is False
        for job in cast("list[dict[str, Any]]", (await kit.session.call("job_list", {})).value):
            await kit.session.kill(job["id"])


async def test_notices_over_the_limit_collapse_into_one_that_says_how_many(server: str) -> None:
    """Protocol §5: and which tool lists what they told of. Acknowledging it is acknowledging them all."""
    async with fake_app(saying("hi"), url=server, settings={"max_pending_notices": 3}) as kit:
        jobs = [await start_job(kit) for _ in range(5)]

        async def all_ended() -> bool:
            return (await kit.session.call("job_list", {})).text.count("[subagent] completed") == 5

        await wait_until(all_ended, description="all ended")
        reading = kit.session.notices()
        told = [await asyncio.wait_for(anext(aiter(reading)), 5) for _ in range(4)]
        dropped, *rest = told
        assert (dropped.kind, dropped.text) == (
            "notices-dropped",
            "2 older notices of this session made room for newer ones; job_list lists the jobs they told of.",
        )
        assert {notice.sender_id for notice in rest} < set(jobs)
        await kit.session.acknowledge(dropped)
        async with kit.app.host() as host:
            again = await host.open_session(kit.session.id)
            assert (await asyncio.wait_for(anext(aiter(again.notices())), 5)).id == rest[0].id


async def first_notice(kit: Kit) -> Notice:
    async for notice in kit.session.notices():
        return notice
    raise AssertionError("unreachable: notices never end")
