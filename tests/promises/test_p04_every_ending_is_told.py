"""P4: a notice for every ending that was not already told, in order, never lost, never twice to one reader."""

from __future__ import annotations

import asyncio
import threading

from stage import Stage, job, notices_of, start_job

from subagent_tasks.testing import call_tool, fail, reply, wait_for, wait_until


async def test_each_kind_of_ending_is_told_once(stage: Stage) -> None:
    """P4: completed, failed, killed and lost with its worker; in the order in which they ended."""
    stage.ensure(1)
    stage.model.on("p4-good", reply("the answer"))
    stage.model.on("p4-bad", fail(400))
    stage.model.on("p4-killed", [call_tool("hold", {"text": "p4-killed"}), reply("never")])
    stage.model.on("p4-lost", [call_tool("hold", {"text": "p4-lost"}), reply("never")])
    async with stage.session() as session:

        async def ended(job_id: str) -> str:
            await wait_until(lambda: stage.state(job_id) == "settled", description="it ended")
            return job_id

        good = await ended(await start_job(session, "p4-good"))
        bad = await ended(await start_job(session, "p4-bad"))
        killed = await start_job(session, "p4-killed")
        await stage.noted("p4-killed begun")
        await session.kill(killed)
        await ended(killed)
        lost = await start_job(session, "p4-lost", tool="subagent_once")
        await stage.noted("p4-lost begun")
        for worker in stage.living:
            worker.kill()
        await ended(lost)
        told = [
            (notice.sender_id, notice.text.partition("[status: ")[2][:6]) for notice in await notices_of(session, 4)
        ]
        assert told == [(good, "comple"), (bad, "failed"), (killed, "killed"), (lost, "failed")]
        assert stage.redis.xlen(stage.keys.notices(session.id)) == 4


async def test_what_ended_while_no_host_ran_is_told_to_the_next_one(stage: Stage) -> None:
    """P4: durable; a reader that acknowledged a notice does not get it again from another host."""
    stage.ensure(1)
    gate = threading.Event()
    stage.model.on("p4-early", reply("early"))
    stage.model.on("p4-late", [wait_for(gate), reply("late")])
    async with stage.session("p4-hosts") as session:
        early, late = await start_job(session, "p4-early"), await start_job(session, "p4-late")
        [notice] = await notices_of(session, 1)
        assert notice.sender_id == early
        await session.acknowledge(notice)
    gate.set()
    await wait_until(lambda: stage.state(late) == "settled", description="it ended with no host running")
    async with stage.session("p4-hosts") as session:
        [notice] = await notices_of(session, 1)
        assert notice.sender_id == late


async def test_endings_are_told_live_and_in_order_while_a_reader_listens(stage: Stage) -> None:
    """P4, field faults 17 and 18: ten that end at once, some before the reader subscribed, some after."""
    stage.ensure(1)
    stage.model.on("p4-many", reply("quick"))
    async with stage.session() as session:
        jobs = [await start_job(session, "p4-many") for _ in range(5)]
        reading = asyncio.ensure_future(notices_of(session, 10))
        jobs += [await start_job(session, "p4-many") for _ in range(5)]
        told = [notice.sender_id for notice in await reading]
        assert (sorted(told), len(set(told))) == (sorted(jobs), 10)


async def test_what_was_read_is_not_told_again(stage: Stage) -> None:
    """Protocol §5: a terminal `job_output` is the report; the other ending is the only notice."""
    stage.ensure(1)
    stage.model.on("p4-read", reply("read"))
    async with stage.session() as session:
        read, unread = await start_job(session, "p4-read"), await start_job(session, "p4-read")
        for job_id in (read, unread):
            await wait_until(lambda id=job_id: stage.state(id) == "settled", description="it ended")
        assert (await job(session, read))["text"] == "read"
        assert [notice.sender_id for notice in await notices_of(session, 1)] == [unread]
