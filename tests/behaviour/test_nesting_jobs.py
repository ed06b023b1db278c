"""Jobs of a child: it collects, lists and kills its own as a host does, and waits for them without a slot (P11)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from subagent_tasks.protocol.models import TranscriptEvent
from subagent_tasks.testing import call_tool, call_tools, reply, wait_for
from subagent_tasks.testing.script import ToolCalls
from tests.behaviour.bench import job_id_of
from tests.behaviour.nesting import Nest, nesting, results, told

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEASE_SECONDS = 3.0
"""Sweepers, which wake a child whose wait is over, look three times as often."""

go_on = threading.Event()


def hold() -> str:
    """Hold until it is let go."""
    go_on.wait(10)
    return "held"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nest() -> AsyncIterator[Nest]:
    async with nesting(functions=[hold], settings={"lease_seconds": LEASE_SECONDS}) as nest:
        yield nest
        go_on.set()


def collect(job: str = "JOB1", *, timeout_ms: int | None = None) -> ToolCalls:
    """Wait for a job of the child's."""
    timeout = {} if timeout_ms is None else {"timeout_ms": timeout_ms}
    return call_tool("job_output", {"job_id": job, "wait": True, **timeout})


def started_by(answer: str) -> str:
    """The job id in the answer to a background call."""
    assert answer.startswith("started background subagent job ")
    return answer.split()[-1]


def answered_after_ms(events: list[TranscriptEvent], text: str) -> int:
    """How long after its model message a call got the answer that holds the text."""
    response_at_ms = 0
    for event in events:
        if event.kind == "response":
            response_at_ms = event.at_ms
        elif event.kind == "tool_result" and text in str(event.data["content"]):
            return event.at_ms - response_at_ms
    raise AssertionError(f"no result holds {text!r}")


# The three tools


async def test_a_child_waits_for_several_jobs_at_once(nest: Nest) -> None:
    """behaviour §3.5, §7.5: results in model order, whichever ends first."""
    gate = nest.gate()
    slow, quick = nest.child(wait_for(gate), reply("slow")), nest.child(reply("quick"))
    top = nest.child(call_tools(slow.job(), quick.job()), call_tools(collect("JOB1"), collect("JOB2")), reply("both"))
    calling = asyncio.create_task((await nest.session()).call("subagent", top.arguments()))
    await nest.settled(quick)
    await nest.suspended(top)
    gate.set()
    await calling
    assert results(nest.requests(top)[-1])[2:] == ["slow\n[status: completed]", "quick\n[status: completed]"]


async def test_a_child_lists_its_jobs(nest: Nest) -> None:
    """behaviour §3.5: in the order they were registered; its parent's are not among them."""
    session, gate = await nest.session(), nest.gate()
    job, quick = nest.child(wait_for(gate), reply("done")), nest.child(reply("done"))
    await session.call("subagent", job.arguments(run_in_background=True))
    top = nest.child(job.job(), quick.job(), collect("JOB2"), call_tool("job_list"), reply("listed"))
    assert (await session.call("subagent", top.arguments())).text == "listed"
    one, two, _, listing = results(nest.requests(top)[-1])
    first, second = listing.splitlines()
    assert first.startswith(started_by(one))
    assert second == f"{started_by(two)} [subagent] completed — a task"
    gate.set()


async def test_a_child_kills_its_job_and_needs_no_notice(nest: Nest) -> None:
    """behaviour §3.5: acknowledged at once; the job ends `killed`."""
    gate = nest.gate()
    job = nest.child(wait_for(gate), reply("never said"))
    kill = call_tool("job_kill", {"job_id": "JOB1", "reason": "no longer needed"})
    top = nest.child(job.job(), kill, collect(), reply("done"))
    await (await nest.session()).call("subagent", top.arguments())
    started, killed, reading = results(nest.requests(top)[-1])
    assert killed == f"requested cancellation of job {started_by(started)}"
    assert reading == "(no new output)\n[status: killed]"
    assert told(nest.requests(top)[-1]) == [top.prompt]


async def test_a_child_may_have_ten_jobs_at_once(nest: Nest) -> None:
    """behaviour §7.8: the limit of a host, counted for each owner."""
    gate = nest.gate()
    job = nest.child(wait_for(gate), reply("done"))
    top = nest.child(call_tools(*[job.job()] * 11), reply("enough"))
    await (await nest.session()).call("subagent", top.arguments())
    answers = results(nest.requests(top)[-1])
    refused = [answer for answer in answers if answer.startswith("Error: background job limit reached")]
    assert (len(answers), len(refused)) == (11, 1)


# Waits


async def test_a_wait_that_runs_out_ends_at_its_time(nest: Nest) -> None:
    """behaviour §3.5, P11: the child is suspended meanwhile and woken by a sweeper; the job goes on."""
    session, gate = await nest.session(), nest.gate()
    job = nest.child(wait_for(gate), reply("late"))
    top = nest.child(job.job(), collect(timeout_ms=1200), reply("gave up"))
    calling = asyncio.create_task(session.call("subagent", top.arguments()))
    await nest.suspended(top)
    assert (await calling).text == "gave up"
    waited_ms = answered_after_ms(await nest.transcript(session, top), "(no new output)\n[status: running]")
    assert 1200 <= waited_ms < 1200 + 1000 * LEASE_SECONDS


async def test_a_short_wait_is_waited_in_place(nest: Nest) -> None:
    """P8: it is over before any sweeper would have woken the child, so the child is not suspended for it."""
    session, gate = await nest.session(), nest.gate()
    job = nest.child(wait_for(gate), reply("late"))
    top = nest.child(job.job(), collect(timeout_ms=200), reply("gave up"))
    assert (await session.call("subagent", top.arguments())).text == "gave up"
    events = await nest.transcript(session, top)
    assert answered_after_ms(events, "(no new output)\n[status: running]") >= 200
    assert "suspended" not in [event.kind for event in events]


async def test_a_wait_does_not_start_anew_when_the_child_goes_on(nest: Nest) -> None:
    """P8: the shorter wait of the message wakes the child; the longer one counts from the message all the same."""
    session, gate = await nest.session(), nest.gate()
    job = nest.child(wait_for(gate), reply("late"))
    waits = call_tools(collect("JOB1", timeout_ms=1200), collect("JOB2", timeout_ms=2000))
    top = nest.child(call_tools(job.job(), job.job()), waits, reply("gave up"))
    calling = asyncio.create_task(session.call("subagent", top.arguments()))
    await nest.suspended(top)
    assert (await calling).text == "gave up"
    asked_at_ms, answered_at_ms = [
        event.at_ms for event in await nest.transcript(session, top) if event.kind == "response"
    ][1:]
    assert 2000 <= answered_at_ms - asked_at_ms < 1200 + 2000


async def test_a_job_that_ends_wakes_the_child_that_waits_for_it(nest: Nest) -> None:
    """P11: long before the wait is over."""
    gate = nest.gate()
    job = nest.child(wait_for(gate), reply("the answer"))
    top = nest.child(job.job(), collect(timeout_ms=60_000), reply("collected"))
    calling = asyncio.create_task((await nest.session()).call("subagent", top.arguments()))
    await nest.suspended(top)
    gate.set()
    async with asyncio.timeout(5):
        assert (await calling).text == "collected"


# Notices


def notice_of(job_id: str, status: str = "completed") -> str:
    return f"background job {job_id} (subagent: a task) finished [status: {status}]. Read its output with job_output."


async def test_a_job_that_ends_while_the_child_works_is_told_at_its_next_step(nest: Nest) -> None:
    """behaviour §3.7, protocol §5: once, as text, in all requests from then on."""
    go_on.clear()
    gate = nest.gate()
    job = nest.child(wait_for(gate), reply("the answer"))
    top = nest.child(job.job(), call_tool("hold"), call_tool("job_list"), reply("done"))
    calling = asyncio.create_task((await nest.session()).call("subagent", top.arguments()))
    await nest.asked(top, times=2)
    await nest.asked(job)
    gate.set()
    await nest.settled(job)
    go_on.set()
    await calling
    notice = notice_of(nest.id_of(job))
    assert [told(request) for request in nest.requests(top)] == [
        [top.prompt],
        [top.prompt],
        [top.prompt, notice],
        [top.prompt, notice],
    ]


async def test_a_job_that_ends_while_the_child_is_suspended_is_told_once(nest: Nest) -> None:
    """behaviour §3.7: over a further suspension too."""
    gates = [nest.gate() for _ in range(3)]
    job, first, second = (nest.child(wait_for(gate), reply("done")) for gate in gates)
    top = nest.child(job.job(), first.call(), second.call(), reply("done"))
    calling = asyncio.create_task((await nest.session()).call("subagent", top.arguments()))
    await nest.asked(first)
    await nest.suspended(top)
    gates[0].set()
    await nest.settled(job)
    gates[1].set()
    await nest.asked(second)
    await nest.suspended(top)
    gates[2].set()
    await calling
    assert [len(told(request)) for request in nest.requests(top)] == [1, 1, 2, 2]
    assert told(nest.requests(top)[-1])[-1] == notice_of(nest.id_of(job))


async def test_a_notice_does_not_wake_a_suspended_child(nest: Nest) -> None:
    """protocol §3, P11: it goes on when what it waits for has ended."""
    gates = [nest.gate() for _ in range(2)]
    job, child = (nest.child(wait_for(gate), reply("done")) for gate in gates)
    top = nest.child(job.job(), child.call(), reply("done"))
    calling = asyncio.create_task((await nest.session()).call("subagent", top.arguments()))
    await nest.asked(child)
    await nest.suspended(top)
    token = (await nest.record(top)).token
    gates[0].set()
    await nest.settled(job)
    assert (await nest.record(top)).token == token
    gates[1].set()
    await calling


async def test_a_collected_job_is_not_announced(nest: Nest) -> None:
    """behaviour §3.7: a wait that returned its end is its report."""
    gate = nest.gate()
    job = nest.child(wait_for(gate), reply("the answer"))
    top = nest.child(job.job(), collect(), call_tool("job_list"), reply("done"))
    calling = asyncio.create_task((await nest.session()).call("subagent", top.arguments()))
    await nest.suspended(top)
    gate.set()
    await calling
    assert [told(request) for request in nest.requests(top)] == [[top.prompt]] * 4


# Fences


async def test_a_parent_cannot_touch_a_job_of_its_child(nest: Nest) -> None:
    """behaviour §3.8, §10.61: fenced to the session that owns it."""
    session, gate = await nest.session(), nest.gate()
    job = nest.child(wait_for(gate), reply("done"))
    top = nest.child(job.job(), collect(), reply("done"))
    calling = asyncio.create_task(session.call("subagent", top.arguments()))
    await nest.asked(job)
    job_id = nest.id_of(job)
    for tool in ("job_output", "job_kill"):
        refused = await session.call(tool, {"job_id": job_id})
        assert refused.text == f"Error: job {job_id} belongs to another session"
    assert (await session.call("job_list", {})).text == "(no background jobs)"
    gate.set()
    assert (await calling).text == "done"


async def test_a_child_cannot_touch_a_job_of_its_parent(nest: Nest) -> None:
    """behaviour §3.8, §10.61"""
    session, gate = await nest.session(), nest.gate()
    job = nest.child(wait_for(gate), reply("done"))
    job_id = job_id_of(await session.call("subagent", job.arguments(run_in_background=True)))
    top = nest.child(
        call_tools(collect(job_id), call_tool("job_kill", {"job_id": job_id}), call_tool("job_list")), reply("done")
    )
    await session.call("subagent", top.arguments())
    foreign = f"Error: job {job_id} belongs to another session"
    assert results(nest.requests(top)[-1]) == [foreign, foreign, "(no background jobs)"]
    gate.set()
    reading = await session.call("job_output", {"job_id": job_id, "wait": True})
    assert reading.text == "done\n[status: completed]"


async def test_a_foreground_run_of_a_child_is_no_job(nest: Nest) -> None:
    """behaviour §3.5: unknown to the job tools, and the hint says why."""
    session, gate = await nest.session(), nest.gate()
    child = nest.child(wait_for(gate), reply("done"))
    top = nest.child(call_tools(child.call(), call_tool("job_list")), reply("done"))
    calling = asyncio.create_task(session.call("subagent", top.arguments()))
    await nest.asked(child)
    gate.set()
    await calling
    assert results(nest.requests(top)[-1]) == ["done", "(no background jobs)"]
