"""A signal set before, while and after a child is made: what the caller gets, and what is left (behaviour §2.10)."""

from __future__ import annotations

import asyncio

import pytest

from subagent_tasks import CallerError, RunEnded, RunStarted, Session
from subagent_tasks.protocol.ids import run_id_for_call
from subagent_tasks.protocol.models import TranscriptEvent
from tests.behaviour.bench import Bench, until
from tests.behaviour.provider import Child

CANCELLED = "Error: subagent run was cancelled"


class Call:
    """A foreground call that a test aborts, and the events of its child."""

    def __init__(self, bench: Bench, session: Session, child: Child) -> None:
        self.signal, self.events = asyncio.Event(), list[RunStarted | RunEnded]()
        self._session = session
        namespace = bench.kit.app.settings.namespace
        self.run_id = run_id_for_call(namespace=namespace, session_id=session.id, call_id="c1")
        bench.kit.app.on_event(lambda event: self.events.append(event) if event.parent_id == session.id else None)
        self.result = asyncio.create_task(session.call("subagent", child.arguments(), call_id="c1", signal=self.signal))

    async def transcript(self) -> list[TranscriptEvent]:
        """What its run went through, to the end."""
        return [event async for event in self._session.transcript(self.run_id, follow=True)]


async def test_aborted_in_the_same_tick_nothing_is_admitted(bench: Bench) -> None:
    """behaviour §10.151: the call was made and not begun, so it is as if the signal had been set before."""
    session, child = await bench.session(), bench.provider.child()
    call = Call(bench, session, child)
    call.signal.set()
    assert (await call.result).code == "ABORTED_BEFORE_DISPATCH"
    with pytest.raises(CallerError, match="unknown child"):
        await call.transcript()
    assert child.starts == 0


async def test_aborted_while_it_is_admitted_no_child_is_made(bench: Bench) -> None:
    """behaviour §10.151: the run is taken back; if a worker had it already, its start is given up."""
    session, child = await bench.session(), bench.provider.child(holds_start=True)
    call = Call(bench, session, child)
    await asyncio.sleep(0)
    call.signal.set()
    assert (await call.result).text == CANCELLED
    assert (await call.transcript())[-1].data == {"status": "killed", "stopReason": "aborted"}
    assert "started" not in child.log
    assert call.events == []


async def test_aborted_while_it_is_set_up_the_child_cleans_up(bench: Bench) -> None:
    """behaviour §10.151: the start ends by its own cleaning up, and was never told as one."""
    session, child = await bench.session(), bench.provider.child(holds_start=True)
    call = Call(bench, session, child)
    await until(lambda: child.starts == 1, "the start is under way")
    call.signal.set()
    assert (await call.result).text == CANCELLED
    assert child.log == ["starting", "start cancelled"]
    assert call.events == []


async def test_aborted_at_work_the_run_is_there_and_ended(bench: Bench) -> None:
    """behaviour §10.151: an aborted run with its id; the child was cancelled, released, and told from start to end."""
    session, child = await bench.session(), bench.provider.child(holds_result=True)
    call = Call(bench, session, child)
    await until(lambda: child.is_running, "the child runs")
    call.signal.set()
    assert (await call.result).text == CANCELLED
    assert child.log == ["starting", "started", "cancel", "result", "dispose"]
    await until(lambda: len(call.events) == 2, "start and end")
    start, end = call.events
    assert end == RunEnded(start.run_id, "scripted", call.run_id, session.id, "aborted")
    assert (await call.transcript())[-1].data == {"status": "killed", "stopReason": "aborted"}
