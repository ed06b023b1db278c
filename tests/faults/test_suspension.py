"""Crash windows of a run that waits for runs of its own (protocol §3, P11): from its model's message to the next one.

Each window is where a process dies, freezes or loses a reply, or where somebody else acts in between. What must come of
each is told here; `test_suspension_walk` counts the moves and leaves no place between two of them out.

     1  the message that delegates is recorded, nothing was admitted
     2  the first of two own runs is admitted, the second is not
     3  all are admitted, the run is not suspended; what it waits for ends before or after the sweeper takes it
     4  what it waits for ends between its last look and `suspend`
     5  the reply of `suspend` is lost, comes late, or never comes
     6  the run is suspended, and its worker dies before it has cleaned up
     7  the reply of the `settle` that woke the run is lost, or its driver dies behind it
     8  the message of the woken run is lost
     9  the resumed driver dies before it has recorded what the run waited for
    10  it dies after one of two
    11  a tool with an effect runs beside the pending call when the worker dies
    12  a frozen driver thaws after the run was resumed elsewhere
    13  a kill comes before `suspend`, while the run is suspended, before it is claimed again, or once it is resumed
    14  the worker is shut down while a call waits in process, beside a running tool
    15  the alarm and a settlement wake the run at the same time
    16  the worker that suspended the run gets it back while its old drive still cleans up, or still awaits the answer
    17  the worker of what the run waits for dies
    18  what the run waits for is given up by the sweeper, or killed
    19  two runs that it waits for end at the same moment
    20  the sweeper dies right after it has woken the run
    21  the worker is shut down while it cleans up behind a suspension
    22  Redis does not say whether an own run was admitted
    23  a call behind the pool's ten comes to its turn, and the worker dies
    24  the run limit is over while the run is suspended
    25  a job of the run ends while the run waits for another one; the notice is taken, and the worker dies
    26  the run waits for its job, reads it, and the worker dies before it has recorded the reading
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast, get_args

import pytest
from driving_kit import OWNER
from fleet import Member
from line import WAIT_SECONDS, Died, When
from scene import RUN, Scene, delegate, scene

from subagent_tasks.agents.transcript import UNKNOWN_EFFECT
from subagent_tasks.protocol import scripts
from subagent_tasks.protocol.ids import run_id_for_call
from subagent_tasks.protocol.interfaces import Drive, Run
from subagent_tasks.protocol.lifecycle import State
from subagent_tasks.protocol.models import ChildRequest
from subagent_tasks.protocol.scripts import Script
from subagent_tasks.providers import SpawnProvider
from subagent_tasks.testing import ScriptedModel, call_tool, wait_until
from subagent_tasks.testing.faults import FaultyServer


async def dies_at(scene: Scene, script: Script, when: When, *, worker: Member | None = None, skip: int = 0) -> None:
    """Let a worker (the first, unless named) drive the run, and die there."""
    worker = worker or scene.worker
    its_own = script in (scripts.ADMIT, scripts.COLLECT)
    hold = worker.line.hold(script, when, run_id=None if its_own else RUN, skip=skip)
    await scene.fleet.hand(RUN, worker)
    await hold.until_reached()
    await worker.die()


# 1 to 4: before the run is suspended.


async def test_what_was_not_admitted_is_admitted_by_the_next_driver(fake_server_url: str) -> None:
    """Window 1, P1: the message stands in the transcript, so the model is not asked again."""
    async with scene(fake_server_url, "first") as at:
        await dies_at(at, scripts.ADMIT, "before")
        heir = await at.heir()
        await at.bury(at.worker)
        assert len(await at.fleet.runs()) == 1
        await at.fleet.work(heir)
        await at.assert_done_once()


@pytest.mark.parametrize("when", get_args(When))
async def test_what_was_admitted_is_found_again_beside_what_was_not(fake_server_url: str, when: When) -> None:
    """Window 2, P7: a run's id is a function of its call; `after` is the window behind the second one."""
    async with scene(fake_server_url, "first", "second") as at:
        await dies_at(at, scripts.ADMIT, when, skip=1)
        heir = await at.heir()
        assert len(await at.fleet.own_runs(RUN)) == (1 if when == "before" else 2)
        await at.bury(at.worker)
        await at.fleet.work(heir)
        await at.assert_done_once(own=("first", "second"))


async def test_an_ending_before_the_sweeper_came_is_read_by_the_next_driver(fake_server_url: str) -> None:
    """Window 3a, P6: a dead worker's run is not woken; it is taken, and reads what has ended."""
    async with scene(fake_server_url, "first") as at:
        await dies_at(at, scripts.SUSPEND, "before")
        heir = await at.heir()
        await at.drive_own("first", heir)
        assert (await at.fleet.state(RUN), await at.fleet.messages()) == (State.DRIVEN, [])
        await at.bury(at.worker)
        await at.fleet.work(heir)
        await at.assert_done_once()
        assert await at.suspensions() == 0


async def test_an_ending_after_the_sweeper_came_queues_the_run_no_second_time(fake_server_url: str) -> None:
    """Window 3b, P2: what is queued already needs no waking."""
    async with scene(fake_server_url, "first") as at:
        await dies_at(at, scripts.SUSPEND, "before")
        heir = await at.heir()
        await at.bury(at.worker)
        await at.drive_own("first", heir)
        assert await at.fleet.messages() == [RUN]
        await at.fleet.work(heir)
        await at.assert_done_once()


async def test_an_ending_between_the_last_look_and_the_suspension_is_not_missed(server: str) -> None:
    """Window 4, protocol §1: `suspend` is refused, and the driver goes on."""
    async with scene(server, "first") as at:
        hold = at.worker.line.hold(scripts.SUSPEND, "before")
        driving = await at.fleet.hand(RUN, at.worker)
        await hold.until_reached()
        await at.drive_own("first", await at.heir())
        hold.go_on.set()
        await asyncio.wait_for(driving, WAIT_SECONDS)
        await at.assert_done_once()
        assert await at.suspensions() == 0


# 5 and 6: around `suspend`.


async def test_a_lost_reply_of_the_suspension_suspends_once(server: str) -> None:
    """Window 5a, protocol §1."""
    with FaultyServer(server) as faulty:
        async with scene(server, "first", worker_url=faulty.url) as at:
            faulty.lose_reply(scripts.SUSPEND)
            await at.suspend()
            assert faulty.replies_lost == 1
            await at.fleet.work(at.worker)
            await at.assert_done_once()
            assert await at.suspensions() == 1


async def test_a_late_reply_of_the_suspension_touches_nothing(fake_server_url: str) -> None:
    """Window 5b, P2: by then the run was woken, resumed and settled by another worker."""
    async with scene(fake_server_url, "first") as at:
        hold = at.worker.line.hold(scripts.SUSPEND, "after")
        driving = await at.fleet.hand(RUN, at.worker)
        await hold.until_reached()
        await at.fleet.work(await at.heir())
        assert await at.fleet.state(RUN) is State.SETTLED
        hold.go_on.set()
        await asyncio.wait_for(driving, WAIT_SECONDS)
        await at.assert_done_once()


async def test_a_suspension_that_is_never_answered_holds(fake_server_url: str) -> None:
    """Window 5c, P8: the driver gives up; however often it asked, the run was suspended once, and goes on elsewhere."""
    async with scene(fake_server_url, "first", lease_seconds=1) as at:
        at.worker.line.answer(scripts.SUSPEND, given=False)
        await at.suspend()
        await at.fleet.work(await at.heir())
        await at.assert_done_once()
        assert await at.suspensions() == 1


async def test_a_suspended_run_needs_no_worker(fake_server_url: str) -> None:
    """Window 6, P11: its worker is found dead, and there is nothing to take from it."""
    async with scene(fake_server_url, "first") as at:
        await dies_at(at, scripts.SUSPEND, "after")
        heir = await at.heir()
        swept = await at.fleet.bury(at.worker, by=at.host)
        assert (swept.requeued, swept.settled, await at.fleet.state(RUN)) == (0, 0, State.SUSPENDED)
        await at.fleet.work(heir)
        await at.assert_done_once()


# 7 and 8: around the waking.


async def test_a_lost_reply_of_the_settlement_wakes_the_run_once(server: str) -> None:
    """Window 7a, P3: the repeat answers as before and sends no second message."""
    with FaultyServer(server) as faulty:
        async with scene(server, "first") as at:
            await at.suspend()
            heir = await at.fleet.member("worker-2", url=faulty.url)
            faulty.lose_reply(scripts.SETTLE)
            await at.drive_own("first", heir)
            assert (faulty.replies_lost, await at.fleet.messages()) == (1, [RUN])
            await at.fleet.work(at.worker)
            await at.assert_done_once()


async def test_a_settlement_wakes_though_its_driver_dies_behind_it(fake_server_url: str) -> None:
    """Window 7b, P6: waking is part of the settling step."""
    async with scene(fake_server_url, "first") as at:
        await at.suspend()
        heir = await at.heir()
        hold = heir.line.hold(scripts.SETTLE, "after")
        await at.fleet.hand(await at.own("first"), heir)
        await hold.until_reached()
        await heir.die()
        await at.fleet.work(at.worker)
        await at.assert_done_once()


async def test_a_woken_run_whose_message_was_lost_is_sent_again(fake_server_url: str) -> None:
    """Window 8, P1."""
    async with scene(fake_server_url, "first") as at:
        await at.suspend()
        await at.drive_own("first", at.worker)
        await at.fleet.lose_message(RUN)
        assert (await at.host.sweep()).republished == 1
        await at.fleet.work(at.worker)
        await at.assert_done_once()


# 9 to 12: once the run is resumed.


@pytest.mark.parametrize("recorded", [0, 1], ids=["none recorded", "one of two recorded"])
async def test_what_was_not_recorded_is_read_again(fake_server_url: str, recorded: int) -> None:
    """Windows 9 and 10, P7: the own runs have settled; nothing is started for what is only read."""
    async with scene(fake_server_url, "first", "second") as at:
        await at.suspend()
        await at.drive_own("first", at.worker)
        await at.drive_own("second", at.worker)
        await dies_at(at, scripts.APPEND, "before", skip=recorded)
        heir = await at.heir()
        assert len(await at.fleet.results(RUN)) == recorded
        await at.bury(at.worker)
        await at.fleet.work(heir)
        await at.assert_done_once(own=("first", "second"))


async def test_a_resumed_driver_that_dies_with_the_model_asked_has_its_results(fake_server_url: str) -> None:
    """Windows 9 and 10, P7: what was recorded is told from the transcript; only the request in flight is sent again."""
    async with scene(fake_server_url, "first") as at:
        await at.suspend()
        await at.drive_own("first", at.worker)
        await dies_at(at, scripts.APPEND, "before", skip=1)
        heir = await at.heir()
        await at.bury(at.worker)
        await at.fleet.work(heir)
        await at.assert_done_once(requests=3)


async def test_a_tool_that_ran_beside_the_call_has_an_unknown_effect(fake_server_url: str) -> None:
    """Window 11, P7: it is not run again, and the pending call finds its run."""
    async with scene(fake_server_url, "first", with_effect=True) as at:
        hold = at.worker.line.hold(scripts.ADMIT, "after", alone=True)
        await at.fleet.hand(RUN, at.worker)
        await asyncio.wait_for(at.effect.begun.wait(), WAIT_SECONDS)
        await hold.until_reached()
        await at.worker.die()
        heir = await at.heir()
        await at.bury(at.worker)
        await at.fleet.work(heir)
        await at.assert_done_once(UNKNOWN_EFFECT, "first found", effects=1)


@pytest.mark.parametrize("when", get_args(When))
async def test_an_unknown_effect_is_told_once(fake_server_url: str, when: When) -> None:
    """Window 11, P7: the driver that tells of it dies as well."""
    async with scene(fake_server_url, "first", with_effect=True) as at:
        await at.fleet.hand(RUN, at.worker)
        await asyncio.wait_for(at.effect.begun.wait(), WAIT_SECONDS)
        await wait_until(lambda: at.fleet.own_runs(RUN), description="the own run is admitted")
        await at.worker.die()
        heir, next_heir = await at.heir(), await at.heir(3)
        await at.bury(at.worker)
        await dies_at(at, scripts.APPEND, when, worker=heir)
        await at.bury(heir)
        await at.fleet.work(next_heir)
        await at.assert_done_once(UNKNOWN_EFFECT, "first found", effects=1)


@pytest.mark.parametrize(
    "script", [scripts.ADMIT, scripts.APPEND, scripts.SUSPEND], ids=lambda script: cast("Script", script).name
)
async def test_a_frozen_driver_is_refused_once_another_drives(server: str, script: Script) -> None:
    """Window 12, P2: the heir holds the run; what the old driver was about to do changes nothing."""
    async with scene(server, "first") as at:
        frozen = at.worker.line.hold(script, "before")
        driving = await at.fleet.hand(RUN, at.worker)
        await frozen.until_reached()
        heir = await at.heir()
        await at.bury(at.worker)
        held = heir.line.hold(scripts.CLAIM, "after", run_id=RUN)
        await at.fleet.hand(RUN, heir)
        await held.until_reached()
        before = await at.fleet.kept()
        frozen.go_on.set()
        await asyncio.wait_for(driving, WAIT_SECONDS)
        assert await at.fleet.kept() == before
        held.go_on.set()
        await at.fleet.reaches(RUN, State.SUSPENDED)
        await at.fleet.work(heir)
        # Its model had been asked when it froze before that was written down.
        await at.assert_done_once(requests=3 if script is scripts.APPEND else 2)


async def test_a_frozen_driver_s_settlement_is_refused(server: str) -> None:
    """Window 12, P3: the outcome of the one that drives counts."""
    async with scene(server, "first") as at:
        await at.suspend()
        await at.drive_own("first", at.worker)
        frozen = at.worker.line.hold(scripts.SETTLE, "before")
        driving = await at.fleet.hand(RUN, at.worker)
        await frozen.until_reached()
        heir = await at.heir()
        await at.bury(at.worker)
        await at.fleet.work(heir)
        before = await at.fleet.kept()
        frozen.go_on.set()
        await asyncio.wait_for(driving, WAIT_SECONDS)
        assert await at.fleet.kept() == before
        await at.assert_done_once()


# 13: kills.


async def assert_killed(at: Scene) -> None:
    """The run and all it had started were killed, and nothing was done for them that was not done before."""
    for run_id in await at.fleet.runs():
        assert (await at.fleet.outcome(run_id)).status == "killed"
    assert (at.requests("main task"), at.requests("do first"), at.effect.count) == (1, 0, 0)
    assert [notice.sender_id for notice in await at.host.sessions.notices(OWNER, after="0-0")] == [RUN]


@pytest.mark.parametrize("script", [scripts.ADMIT, scripts.SUSPEND], ids=lambda script: cast("Script", script).name)
async def test_a_kill_before_the_suspension_ends_the_run(fake_server_url: str, script: Script) -> None:
    """Window 13a, P5: the move that comes next is refused, and the driver settles the run."""
    async with scene(fake_server_url, "first") as at:
        hold = at.worker.line.hold(script, "before")
        driving = await at.fleet.hand(RUN, at.worker)
        await hold.until_reached()
        assert await at.host.settler.kill(RUN, reason="enough") == "requested"
        hold.go_on.set()
        await asyncio.wait_for(driving, WAIT_SECONDS)
        await at.fleet.work(at.worker)
        await assert_killed(at)


async def test_a_kill_of_a_suspended_run_ends_it_at_once(fake_server_url: str) -> None:
    """Window 13b, P5: nobody drives it, so nobody is needed; what it waited for ends with it."""
    async with scene(fake_server_url, "first") as at:
        await at.suspend()
        assert await at.host.settler.kill(RUN, reason="enough") == "killed"
        await assert_killed(at)
        await at.fleet.work(at.worker)


async def test_a_kill_before_the_woken_run_is_claimed_ends_it(fake_server_url: str) -> None:
    """Window 13c, P5: its message finds nothing to do."""
    async with scene(fake_server_url, "first") as at:
        await at.suspend()
        await at.host.settler.kill(await at.own("first"), reason="enough")
        assert await at.fleet.state(RUN) is State.QUEUED
        assert await at.host.settler.kill(RUN, reason="enough") == "killed"
        await at.fleet.work(at.worker)
        await assert_killed(at)


async def test_a_kill_of_the_resumed_run_asks_its_model_nothing_more(fake_server_url: str) -> None:
    """Window 13d, P5: the result may still be written down, the next request is refused."""
    async with scene(fake_server_url, "first") as at:
        await at.suspend()
        await at.host.settler.kill(await at.own("first"), reason="enough")
        hold = at.worker.line.hold(scripts.APPEND, "before", run_id=RUN)
        driving = await at.fleet.hand(RUN, at.worker)
        await hold.until_reached()
        assert await at.host.settler.kill(RUN, reason="enough") == "requested"
        hold.go_on.set()
        await asyncio.wait_for(driving, WAIT_SECONDS)
        await at.fleet.work(at.worker)
        await assert_killed(at)


# 14: shutdowns.


@pytest.mark.parametrize("ends", [True, False], ids=["the tool ends in time", "the tool does not end"])
async def test_a_worker_that_leaves_hands_back_a_run_that_waits_in_process(fake_server_url: str, ends: bool) -> None:
    """Window 14, P7: the tool's result is recorded or its effect unknown; the pending call finds its run elsewhere."""
    async with scene(fake_server_url, "first", with_effect=True) as at:
        driving = await at.fleet.hand(RUN, at.worker)
        await asyncio.wait_for(at.effect.begun.wait(), WAIT_SECONDS)
        await wait_until(lambda: at.fleet.own_runs(RUN), description="the own run is admitted")
        leaving = asyncio.ensure_future(at.worker.executor.release_all())
        await asyncio.sleep(0)
        if ends:
            at.effect.go_on.set()
        await asyncio.wait_for(asyncio.gather(leaving, driving), WAIT_SECONDS)
        assert await at.fleet.state(RUN) is State.QUEUED
        await at.fleet.work(await at.heir())
        await at.assert_done_once("had an effect" if ends else UNKNOWN_EFFECT, "first found", effects=1)


# 15: alarms.


async def alarm_is_due(at: Scene) -> None:
    await at.fleet.client.zadd(at.fleet.keys.alarms, {RUN: 1_000}, xx=True)


async def test_a_settlement_just_before_the_alarm_wakes_alone(server: str) -> None:
    """Window 15a: the sweeper has seen the alarm, and finds it gone."""
    async with scene(server, "first") as at:
        await at.suspend()
        await alarm_is_due(at)
        hold = at.host.line.hold(scripts.WAKE, "before")
        sweeping = asyncio.ensure_future(at.host.sweep())
        await hold.until_reached()
        await at.drive_own("first", at.worker)
        hold.go_on.set()
        assert (await sweeping).woken == 0
        assert await at.fleet.messages() == [RUN]
        await at.fleet.work(at.worker)
        await at.assert_done_once()


async def test_a_settlement_just_after_the_alarm_wakes_no_second_time(server: str) -> None:
    """Window 15b: the run is queued already, and reads the ending when it is driven."""
    async with scene(server, "first") as at:
        await at.suspend()
        await alarm_is_due(at)
        assert (await at.host.sweep()).woken == 1
        own_run = await at.own("first")
        assert await at.fleet.messages() == [own_run, RUN]
        await at.drive_own("first", at.worker)
        assert await at.fleet.messages() == [RUN]
        await at.fleet.work(at.worker)
        await at.assert_done_once()


async def test_a_run_that_was_woken_too_early_waits_again(fake_server_url: str) -> None:
    """Window 15: a waking decides nothing; the run looks, and is suspended once more."""
    async with scene(fake_server_url, "first") as at:
        await at.suspend()
        await alarm_is_due(at)
        await at.host.sweep()
        await at.fleet.drive(RUN, at.worker)
        assert (await at.fleet.state(RUN), await at.suspensions()) == (State.SUSPENDED, 2)
        await at.fleet.work(at.worker)
        await at.assert_done_once()


# 16 and 21: the worker that suspended the run.


class SlowToLeave(SpawnProvider):
    """The run's child is released when the test says so."""

    def __init__(self, model: ScriptedModel) -> None:
        super().__init__(model)
        self.is_leaving, self.may_leave = asyncio.Event(), asyncio.Event()

    async def start(self, request: ChildRequest, drive: Drive) -> Run:
        run = await super().start(request, drive)
        return _SlowRun(run, self) if drive.session_id == RUN else run


class _SlowRun:
    def __init__(self, run: Run, provider: SlowToLeave) -> None:
        self._run, self._provider = run, provider
        self.result, self.cancel = run.result, run.cancel

    async def dispose(self) -> None:
        self._provider.is_leaving.set()
        await self._provider.may_leave.wait()
        await self._run.dispose()


@asynccontextmanager
async def cleaning_up(url: str) -> AsyncGenerator[tuple[Scene, SlowToLeave, asyncio.Task[None]]]:
    """The run is suspended, and its worker still releases the child."""
    async with scene(url, "first", provider=SlowToLeave) as at:
        provider = cast("SlowToLeave", at.fleet.app.providers["spawn"])
        driving = await at.fleet.hand(RUN, at.worker)
        await asyncio.wait_for(provider.is_leaving.wait(), WAIT_SECONDS)
        assert await at.fleet.state(RUN) is State.SUSPENDED
        yield at, provider, driving


async def test_a_run_that_comes_back_waits_for_its_old_drive(fake_server_url: str) -> None:
    """Window 16a, P2: a run has one drive in a process, and its message is not lost."""
    async with cleaning_up(fake_server_url) as (at, provider, driving):
        await at.drive_own("first", await at.heir())
        coming_back = await at.fleet.hand(RUN, at.worker)
        assert (await at.fleet.state(RUN), at.worker.line.made.count("claim")) == (State.QUEUED, 1)
        provider.may_leave.set()
        await asyncio.wait_for(asyncio.gather(driving, coming_back), WAIT_SECONDS)
        await at.assert_done_once()


async def test_a_message_that_overtakes_the_suspension_s_answer_is_heeded_after_it(fake_server_url: str) -> None:
    """Window 16b, P1: it could be a double of the message that is worked on, so the run is looked at once more."""
    async with scene(fake_server_url, "first") as at:
        hold = at.worker.line.hold(scripts.SUSPEND, "after", alone=True)
        driving = await at.fleet.hand(RUN, at.worker)
        await hold.until_reached()
        await at.drive_own("first", await at.heir())
        await at.fleet.drive(RUN, at.worker)
        hold.go_on.set()
        await asyncio.wait_for(driving, WAIT_SECONDS)
        await at.assert_done_once()


async def test_a_worker_that_leaves_hands_back_nothing_that_is_suspended(fake_server_url: str) -> None:
    """Window 21, P11: it is nobody's already."""
    async with cleaning_up(fake_server_url) as (at, provider, driving):
        leaving = asyncio.ensure_future(at.worker.executor.release_all())
        await asyncio.sleep(0)
        provider.may_leave.set()
        await asyncio.wait_for(asyncio.gather(leaving, driving), WAIT_SECONDS)
        assert (await at.fleet.state(RUN), await at.fleet.messages()) == (State.SUSPENDED, [await at.own("first")])
        await at.fleet.work(await at.heir())
        await at.assert_done_once()


# 17 to 20: what ends the waiting.


async def test_a_run_waits_on_while_what_it_waits_for_changes_hands(fake_server_url: str) -> None:
    """Window 17, P6: the own run goes on elsewhere; whoever waits for it notices nothing."""
    async with scene(fake_server_url, "first") as at:
        await at.suspend()
        own_run = await at.own("first")
        heir = await at.heir()
        hold = heir.line.hold(scripts.TAKE, "after", run_id=own_run)
        await at.fleet.hand(own_run, heir)
        await hold.until_reached()
        await heir.die()
        await at.bury(heir)
        assert (await at.fleet.state(RUN), await at.fleet.messages()) == (State.SUSPENDED, [own_run])
        await at.fleet.work(at.worker)
        await at.assert_done_once()


async def test_a_run_goes_on_when_what_it_waits_for_is_given_up(fake_server_url: str) -> None:
    """Window 18a, P6: the sweeper's settlement wakes like a driver's, and the model is told why."""
    async with scene(fake_server_url, "first") as at:
        await at.suspend()
        own_run = await at.own("first")
        heir = await at.heir()
        hold = heir.line.hold(scripts.CLAIM, "after", run_id=own_run)
        await at.fleet.hand(own_run, heir)
        await hold.until_reached()
        await heir.die()
        await cast("Any", at.fleet.client.hset(at.fleet.keys.session(own_run), "attempt", 2))
        await at.bury(heir)
        assert await at.fleet.messages() == [RUN]
        await at.fleet.work(at.worker)
        assert (await at.fleet.outcome(RUN)).text == "all done"
        assert await at.fleet.results(RUN) == ["Error: worker lost"]


async def test_a_run_goes_on_when_what_it_waits_for_is_killed(fake_server_url: str) -> None:
    """Window 18b, P5: killed before anybody drove it; the killer wakes the run."""
    async with scene(fake_server_url, "first") as at:
        await at.suspend()
        assert await at.host.settler.kill(await at.own("first"), reason="enough") == "killed"
        assert await at.fleet.messages() == [await at.own("first"), RUN]
        await at.fleet.work(at.worker)
        assert (await at.fleet.outcome(RUN)).text == "all done"
        assert await at.fleet.results(RUN) == ["Error: subagent run was cancelled"]


async def test_two_endings_at_once_wake_the_run_once(server: str) -> None:
    """Window 19, P2."""
    async with scene(server, "first", "second") as at:
        await at.suspend()
        heirs = [await at.heir(2), await at.heir(3)]
        holds = [heir.line.hold(scripts.SETTLE, "before") for heir in heirs]
        driving = [
            await at.fleet.hand(await at.own(label), heir)
            for label, heir in zip(("first", "second"), heirs, strict=True)
        ]
        for hold in holds:
            await hold.until_reached()
        for hold in holds:
            hold.go_on.set()
        await asyncio.wait_for(asyncio.gather(*driving), WAIT_SECONDS)
        assert await at.fleet.messages() == [RUN]
        await at.fleet.work(at.worker)
        await at.assert_done_once(own=("first", "second"))


async def test_a_run_is_woken_though_the_sweeper_dies_behind_it(fake_server_url: str) -> None:
    """Window 20, P1: message and state change in one step."""
    async with scene(fake_server_url, "first") as at:
        await at.suspend()
        await alarm_is_due(at)
        sweeper = await at.fleet.member("host-2")
        hold = sweeper.line.hold(scripts.WAKE, "after")
        sweeping = asyncio.ensure_future(sweeper.sweep())
        await hold.until_reached()
        await sweeper.die()
        with suppress(Died):
            await sweeping
        assert (await at.host.sweep()).woken == 0
        await at.fleet.work(at.worker)
        await at.assert_done_once()


# 22 to 24: admission, the pool, the limit.


async def test_an_own_run_that_redis_said_nothing_of_is_found_again(fake_server_url: str) -> None:
    """Window 22, P7, protocol §4: it may well have been started, so the model must not be told that it failed."""
    async with scene(fake_server_url, "first", lease_seconds=0.5) as at:
        await at.worker.beat()
        at.worker.line.answer(scripts.ADMIT, given=False)
        await at.fleet.drive(RUN, at.worker)
        at.worker.line.answer(scripts.ADMIT, given=True)
        # It lives, and hands back what it does not drive any more.
        await at.worker.beat()
        await at.worker.beat()
        await at.fleet.reaches(RUN, State.QUEUED)
        await at.fleet.work(at.worker)
        await at.assert_done_once()


async def test_the_call_behind_the_pool_is_made_by_the_next_driver(fake_server_url: str) -> None:
    """Window 23, behaviour §7: ten at a time; the eleventh's driver dies right before or behind its admission."""
    labels = [f"own-{number:02}" for number in range(1, 12)]
    async with scene(fake_server_url, *labels, namespace="pool") as at:
        await at.suspend()
        assert len(await at.fleet.own_runs(RUN)) == 10
        await at.drive_own("own-01", at.worker)
        assert (await at.fleet.messages())[-1] == RUN
        last = run_id_for_call(namespace="pool", session_id=RUN, call_id="1:own-11")
        hold = at.worker.line.hold(scripts.ADMIT, "before", run_id=last)
        await at.fleet.hand(RUN, at.worker)
        await hold.until_reached()
        await at.worker.die()
        heir = await at.heir()
        await at.bury(at.worker)
        await at.fleet.drive(RUN, heir)
        assert (await at.fleet.state(RUN), len(await at.fleet.own_runs(RUN))) == (State.SUSPENDED, 10)
        await at.fleet.work(heir)
        await at.assert_done_once(own=tuple(labels))


async def test_a_run_whose_limit_is_over_while_it_waits_ends_with_its_own(fake_server_url: str) -> None:
    """Window 24, P6: the alarm wakes it, and it ends; what it waited for ends with it."""
    async with scene(fake_server_url, "first") as at:
        await at.suspend()
        await cast("Any", at.fleet.client.hset(at.fleet.keys.session(RUN), "started_at", 1_000))
        await alarm_is_due(at)
        await at.host.sweep()
        await at.fleet.drive(RUN, at.worker)
        assert "run limit" in ((await at.fleet.outcome(RUN)).diagnostic or "")
        assert (await at.fleet.outcome(await at.own("first"))).status == "killed"
        assert at.requests("do first") == 0
        await at.fleet.work(at.worker)


# 25 and 26: jobs.


@pytest.mark.parametrize("when", get_args(When))
async def test_a_notice_that_came_while_the_run_waited_is_told_once(fake_server_url: str, when: When) -> None:
    """Window 25, P4: it wakes nobody, and waits in the inbox for the next step, whose driver dies."""
    steps = (delegate("first", run_in_background=True), delegate("second"))
    async with scene(fake_server_url, "first", "second", steps=steps) as at:
        await at.suspend()
        await at.drive_own("first", at.worker)
        assert await at.fleet.state(RUN) is State.SUSPENDED
        await at.drive_own("second", at.worker)
        await dies_at(at, scripts.TAKE, when)
        heir = await at.heir()
        await at.bury(at.worker)
        await at.fleet.work(heir)
        job = await at.own("first")
        told = [
            message.text for message in at.model.seen[-1].messages if job in message.text and message.role == "user"
        ]
        assert told == [
            f"background job {job} (subagent: first) finished [status: completed]. Read its output with job_output."
        ]
        await at.assert_done_once(
            f"started background subagent job {job}", "second found", own=("first", "second"), requests=3
        )


@pytest.mark.parametrize("when", get_args(When))
async def test_a_job_that_was_read_is_read_again(fake_server_url: str, when: When) -> None:
    """Window 26, P4, P7: its notice was withdrawn by the first reading, and the second one says the same."""
    job = run_id_for_call(namespace="reading", session_id=RUN, call_id="1:first")
    waiting = call_tool("job_output", {"job_id": job, "wait": True, "timeout_ms": 60_000})
    steps = (delegate("first", run_in_background=True), waiting)
    async with scene(fake_server_url, "first", steps=steps, namespace="reading") as at:
        await at.suspend()
        await at.drive_own("first", at.worker)
        assert await at.fleet.messages() == [RUN]
        await dies_at(at, scripts.COLLECT, when)
        heir = await at.heir()
        await at.bury(at.worker)
        await at.fleet.work(heir)
        started, reading = await at.fleet.results(RUN)
        assert (started, "first found" in reading) == (f"started background subagent job {job}", True)
        assert not any("finished" in message.text for message in at.model.seen[-1].messages if message.role == "user")
        await at.assert_done_once(started, reading, requests=3)
