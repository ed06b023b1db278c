"""Every window between any two moves of a run that waits for a run of its own (P7): one fault, freeze, kill or shutdown
at each. What must come of which window is told in `test_suspension`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import get_args

import pytest
from driving_kit import OWNER
from fleet import Member
from line import WAIT_SECONDS, Died, Fault
from scene import RUN, Scene, scene

from subagent_tasks.agents.transcript import UNKNOWN_EFFECT
from subagent_tasks.protocol.lifecycle import State

MOVES = 18
"""How many moves a worker makes for a run with a tool and an own run, one after the other, that meets no fault."""

at_every_move = pytest.mark.parametrize("number", range(MOVES))


@asynccontextmanager
async def walked(url: str) -> AsyncGenerator[Scene]:
    """The scene that is walked through: a tool with an effect, and one own run."""
    async with scene(url, "first", with_effect=True) as at:
        at.effect.go_on.set()
        yield at


async def recover(at: Scene, lost: Member) -> None:
    """Let an heir go on with whatever the lost worker left behind, until all is done."""
    heir = await at.heir()
    await at.bury(lost)
    await at.fleet.work(heir)
    if await at.fleet.state(RUN) is not State.SETTLED:
        # A message died with its worker.
        await at.fleet.miss(*await at.fleet.runs())
        assert (await at.host.sweep()).republished == 1
        await at.fleet.work(heir)


async def until_held(at: Scene, number: int) -> tuple[asyncio.Event, asyncio.Future[None]]:
    """Let the worker work until it stands before that move: how to let it go on, and its work."""
    hold = at.worker.line.hold(None, "before", skip=number)
    working = asyncio.ensure_future(at.fleet.work(at.worker))
    await hold.until_reached()
    return hold.go_on, working


async def assert_done_though_cut_off(at: Scene) -> None:
    """One worker was cut off: at most one request was sent again, and the tool's effect may be unknown."""
    results = set(await at.fleet.results(RUN))
    assert results in ({"had an effect", "first found"}, {UNKNOWN_EFFECT, "first found"})
    again = at.requests("main task") - 2, at.requests("do first") - 1
    assert again in ((0, 0), (1, 0), (0, 1))
    assert at.effect.count == 1 or (at.effect.count == 0 and UNKNOWN_EFFECT in results)
    assert (await at.fleet.outcome(RUN)).text == "all done"
    assert (len(await at.fleet.results(RUN)), len(await at.fleet.runs())) == (2, 2)
    assert [notice.sender_id for notice in await at.host.sessions.notices(OWNER, after="0-0")] == [RUN]


async def test_every_move_is_walked(bundled_server_url: str) -> None:
    """Style: a further move would have windows that nobody looks at."""
    async with walked(bundled_server_url) as at:
        before = len(at.worker.line.made)
        await at.fleet.work(at.worker)
        assert len(at.worker.line.made) - before == MOVES, at.worker.line.made[before:]
        await at.assert_done_once("had an effect", "first found", effects=1)


@at_every_move
@pytest.mark.parametrize("fault", get_args(Fault))
async def test_one_fault_repeats_nothing(bundled_server_url: str, fault: Fault, number: int) -> None:
    """P7: at most the model request in flight is sent again, and a tool may be told to have an unknown effect."""
    async with walked(bundled_server_url) as at:
        at.worker.line.fail_at(number, fault)
        with suppress(Died):
            await at.fleet.work(at.worker)
        if fault == "reply lost":
            await at.assert_done_once("had an effect", "first found", effects=1)
            return
        await at.worker.die()
        await recover(at, at.worker)
        await assert_done_though_cut_off(at)


@at_every_move
async def test_a_freeze_changes_nothing_afterwards(bundled_server_url: str, number: int) -> None:
    """P2: another worker does it all; once the frozen one thaws, nothing it does counts."""
    async with walked(bundled_server_url) as at:
        go_on, working = await until_held(at, number)
        await recover(at, at.worker)
        kept, effects, requests = await at.fleet.kept(), at.effect.count, at.model.requests
        # A claim waits for the next heartbeat, which may have come first.
        await at.host.processes.beat(at.worker.id)
        go_on.set()
        await asyncio.wait_for(working, WAIT_SECONDS)
        assert (await at.fleet.kept(), at.effect.count, at.model.requests) == (kept, effects, requests)
        assert at.effect.count <= 1


@at_every_move
async def test_a_kill_lets_nothing_more_start(bundled_server_url: str, number: int) -> None:
    """P5: what had started may end, and a completion may beat its kill; then there is nothing left of the tree."""
    async with walked(bundled_server_url) as at:
        go_on, working = await until_held(at, number)
        await at.host.settler.kill(RUN, reason="enough")
        before = (at.effect.count, at.model.requests, len(await at.fleet.runs()))
        go_on.set()
        await asyncio.wait_for(working, WAIT_SECONDS)
        await at.fleet.work(at.worker)
        await at.host.sweep()
        assert (at.effect.count, at.model.requests, len(await at.fleet.runs())) == before
        assert [notice.sender_id for notice in await at.host.sessions.notices(OWNER, after="0-0")] == [RUN]


@at_every_move
async def test_a_shutdown_loses_nothing(bundled_server_url: str, number: int) -> None:
    """P1, P7: the worker hands back what it has; another goes on."""
    async with walked(bundled_server_url) as at:
        go_on, working = await until_held(at, number)
        leaving = asyncio.ensure_future(at.worker.executor.release_all())
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.wait_for(leaving, WAIT_SECONDS)
        await at.worker.die()
        await asyncio.wait({working})
        await recover(at, at.worker)
        await assert_done_though_cut_off(at)
