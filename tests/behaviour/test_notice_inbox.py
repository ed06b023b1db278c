"""What a notice starts in its owner's agent loop (behaviour §3.7): the loop is the test, the jobs are real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from subagent_tasks import Notice, NoticeInbox, Session
from subagent_tasks.testing import Kit, ScriptedModel, fake_app, reply, wait_until

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def an_inbox(**job_tools: Any) -> AsyncGenerator[tuple[Kit, NoticeInbox]]:
    """A session's inbox, over jobs that end at once."""
    model = ScriptedModel()
    model.on("", reply("done"))
    async with fake_app(model, job_tools=job_tools) as kit, kit.session.notice_inbox() as inbox:
        yield kit, inbox


async def ended_job(session: Session) -> str:
    """A job of the session that has ended and was announced; its id."""
    task = {"description": "a task", "prompt": "a task", "run_in_background": True}
    started = await session.call("subagent", task)
    assert isinstance(started.value, dict)
    return str(started.value["jobId"])


def ids(notices: list[Notice]) -> list[str]:
    return [notice.sender_id for notice in notices]


async def arrived(inbox: NoticeInbox, count: int) -> list[Notice]:
    """What a busy loop takes until it has so many."""
    taken: list[Notice] = []

    def has_come() -> bool:
        taken.extend(inbox.take())
        return len(taken) >= count

    await wait_until(has_come, description=f"{count} notices have come")
    return taken


async def stays_asleep(inbox: NoticeInbox, *, until_arrived: int) -> list[Notice]:
    """Sleep while so many notices come; what a turn that somebody else opens finds then."""
    waking = asyncio.ensure_future(inbox.wake())
    await asyncio.sleep(0)
    taken = await arrived(inbox, until_arrived)
    assert not waking.done()
    waking.cancel()
    return taken


async def test_a_job_that_ends_opens_one_turn_of_an_idle_owner() -> None:
    """behaviour §10.72: with the notice's text."""
    async with an_inbox() as (kit, inbox):
        job_id = await ended_job(kit.session)
        async with asyncio.timeout(5):
            (notice,) = await inbox.wake()
        assert (notice.sender_id, "finished [status: completed]" in notice.text) == (job_id, True)
        assert inbox.take() == []


async def test_a_job_that_ends_joins_the_turn_of_a_busy_owner() -> None:
    """behaviour §10.72: at the next step, and wakes nobody after it."""
    async with an_inbox(max_consecutive_wakes=1) as (kit, inbox):
        job_id = await ended_job(kit.session)
        assert ids(await arrived(inbox, 1)) == [job_id]
        later = await ended_job(kit.session)
        async with asyncio.timeout(5):
            # The one wake there may be was not spent.
            assert ids(await inbox.wake()) == [later]


async def test_quiet_delivery_wakes_nobody() -> None:
    """behaviour §10.73: the notice waits for the next turn, whoever opens it."""
    async with an_inbox(completion_delivery="quiet") as (kit, inbox):
        job_id = await ended_job(kit.session)
        assert ids(await stays_asleep(inbox, until_arrived=1)) == [job_id]


async def test_notices_open_so_many_turns_in_a_row_and_no_more() -> None:
    """behaviour §10.74: the fourth waits for the next turn."""
    async with an_inbox() as (kit, inbox):
        for _ in range(3):
            job_id = await ended_job(kit.session)
            async with asyncio.timeout(5):
                assert ids(await inbox.wake()) == [job_id]
        fourth = await ended_job(kit.session)
        assert ids(await stays_asleep(inbox, until_arrived=1)) == [fourth]


async def test_no_wakes_at_all_are_a_budget_too() -> None:
    """behaviour §10.74: no user's message adds to what is none."""
    async with an_inbox(max_consecutive_wakes=0) as (kit, inbox):
        inbox.user_spoke()
        await ended_job(kit.session)
        await stays_asleep(inbox, until_arrived=1)


async def test_a_users_message_lets_notices_open_turns_again() -> None:
    """behaviour §10.74: the budget is whole again; that notices were taken does not restore it."""
    async with an_inbox(max_consecutive_wakes=1) as (kit, inbox):
        for _ in range(2):
            job_id = await ended_job(kit.session)
            inbox.user_spoke()
            async with asyncio.timeout(5):
                assert ids(await inbox.wake()) == [job_id]


async def test_an_inbox_ends_with_its_session() -> None:
    """P8: a loop that waits for notices that cannot come is let go."""
    async with an_inbox() as (kit, inbox):
        await ended_job(kit.session)
        await arrived(inbox, 1)
        waking = asyncio.ensure_future(inbox.wake())
        await kit.session.close()
        async with asyncio.timeout(5):
            assert await waking == []
