"""What ends with a child: its jobs, whatever ended it, and everything below it when it is stopped (P5, protocol §3)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from subagent_tasks import Session
from subagent_tasks.protocol.models import Outcome
from subagent_tasks.testing import assert_no_leaked_keys, call_tools, fail, reply, wait_for
from subagent_tasks.testing.script import Step
from tests.behaviour.bench import job_id_of, until
from tests.behaviour.nesting import Child, Nest, nesting, results

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nest() -> AsyncIterator[Nest]:
    tools = [{"tool_name": "brief", "run_limit_seconds": 2}]
    async with nesting(tools=tools, settings={"lease_seconds": 3.0}) as nest:
        yield nest


async def outcome(nest: Nest, child: Child) -> Outcome:
    """How the one such child ended."""
    ended = (await nest.settled(child)).outcome
    assert ended is not None
    return ended


Reached = Callable[[], Awaitable[None]]
Ending = Callable[[Session, Child, Reached], Awaitable[None]]


async def kill_the_job(session: Session, top: Child, reached: Reached) -> None:
    job_id = job_id_of(await session.call("subagent", top.arguments(run_in_background=True)))
    await reached()
    await session.call("job_kill", {"job_id": job_id})


async def close_the_session(session: Session, top: Child, reached: Reached) -> None:
    await session.call("subagent", top.arguments(run_in_background=True))
    await reached()
    await session.close(cancel_jobs=True)


async def set_the_signal(session: Session, top: Child, reached: Reached) -> None:
    signal = asyncio.Event()
    calling = asyncio.create_task(session.call("subagent", top.arguments(), signal=signal))
    await reached()
    signal.set()
    assert (await calling).text.startswith("Error: subagent run was cancelled")


async def cancel_the_task(session: Session, top: Child, reached: Reached) -> None:
    calling = asyncio.create_task(session.call("subagent", top.arguments()))
    await reached()
    calling.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await calling


async def let_the_call_time_out(session: Session, top: Child, reached: Reached) -> None:
    calling = asyncio.create_task(session.call("subagent", top.arguments(), timeout=2))
    await reached()
    assert (await calling).code == "TIMEOUT"


STOPS = [kill_the_job, close_the_session, set_the_signal, cancel_the_task, let_the_call_time_out]


# Jobs


@pytest.mark.parametrize("last", [reply("done"), fail(400)], ids=["completes", "fails"])
async def test_a_child_that_ends_ends_its_jobs(nest: Nest, last: Step) -> None:
    """protocol §3: a one-shot child's unsettled jobs are killed, those that wait for children of their own too."""
    gates = [nest.gate() for _ in range(3)]
    leaf, running = nest.child(wait_for(gates[0]), reply("never said")), nest.child(wait_for(gates[1]), reply("no"))
    waiting = nest.child(leaf.call(), reply("never said"))
    top = nest.child(call_tools(running.job(), waiting.job()), wait_for(gates[2]), last)
    calling = asyncio.create_task((await nest.session()).call("subagent", top.arguments()))
    await nest.asked(running, leaf)
    await nest.suspended(waiting)
    gates[2].set()
    await calling
    for child in (running, waiting, leaf):
        assert (await outcome(nest, child)).status == "killed"


@pytest.mark.parametrize("stop", STOPS)
async def test_a_child_that_is_stopped_ends_its_jobs(nest: Nest, stop: Ending) -> None:
    """P5: while it is at work itself."""
    gates = [nest.gate() for _ in range(2)]
    job = nest.child(wait_for(gates[0]), reply("never said"))
    top = nest.child(job.job(), wait_for(gates[1]), reply("never said"))

    async def reached() -> None:
        await nest.asked(job)
        await nest.asked(top, times=2)

    await stop(await nest.session(), top, reached)
    assert (await outcome(nest, top)).status == "killed"
    assert (await outcome(nest, job)).status == "killed"


async def test_a_child_that_reaches_its_limit_ends_its_jobs(nest: Nest) -> None:
    """protocol §3, §7: `run_limit_seconds`, while it is at work itself."""
    gates = [nest.gate() for _ in range(2)]
    job = nest.child(wait_for(gates[0]), reply("never said"))
    top = nest.child(job.job(), wait_for(gates[1]), reply("never said"))
    await (await nest.session()).call("brief", top.arguments(run_in_background=True))
    assert (await outcome(nest, top)).diagnostic == "run limit of 2 s reached"
    assert (await outcome(nest, job)).status == "killed"


async def test_a_settled_job_stays_what_it_was(nest: Nest) -> None:
    """P3: the first outcome wins over what its owner's end would have made of it."""
    gate = nest.gate()
    job = nest.child(reply("the answer"))
    top = nest.child(job.job(), wait_for(gate), reply("done"))
    calling = asyncio.create_task((await nest.session()).call("subagent", top.arguments()))
    await nest.settled(job)
    gate.set()
    await calling
    assert (await outcome(nest, job)).text == "the answer"


# Chains


@pytest.mark.parametrize("stop", STOPS)
async def test_a_stop_reaches_the_end_of_a_chain(nest: Nest, stop: Ending) -> None:
    """P5: through runs that are suspended; and the model is asked nothing more."""
    gate = nest.gate()
    leaf = nest.child(wait_for(gate), reply("never said"))
    middle = nest.child(leaf.call(), reply("never said"))
    top = nest.child(middle.call(), reply("never said"))

    async def reached() -> None:
        await nest.asked(leaf)
        await nest.suspended(middle)
        await nest.suspended(top)

    await stop(await nest.session(), top, reached)
    for child in (top, middle, leaf):
        assert (await outcome(nest, child)).status == "killed"
    gate.set()
    assert [len(nest.requests(child)) for child in (top, middle, leaf)] == [1, 1, 1]


async def test_a_chain_that_reaches_its_limit_ends_though_it_is_suspended(nest: Nest) -> None:
    """P8, protocol §7: the limit counts while a child waits; it ends with what it waits for."""
    gate = nest.gate()
    leaf = nest.child(wait_for(gate), reply("never said"))
    top = nest.child(leaf.call(), reply("never said"))
    await (await nest.session()).call("brief", top.arguments(run_in_background=True))
    await nest.suspended(top)
    assert (await outcome(nest, top)).diagnostic == "run limit of 2 s reached"
    assert (await outcome(nest, leaf)).status == "killed"
    assert len(nest.requests(top)) == 1


async def test_a_child_goes_on_when_an_operator_kills_what_it_waits_for(nest: Nest) -> None:
    """P5, behaviour §7.11: a kill goes down, not up."""
    gate = nest.gate()
    leaf = nest.child(wait_for(gate), reply("never said"))
    middle = nest.child(leaf.call(), reply("never said"))
    top = nest.child(middle.call(), reply("went on"))
    calling = asyncio.create_task((await nest.session()).call("subagent", top.arguments()))
    await nest.asked(leaf)
    await nest.suspended(middle)
    await nest.suspended(top)
    await nest.host.process.delegation.kill(nest.id_of(middle), authority="", reason="operator")
    assert (await calling).text == "went on"
    assert results(nest.requests(top)[-1])[0].startswith("Error: subagent run was cancelled")
    assert (await outcome(nest, leaf)).status == "killed"


async def test_a_wide_tree_is_stopped_whole(nest: Nest) -> None:
    """P5, P10: several children at every level, jobs and foreground runs alike; no key is left of them."""
    gates = [nest.gate() for _ in range(4)]
    leaves = [nest.child(wait_for(gate), reply("never said")) for gate in gates]
    middles = [nest.child(one.job(), other.call(), reply("no")) for one, other in (leaves[:2], leaves[2:])]
    top = nest.child(call_tools(*(middle.call() for middle in middles)), reply("never said"))
    session = await nest.session()
    job_id = job_id_of(await session.call("subagent", top.arguments(run_in_background=True)))
    await nest.asked(*leaves)
    await session.call("job_kill", {"job_id": job_id})
    for child in (top, *middles, *leaves):
        assert (await outcome(nest, child)).status == "killed"

    async def clean() -> bool:
        try:
            await assert_no_leaked_keys(nest.kit.redis, nest.kit.app.settings.namespace)
        except AssertionError:
            return False
        return True

    await until(clean, "no key is left")
