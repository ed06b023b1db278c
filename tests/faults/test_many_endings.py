"""Endings that come many at once, before anybody listens, or in the moment of their kill: none is lost or doubled."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, cast

from driving_kit import OWNER, MadeProvider, MadeRun, Stage, done, driving

from subagent_tasks.protocol.interfaces import Drive
from subagent_tasks.protocol.models import ChildResult, Notice
from subagent_tasks.testing import Kit, ScriptedModel, fake_app, reply, wait_until

MANY = 200
RACES = 300
SPREAD_SECONDS = 0.01
"""Twice what a run takes from its claim to its end."""


def echo() -> ScriptedModel:
    model = ScriptedModel()
    model.on("hello", reply("hi there"))
    return model


def task(number: int) -> dict[str, Any]:
    return {"description": f"task {number}", "prompt": "say hello"}


async def notices(kit: Kit, count: int) -> list[Notice]:
    found: list[Notice] = []
    async with asyncio.timeout(5), kit.app.host() as host:
        session = await host.open_session(kit.session.id)
        async for notice in session.notices():
            found.append(notice)
            if len(found) == count:
                break
    return found


async def test_two_hundred_jobs_that_end_before_anybody_subscribes_are_all_told(bundled_server_url: str) -> None:
    """P4, field fault 17: by a host that comes when all is over; each once, in the order of the endings."""
    async with fake_app(echo(), url=bundled_server_url, settings={"max_active_jobs": MANY}) as kit:
        starts = (kit.session.call("subagent", {**task(number), "run_in_background": True}) for number in range(MANY))
        jobs = {str(cast("dict[str, Any]", result.value)["jobId"]) for result in await asyncio.gather(*starts)}

        async def all_ended() -> bool:
            return not await kit.redis.exists(kit.host.process.keys.unsettled(kit.session.id))

        await wait_until(all_ended, description="all ended")
        told = await notices(kit, MANY)
    assert Counter(notice.sender_id for notice in told) == dict.fromkeys(jobs, 1)
    places = [tuple(int(part) for part in notice.id.split("-")) for notice in told]
    assert places == sorted(places)


async def test_two_hundred_calls_at_once_all_hear_their_ending(bundled_server_url: str) -> None:
    """Field fault 17: a child may have ended before its caller has heard that it was accepted.

    With so long a lease nobody looks again by himself in time.
    """
    async with fake_app(echo(), url=bundled_server_url, settings={"lease_seconds": 60}) as kit:
        results = await asyncio.gather(
            *(kit.session.call("subagent", task(number), timeout=20) for number in range(MANY))
        )
    assert Counter(result.text for result in results) == {"hi there": MANY}


async def test_a_kill_in_the_moment_of_the_end_tells_the_truth(bundled_server_url: str) -> None:
    """P3, field fault 16: three hundred kills within a millisecond of the end; `already_finished` never lies."""

    async def make(drive: Drive) -> Any:
        return MadeRun(ends)

    async def ends() -> ChildResult:
        return done()

    async with driving(bundled_server_url, MadeProvider(make), max_active_jobs=RACES) as stage:
        outcomes = Counter([await race(stage, f"run-{number}", number) for number in range(RACES)])
        told = [notice.sender_id for notice in await stage.sessions.notices(OWNER, after="0-0", count=RACES)]
    assert {("killed", "completed")} & set(outcomes) == set()
    assert {("already_finished", "killed")} & set(outcomes) == set()
    assert len(told) == len(set(told)) == RACES
    # Without both endings among them there was no race.
    assert {status for _, status in outcomes} == {"completed", "killed"}, outcomes


async def race(stage: Stage, run_id: str, number: int) -> tuple[str, str]:
    """What the kill said, and how the run ended. The first half of the kills sets out before the driver does."""
    await stage.accept(run_id)
    ahead_seconds = (number / RACES - 0.5) * SPREAD_SECONDS

    async def drive() -> None:
        await asyncio.sleep(max(0, -ahead_seconds))
        await stage.executor.activate(run_id, stage.queue)

    driving = asyncio.ensure_future(drive())
    await asyncio.sleep(max(0, ahead_seconds))
    said = await stage.delegation.kill(run_id, authority=OWNER, reason=None)
    await stage.beat()
    await driving
    record = await stage.record(run_id)
    assert record.outcome is not None, record.state
    settled = [event for event in await stage.runs.transcript(run_id) if event.kind == "settled"]
    assert len(settled) == 1
    return said, record.outcome.status
