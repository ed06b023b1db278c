"""Crash windows of a cascade: whatever ends a run ends all below it, whoever dies on the way (P5, protocol §3).

The tree here is three deep: a root run waits for two, and one of them for two of its own, and has a job besides. The
walk from the root is one kill per descendant; what is still to be walked stands in the set `cascade`.

     1  the walker dies before or after each of its kills
     2  it dies when all is walked and the walk is not struck off
     3  two walk at the same time
     4  a descendant is driven by a living worker when the walk comes to it
     5  a descendant's worker is dead, and nobody has noticed
     6  a descendant was taken from its dead worker while the walk was under way
     7  the killed run's own worker is dead
     8  a descendant starts one more while the walk is under way
     9  the run completes, and its driver dies before the walk of its jobs
    10  a descendant's record cannot be read
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast, get_args

import pytest
from driving_kit import OWNER
from fleet import Fleet, Member, fleet_on
from line import WAIT_SECONDS, Died, When
from scene import delegate

from subagent_tasks.protocol import scripts
from subagent_tasks.protocol.lifecycle import State
from subagent_tasks.providers import SpawnProvider
from subagent_tasks.testing import ScriptedModel, call_tools, reply, wait_for

ROOT = "root"
BELOW = ("branch", "leaf", "twig-1", "twig-2", "job")
KILLS = 1 + len(BELOW)


@dataclass
class Tree:
    """A tree of runs, and who works on it."""

    fleet: Fleet
    host: Member
    worker: Member
    model: ScriptedModel
    gate: asyncio.Event

    async def run(self, label: str) -> str:
        """The id of the one run of that name."""
        for run_id in await self.fleet.runs():
            if (await self.fleet.record(run_id)).spec.label == label:
                return run_id
        raise AssertionError(f"no run named {label}")

    async def statuses(self) -> dict[str, str]:
        """How each run below the root ended, or what state it is in."""
        found: dict[str, str] = {}
        for run_id in await self.fleet.runs() - {ROOT}:
            record = await self.fleet.record(run_id)
            found[record.spec.label] = record.outcome.status if record.outcome else str(record.state)
        return found

    async def assert_ended(self) -> None:
        """All of it was killed, and nothing is left to be walked."""
        assert await self.fleet.state(ROOT) is State.SETTLED
        assert await self.statuses() == dict.fromkeys(BELOW, "killed")
        assert await self.fleet.client.exists(self.fleet.keys.cascade) == 0
        assert [notice.sender_id for notice in await self.host.sessions.notices(OWNER, after="0-0")] == [ROOT]


@asynccontextmanager
async def tree(url: str) -> AsyncGenerator[Tree]:
    """The whole tree: root and branch are suspended, the rest is queued, nobody is at work."""
    model, gate = ScriptedModel(), asyncio.Event()
    model.on("main task", [call_tools(delegate("branch"), delegate("leaf")), reply("all done")])
    below = call_tools(delegate("twig-1"), delegate("twig-2"), delegate("job", run_in_background=True))
    model.on("do branch", [below, reply("branch done")])
    model.on("do", [wait_for(gate), reply("done")])
    async with fleet_on(url, SpawnProvider(model)) as fleet:
        host, worker = await fleet.member("host-1"), await fleet.member("worker-1")
        await host.sessions.open(OWNER)
        await fleet.accept(host, ROOT, prompt="main task")
        await fleet.drive(ROOT, worker)
        at = Tree(fleet, host, worker, model, gate)
        await fleet.drive(await at.run("branch"), worker)
        assert set((await at.statuses()).items()) > {("branch", "suspended"), ("leaf", "queued")}
        yield at


async def test_a_kill_ends_the_whole_tree(server: str) -> None:
    """P5: suspended and queued work at once, with nobody at work on it."""
    async with tree(server) as at:
        assert await at.host.settler.kill(ROOT, reason="enough") == "killed"
        await at.assert_ended()
        await at.fleet.work(at.worker)
        assert at.model.requests == 2


@pytest.mark.parametrize("kills", range(KILLS))
@pytest.mark.parametrize("when", get_args(When))
async def test_a_walk_whose_walker_died_is_ended_by_another(fake_server_url: str, when: When, kills: int) -> None:
    """P5: it dies before or after each of its kills; the next sweep of any process goes on from the set."""
    async with tree(fake_server_url) as at:
        walker = await at.fleet.member("host-2")
        hold = walker.line.hold(scripts.KILL, when, skip=kills)
        walking = asyncio.ensure_future(walker.settler.kill(ROOT, reason="enough"))
        await hold.until_reached()
        await walker.die()
        with suppress(Died):
            await walking
        if (when, kills) == ("before", 0):
            assert (await at.fleet.state(ROOT), await at.fleet.client.exists(at.fleet.keys.cascade)) == ("suspended", 0)
            await at.host.settler.kill(ROOT, reason="enough")
        await at.host.sweep()
        await at.assert_ended()


@pytest.mark.parametrize("when", get_args(When))
async def test_a_walk_that_was_done_and_not_struck_off_is_done_again(fake_server_url: str, when: When) -> None:
    """protocol §3: the walker removes it last; the second walk finds nothing to end."""
    async with tree(fake_server_url) as at:
        walker = await at.fleet.member("host-2")
        hold = walker.line.hold(scripts.CASCADED, when)
        walking = asyncio.ensure_future(walker.settler.kill(ROOT, reason="enough"))
        await hold.until_reached()
        await walker.die()
        with suppress(Died):
            await walking
        await at.host.sweep()
        await at.assert_ended()


async def test_two_walkers_end_each_run_once(fake_server_url: str) -> None:
    """P3: a sweeper walks while the killer still does."""
    async with tree(fake_server_url) as at:
        hold = at.worker.line.hold(scripts.KILL, "before", skip=2)
        walking = asyncio.ensure_future(at.worker.settler.kill(ROOT, reason="enough"))
        await hold.until_reached()
        await at.host.sweep()
        await at.assert_ended()
        before = await at.fleet.kept()
        hold.go_on.set()
        assert await asyncio.wait_for(walking, WAIT_SECONDS) == "killed"
        assert await at.fleet.kept() == before


async def test_what_a_living_worker_drives_ends_by_its_driver(fake_server_url: str) -> None:
    """P5: it is rung, its result is what the kill makes of it, and the walk is struck off behind it."""
    async with tree(fake_server_url) as at:
        driving = await at.fleet.hand(await at.run("twig-1"), at.worker)
        await at.fleet.reaches(await at.run("twig-1"), State.DRIVEN)
        await at.host.settler.kill(ROOT, reason="enough")
        await asyncio.wait_for(driving, WAIT_SECONDS)
        await at.host.sweep()
        await at.assert_ended()


async def test_what_a_dead_worker_drove_is_ended_by_the_sweeper(fake_server_url: str) -> None:
    """P5, P6: killed before anybody noticed that its worker is dead; it is settled and not queued again."""
    async with tree(fake_server_url) as at:
        dead = await at.fleet.member("worker-2")
        hold = dead.line.hold(scripts.TAKE, "after", run_id=await at.run("twig-1"))
        await at.fleet.hand(await at.run("twig-1"), dead)
        await hold.until_reached()
        await dead.die()
        await at.host.settler.kill(ROOT, reason="enough")
        assert (await at.statuses())["twig-1"] == "driven"
        swept = await at.fleet.bury(dead, by=at.host)
        assert (swept.requeued, swept.settled) == (0, 1)
        await at.assert_ended()


async def test_what_was_taken_from_a_dead_worker_is_ended_by_the_walk(fake_server_url: str) -> None:
    """P5, P6: the sweeper queues it again, and then goes on with the walk that somebody had begun."""
    async with tree(fake_server_url) as at:
        dead = await at.fleet.member("worker-2")
        taken = dead.line.hold(scripts.TAKE, "after", run_id=await at.run("twig-1"))
        await at.fleet.hand(await at.run("twig-1"), dead)
        await taken.until_reached()
        walker = await at.fleet.member("host-2")
        hold = walker.line.hold(scripts.KILL, "after")
        walking = asyncio.ensure_future(walker.settler.kill(ROOT, reason="enough"))
        await hold.until_reached()
        await dead.die()
        await walker.die()
        with suppress(Died):
            await walking
        swept = await at.fleet.bury(dead, by=at.host)
        assert swept.requeued == 1
        await at.assert_ended()


async def test_a_dead_worker_s_killed_run_takes_its_own_with_it(fake_server_url: str) -> None:
    """P5: a driven run is walked down from before its driver ends it, and a dead driver never would."""
    async with tree(fake_server_url) as at:
        await at.host.settler.kill(await at.run("leaf"), reason="enough")
        await at.host.settler.kill(await at.run("branch"), reason="enough")
        dead = await at.fleet.member("worker-2")
        hold = dead.line.hold(scripts.APPEND, "before", run_id=ROOT)
        await at.fleet.hand(ROOT, dead)
        await hold.until_reached()
        await dead.die()
        assert await at.host.settler.kill(ROOT, reason="enough") == "requested"
        await at.fleet.bury(dead, by=at.host)
        await at.assert_ended()


@pytest.mark.parametrize("walk", ["before", "after"])
async def test_an_admission_that_races_with_the_walk_is_refused_or_walked(server: str, walk: str) -> None:
    """P5: whichever comes first, nothing of the tree is left running."""
    model = ScriptedModel()
    model.on("main task", [delegate("branch"), reply("all done")])
    model.on("do branch", [delegate("twig"), reply("branch done")])
    async with fleet_on(server, SpawnProvider(model)) as fleet:
        host, worker = await fleet.member("host-1"), await fleet.member("worker-1")
        await host.sessions.open(OWNER)
        await fleet.accept(host, ROOT, prompt="main task")
        await fleet.drive(ROOT, worker)
        branch = await fleet.own_run(ROOT)
        hold = worker.line.hold(scripts.ADMIT, "before" if walk == "before" else "after")
        driving = await fleet.hand(branch, worker)
        await hold.until_reached()
        await host.settler.kill(ROOT, reason="enough")
        hold.go_on.set()
        await asyncio.wait_for(driving, WAIT_SECONDS)
        await host.sweep()
        assert len(await fleet.runs()) == (2 if walk == "before" else 3)
        assert {(await fleet.outcome(run_id)).status for run_id in await fleet.runs()} == {"killed"}
        await fleet.work(worker)
        assert model.requests == 2


@pytest.mark.parametrize("when", get_args(When))
async def test_a_run_that_completes_takes_its_jobs_with_it_though_its_driver_dies(
    fake_server_url: str, when: When
) -> None:
    """protocol §3: whatever ends a one-shot child ends its unsettled jobs; the settling script wrote it down."""
    model = ScriptedModel()
    model.on("main task", [delegate("job", run_in_background=True), reply("all done")])
    async with fleet_on(fake_server_url, SpawnProvider(model)) as fleet:
        host, worker = await fleet.member("host-1"), await fleet.member("worker-1")
        await host.sessions.open(OWNER)
        await fleet.accept(host, ROOT, prompt="main task")
        hold = worker.line.hold(scripts.SETTLE, when)
        await fleet.hand(ROOT, worker)
        await hold.until_reached()
        job = await fleet.own_run(ROOT)
        await worker.die()
        heir = await fleet.member("worker-2")
        await fleet.bury(worker, by=host)
        while ROOT in await fleet.messages():
            await fleet.drive(ROOT, heir)
        assert ((await fleet.outcome(ROOT)).text, (await fleet.outcome(job)).status) == ("all done", "killed")
        await fleet.work(heir)
        assert model.requests == 2


@pytest.mark.parametrize(("field", "value"), [("version", "99"), ("spec", "not JSON")], ids=["newer", "unreadable"])
async def test_one_that_cannot_be_read_keeps_no_other_from_ending(fake_server_url: str, field: str, value: str) -> None:
    """P5, P6: the kill is answered, the rest of the tree ends, and the walk goes on until that one has ended too."""
    async with tree(fake_server_url) as at:
        client = cast("Any", at.fleet.client)
        records = [at.fleet.keys.session(await at.run(label)) for label in ("twig-1", "leaf")]
        fields = [await client.hget(record, field) for record in records]
        for record in records:
            await client.hset(record, field, value)
        assert await at.host.settler.kill(ROOT, reason="enough") == "killed"
        await at.host.sweep()
        for record, readable in zip(records, fields, strict=True):
            await client.hset(record, field, readable)
        left = {label for label, status in (await at.statuses()).items() if status != "killed"}
        assert left == {"twig-1", "leaf"}
        await at.host.sweep()
        await at.assert_ended()
