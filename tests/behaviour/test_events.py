"""What an application hears of its runs: `RunStarted` and `RunEnded` around what the child itself saw."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from subagent_tasks import RunEnded, RunStarted, Session, ToolResult
from tests.behaviour.bench import Bench, run_id_of, until
from tests.behaviour.provider import Child, ended

Event = RunStarted | RunEnded


def heard(bench: Bench, session: Session, child: Child | None = None) -> list[tuple[Event, tuple[str, ...]]]:
    """The events of a session's children, each with what `child` had been through when it was told."""
    events: list[tuple[Event, tuple[str, ...]]] = []

    def listen(event: Event) -> None:
        if event.parent_id == session.id:
            events.append((event, tuple(child.log) if child is not None else ()))

    bench.kit.app.on_event(listen)
    return events


async def test_a_start_is_told_once_the_child_is_there_and_an_end_once_it_is_released(bench: Bench) -> None:
    """behaviour §10.190: start after publication, end after the result."""
    session, child = await bench.session(), bench.provider.child()
    events = heard(bench, session, child)
    await session.call("subagent", child.arguments())
    await until(lambda: len(events) == 2, "start and end")
    (start, at_start), (end, at_end) = events
    assert isinstance(start, RunStarted)
    assert at_start == ("starting", "started")
    assert isinstance(end, RunEnded)
    assert at_end == ("starting", "started", "result", "dispose")


async def test_a_child_that_ends_at_once_has_its_start_before_its_end(bench: Bench) -> None:
    """behaviour §10.190: also when the result is there as soon as the run is, and many end side by side."""
    session, children = await bench.session(), [bench.provider.child() for _ in range(10)]
    events = heard(bench, session)
    results = await asyncio.gather(*(session.call("subagent", child.arguments()) for child in children))
    await until(lambda: len(events) == 2 * len(children), "all starts and ends")
    for child_id in map(run_id_of, results):
        assert [type(event) for event, _ in events if event.child_id == child_id] == [RunStarted, RunEnded]


async def rejected(session: Session, child: Child) -> ToolResult:
    child.start_error = OSError("no")
    return await session.call("subagent", child.arguments())


async def cancelled(session: Session, child: Child) -> ToolResult:
    child.holds_start = True
    return await session.call("subagent", child.arguments(), timeout=0.05)


@pytest.mark.parametrize("start", [rejected, cancelled])
async def test_a_start_that_failed_is_not_told(
    bench: Bench, start: Callable[[Session, Child], Awaitable[ToolResult]]
) -> None:
    """behaviour §10.191: neither when the provider refused it, nor when its caller gave up first."""
    session, child, after = await bench.session(), bench.provider.child(), bench.provider.child()
    events = heard(bench, session)
    assert (await start(session, child)).is_error
    later = run_id_of(await session.call("subagent", after.arguments()))
    await until(lambda: len(events) == 2, "the events of the child after it")
    assert [event.child_id for event, _ in events] == [later, later]


@pytest.mark.parametrize(
    ("behaviour", "stop_reason"),
    [
        ({"result": OSError("gone")}, "error"),
        ({"result": ended(stop_reason="max-tokens")}, "max-tokens"),
        ({"dispose_error": OSError("stuck")}, "completed"),
    ],
)
async def test_an_end_says_how_the_child_ended(bench: Bench, behaviour: dict[str, object], stop_reason: str) -> None:
    """behaviour §10.191: `error` for a rejected result; a failed release is no stop reason of the child's."""
    session, child = await bench.session(), bench.provider.child(**behaviour)
    events = heard(bench, session)
    await session.call("subagent", child.arguments())
    await until(lambda: len(events) == 2, "start and end")
    end, _ = events[-1]
    assert isinstance(end, RunEnded)
    assert end.stop_reason == stop_reason


@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError()])
@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_a_listener_that_throws_is_contained(bench: Bench, error: BaseException, kind: str) -> None:
    """behaviour §10.191, §10.57, §10.65: plain or async, whatever it raises; run and other listeners go on."""
    session, child = await bench.session(), bench.provider.child()
    broken: list[Event] = []

    def throw(event: Event) -> None:
        if event.parent_id == session.id:
            broken.append(event)
            raise error

    async def throw_later(event: Event) -> None:
        await asyncio.sleep(0)
        throw(event)

    bench.kit.app.on_event(throw if kind == "plain" else throw_later)
    events = heard(bench, session, child)
    assert (await session.call("subagent", child.arguments())).text == "done"
    await until(lambda: len(events) == 2 and len(broken) == 2, "both heard both events")
    assert child.log == ["starting", "started", "result", "dispose"]


async def test_every_listener_hears_the_end_of_a_job_once(bench: Bench) -> None:
    """behaviour §10.57: behind one that throws and one that rejects, and however often the job is read."""
    session, children = await bench.session(), [bench.provider.child() for _ in range(3)]

    def throw(event: Event) -> None:
        raise RuntimeError("listener")

    async def reject(event: Event) -> None:
        raise RuntimeError("listener")

    bench.kit.app.on_event(throw)
    bench.kit.app.on_event(reject)
    behind = [heard(bench, session) for _ in range(2)]
    jobs = [await bench.job(session, child.in_background()) for child in children]
    for job_id in jobs * 2:
        await bench.settled(session, job_id)
    await until(lambda: all(len(events) == 2 * len(jobs) for events in behind), "all events")
    for events in behind:
        assert sorted(event.child_id for event, _ in events if isinstance(event, RunEnded)) == sorted(jobs)
