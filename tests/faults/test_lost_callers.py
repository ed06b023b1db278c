"""Foreground runs whose caller is lost (protocol §3): ended after two leases of silence, announced once, or taken over.

`host-1` calls and dies; `host-2` is the process that sweeps and, where it says so, repeats the call.

     1  the caller dies while its run is queued, driven or suspended
     2  the run completes in the moment in which its caller is judged
     3  the caller is silent for less than two leases
     4  the caller beats again after the sweeper saw it dead
     5  the caller comes back after its run was ended
     6  the sweeper dies between any two of its moves
     7  caller and worker die together
     8  the run ends before its caller is missed
     9  another host repeats the call: while the run goes on, while the caller is judged, or too late
    10  the second caller dies too
    11  the host leaves in good order while it waits
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import cast

import pytest
from driving_kit import OWNER
from fleet import Fleet, Member, fleet_on
from line import WAIT_SECONDS, Died

from subagent_tasks.protocol import scripts
from subagent_tasks.protocol.ids import run_id_for_call
from subagent_tasks.protocol.lifecycle import State
from subagent_tasks.protocol.models import ToolResult
from subagent_tasks.providers import SpawnProvider
from subagent_tasks.testing import ScriptedModel, call_tool, reply, wait_for, wait_until

MAIN, DELEGATING = "main task", "delegating task"
LOST = 2.0
"""After so many leases of silence a caller is lost."""


@dataclass
class Call:
    """A foreground call, its run, and who could care."""

    fleet: Fleet
    caller: Member
    other: Member
    worker: Member
    model: ScriptedModel
    gate: asyncio.Event
    run_id: str
    prompt: str
    result: asyncio.Task[ToolResult]
    driving: asyncio.Task[None] | None = None

    async def reach(self, state: State) -> None:
        """Bring the run there; a driven one has asked its model, and gets its answer once the gate is open."""
        if state is not State.QUEUED:
            self.driving = await self.fleet.hand(self.run_id, self.worker)
            await self.fleet.reaches(self.run_id, state)
            await wait_until(lambda: self.model.requests, description="the model is asked")

    async def repeat(self) -> asyncio.Task[ToolResult]:
        """The same call from the other host."""
        return await admitted(self.other, self.prompt)

    async def finish(self) -> None:
        """Let the run come to its end."""
        self.gate.set()
        if self.driving is not None:
            await asyncio.wait_for(self.driving, WAIT_SECONDS)
        await self.fleet.work(self.worker)

    async def notices(self) -> list[str]:
        """Whose endings were announced."""
        return [notice.sender_id for notice in await self.other.sessions.notices(OWNER, after="0-0")]

    async def held(self) -> set[str]:
        """The processes that hold anything."""
        keys = cast("list[str]", await self.fleet.client.keys(self.fleet.keys.held("*")))
        return {key.rpartition(":")[2] for key in keys}

    async def assert_lost(self) -> None:
        """The run ended for its caller's loss, and that was announced once."""
        outcome = await self.fleet.outcome(self.run_id)
        assert (outcome.status, outcome.stop_reason, outcome.detail) == ("killed", "aborted", "caller lost")
        (notice,) = await self.other.sessions.notices(OWNER, after="0-0")
        assert (notice.kind, notice.sender_id) == ("run-abandoned", self.run_id)
        assert "caller lost" in notice.text
        assert await self.held() == set()

    async def assert_answered(self, result: asyncio.Task[ToolResult]) -> None:
        """The call has the one run's answer, nothing was announced, and nobody holds anything."""
        answer = await asyncio.wait_for(result, WAIT_SECONDS)
        assert (answer.text, answer.is_error) == ("done", False)
        assert await self.notices() == []
        assert await self.held() == set()
        assert self.run_id in await self.fleet.runs()


async def admitted(host: Member, prompt: str) -> asyncio.Task[ToolResult]:
    """The foreground call `c1` from a host; its run is admitted when this returns."""
    hold = host.line.hold(scripts.ADMIT, "after", alone=True)
    result = await host.call(prompt, call_id="c1")
    await hold.until_reached()
    hold.go_on.set()
    return result


@asynccontextmanager
async def calling(url: str, prompt: str = MAIN) -> AsyncGenerator[Call]:
    """A foreground call from `host-1` whose run waits in the queue."""
    model, gate = ScriptedModel(), asyncio.Event()
    model.on(MAIN, [wait_for(gate), reply("done")])
    model.on(DELEGATING, [call_tool("subagent", {"description": "own", "prompt": "own task"}), reply("done")])
    model.on("own task", reply("found"))
    async with fleet_on(url, SpawnProvider(model), namespace="callers") as fleet:
        caller, other = await fleet.member("host-1"), await fleet.member("host-2")
        worker = await fleet.member("worker-1")
        result = await admitted(caller, prompt)
        run_id = run_id_for_call(namespace="callers", session_id=OWNER, call_id="c1")
        yield Call(fleet, caller, other, worker, model, gate, run_id, prompt, result)


every_state = pytest.mark.parametrize("state", [State.QUEUED, State.DRIVEN, State.SUSPENDED], ids=str)


def prompt_for(state: State) -> str:
    return DELEGATING if state is State.SUSPENDED else MAIN


# Lost.


@every_state
async def test_a_run_ends_with_its_caller(server: str, state: State) -> None:
    """protocol §3, §5: `aborted`, detail `caller lost`; what nobody drives at once, what is driven by its driver."""
    async with calling(server, prompt_for(state)) as call:
        await call.reach(state)
        await call.caller.die()
        await call.fleet.silence(call.caller, leases=LOST)
        assert (await call.other.sweep()).abandoned == 1
        if call.driving is not None:
            await asyncio.wait_for(call.driving, WAIT_SECONDS)
        await call.other.sweep()
        await call.assert_lost()
        await call.fleet.work(call.worker)
        assert call.model.requests == (0 if state is State.QUEUED else 1)


async def test_a_completion_that_beats_the_loss_is_announced(fake_server_url: str) -> None:
    """protocol §5: nobody waits for it any more, so it is told; as what it is."""
    async with calling(fake_server_url) as call:
        await call.reach(State.DRIVEN)
        hold = call.worker.line.hold(scripts.SETTLE, "before", alone=True)
        call.gate.set()
        await hold.until_reached()
        await call.caller.die()
        await call.fleet.silence(call.caller, leases=LOST)
        assert (await call.other.sweep()).abandoned == 1
        hold.go_on.set()
        await call.finish()
        assert (await call.fleet.outcome(call.run_id)).status == "completed"
        assert await call.notices() == [call.run_id]


async def test_what_the_run_had_started_ends_with_it(fake_server_url: str) -> None:
    """protocol §3: cascading."""
    async with calling(fake_server_url, DELEGATING) as call:
        await call.reach(State.SUSPENDED)
        own_run = await call.fleet.own_run(call.run_id)
        await call.caller.die()
        await call.fleet.bury(call.caller, by=call.other)
        assert (await call.fleet.outcome(own_run)).status == "killed"
        await call.assert_lost()


@pytest.mark.parametrize("leases", [0.9, 1.1, 1.9])
async def test_a_caller_that_is_silent_for_less_is_waited_for(fake_server_url: str, leases: float) -> None:
    """protocol §3: two leases; it may be frozen, or cut off, and come back."""
    async with calling(fake_server_url) as call:
        await call.fleet.silence(call.caller, leases=leases)
        assert (await call.other.sweep()).abandoned == 0
        assert (await call.fleet.state(call.run_id), await call.held()) == (State.QUEUED, {"host-1"})
        await call.caller.beat()
        assert (await call.other.sweep()).abandoned == 0
        await call.finish()
        await call.assert_answered(call.result)


async def test_a_caller_that_beats_in_the_last_moment_keeps_its_run(server: str) -> None:
    """P2: the sweeper saw it dead; the script looks again."""
    async with calling(server) as call:
        await call.fleet.silence(call.caller, leases=LOST)
        hold = call.other.line.hold(scripts.KILL, "before")
        sweeping = asyncio.ensure_future(call.other.sweep())
        await hold.until_reached()
        await call.caller.beat()
        hold.go_on.set()
        assert (await sweeping).abandoned == 0
        await call.finish()
        await call.assert_answered(call.result)


async def test_a_caller_that_comes_back_too_late_is_told_the_ending(fake_server_url: str) -> None:
    """P4: as its call's result; the announcement was made for whoever came instead."""
    async with calling(fake_server_url) as call:
        await call.fleet.bury(call.caller, by=call.other)
        await call.caller.beat()
        result = await asyncio.wait_for(call.result, WAIT_SECONDS)
        assert result.is_error
        assert "cancelled" in result.text
        await call.assert_lost()


@pytest.mark.parametrize("script", [scripts.KILL, scripts.UNHOLD], ids=["the kill", "the unholding"])
async def test_a_sweeper_that_dies_behind_it_ends_the_run_once(fake_server_url: str, script: scripts.Script) -> None:
    """P3, P4: the next one finds it done."""
    async with calling(fake_server_url) as call:
        await call.caller.die()
        await call.fleet.silence(call.caller, leases=LOST)
        sweeper = await call.fleet.member("host-3")
        hold = sweeper.line.hold(script, "after")
        sweeping = asyncio.ensure_future(sweeper.sweep())
        await hold.until_reached()
        await sweeper.die()
        with suppress(Died):
            await sweeping
        await call.other.sweep()
        await call.assert_lost()


async def test_caller_and_worker_may_die_together(fake_server_url: str) -> None:
    """P6: one sweep; nobody is left to drive the run, and nobody to wait for it."""
    async with calling(fake_server_url) as call:
        await call.reach(State.DRIVEN)
        await call.caller.die()
        await call.worker.die()
        for dead in (call.caller, call.worker):
            await call.fleet.silence(dead, leases=LOST)
        await call.other.sweep()
        await call.assert_lost()
        await call.other.sweep()
        assert set(await call.other.processes.alive()) == {"host-2"}


async def test_a_worker_is_the_caller_of_nothing(fake_server_url: str) -> None:
    """protocol §3, P11: a child waits as a record; the worker that started its run may die."""
    async with calling(fake_server_url, DELEGATING) as call:
        await call.reach(State.SUSPENDED)
        await call.worker.die()
        assert (await call.fleet.bury(call.worker, by=call.other)).abandoned == 0
        await call.fleet.work(await call.fleet.member("worker-2"))
        await call.assert_answered(call.result)


async def test_a_job_outlives_its_host(fake_server_url: str) -> None:
    """design §6: nobody waits for it, so nobody is missed."""
    async with calling(fake_server_url) as call:
        started = await call.caller.call(MAIN, call_id="c2", run_in_background=True)
        await asyncio.wait_for(started, WAIT_SECONDS)
        job = run_id_for_call(namespace="callers", session_id=OWNER, call_id="c2")
        await call.caller.die()
        assert (await call.fleet.bury(call.caller, by=call.other)).abandoned == 1
        await call.finish()
        assert (await call.fleet.outcome(job)).text == "done"
        assert await call.notices() == [call.run_id, job]


async def test_an_ending_before_its_caller_was_missed_is_no_loss(fake_server_url: str) -> None:
    """protocol §5: a foreground ending is a result, and whoever repeats the call gets it."""
    async with calling(fake_server_url) as call:
        await call.caller.die()
        await call.finish()
        assert (await call.fleet.bury(call.caller, by=call.other)).abandoned == 0
        await call.assert_answered(await call.repeat())
        assert call.model.requests == 1


# Taken over.


@every_state
async def test_the_same_call_from_another_host_takes_the_run_over(server: str, state: State) -> None:
    """protocol §3: it re-attaches, and the first caller's loss ends nothing any more."""
    async with calling(server, prompt_for(state)) as call:
        await call.reach(state)
        await call.caller.die()
        result = await call.repeat()
        assert (await call.fleet.bury(call.caller, by=call.other)).abandoned == 0
        await call.finish()
        await call.assert_answered(result)
        expected = (2, 3) if call.prompt == DELEGATING else (1, 1)
        assert (len(await call.fleet.runs()), call.model.requests) == expected


@every_state
async def test_a_run_that_is_taken_over_and_ends_is_held_by_nobody_alive(server: str, state: State) -> None:
    """P10: though its driver knows of the first caller alone; what that one held goes when it is judged."""
    async with calling(server, prompt_for(state)) as call:
        await call.reach(state)
        await call.caller.die()
        result = await call.repeat()
        await call.finish()
        assert await call.held() <= {"host-1"}
        await call.fleet.bury(call.caller, by=call.other)
        await call.assert_answered(result)


async def test_a_call_that_is_repeated_while_its_caller_is_judged_saves_the_run(server: str) -> None:
    """P2: the sweeper was about to end it; the script looks who waits."""
    async with calling(server) as call:
        await call.caller.die()
        await call.fleet.silence(call.caller, leases=LOST)
        sweeper = await call.fleet.member("host-3")
        hold = sweeper.line.hold(scripts.KILL, "before")
        sweeping = asyncio.ensure_future(sweeper.sweep())
        await hold.until_reached()
        result = await call.repeat()
        hold.go_on.set()
        assert (await sweeping).abandoned == 0
        assert await call.held() == {"host-2"}
        await call.finish()
        await call.assert_answered(result)


async def test_a_call_that_is_repeated_too_late_gets_the_ending(fake_server_url: str) -> None:
    """protocol §3: no second run; it was announced, and the result says the same."""
    async with calling(fake_server_url) as call:
        await call.caller.die()
        await call.fleet.bury(call.caller, by=call.other)
        result = await asyncio.wait_for(await call.repeat(), WAIT_SECONDS)
        assert result.is_error
        assert "cancelled" in result.text
        assert await call.fleet.runs() == {call.run_id}
        await call.assert_lost()
        await call.fleet.work(call.worker)
        assert call.model.requests == 0


async def test_a_run_that_was_taken_over_ends_with_its_second_caller(fake_server_url: str) -> None:
    """protocol §3: whoever repeated the call last is the caller."""
    async with calling(fake_server_url) as call:
        await call.caller.die()
        await call.repeat()
        await call.fleet.bury(call.caller, by=call.other)
        await call.other.die()
        call.other = await call.fleet.member("host-3")
        assert (await call.fleet.bury(call.fleet.members["host-2"], by=call.other)).abandoned == 1
        await call.assert_lost()


# Leaving in order.


@every_state
async def test_a_host_that_stops_leaves_nothing_held(fake_server_url: str, state: State) -> None:
    """P10, decision 13: its call ends, its run is withdrawn with it, and no later sweep finds a loss."""
    async with calling(fake_server_url, prompt_for(state)) as call:
        await call.reach(state)
        await call.caller.stop()
        with suppress(asyncio.CancelledError):
            assert (await call.result).code == "HOST_STOPPED"
        if call.driving is not None:
            await asyncio.wait_for(call.driving, WAIT_SECONDS)
        assert (await call.fleet.outcome(call.run_id)).detail != "caller lost"
        assert (await call.held(), await call.notices()) == (set(), [])
        await call.fleet.see_off()
        assert (set(await call.other.processes.alive()), await call.notices()) == ({"host-2", "worker-1"}, [])
