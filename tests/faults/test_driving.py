"""Crash windows and odd children while a run is driven: nothing is repeated, nothing is driven for ever."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any, cast

import pytest
from celery import Celery
from celery.result import AsyncResult
from driving_kit import MadeProvider, MadeRun, Stage, done, driving

from subagent_tasks.errors import BrokerUnavailable
from subagent_tasks.protocol.interfaces import Drive, NewEvent
from subagent_tasks.protocol.lifecycle import State
from subagent_tasks.protocol.models import ChildResult, text_block
from subagent_tasks.store.runs import RunStore
from subagent_tasks.testing import wait_until
from subagent_tasks.testing.faults import end_outage

RUN = "run-1"


async def activate(stage: Stage, run_id: str = RUN) -> None:
    async with asyncio.timeout(5):
        await stage.executor.activate(run_id, stage.queue)


def gives(made: Any, *, resumable: bool = True) -> MadeProvider:
    """A provider that gives this to whoever starts it."""

    async def make(drive: Drive) -> Any:
        return made

    return MadeProvider(make, resumable=resumable)


async def a_string() -> str:
    return "a text instead of a result"


@pytest.mark.parametrize("made", [None, MadeRun(a_string)], ids=["a start that gives nothing", "a result of no kind"])
async def test_a_child_that_keeps_no_contract_ends_failed(fake_server_url: str, made: Any) -> None:
    """P6, field fault 7: an error of its run; left unsettled it would be handed back and tried again for ever."""
    async with driving(fake_server_url, gives(made)) as stage:
        await stage.accept(RUN)
        await activate(stage)
        outcome = await stage.outcome(RUN)
        assert (outcome.status, outcome.stop_reason) == ("failed", "error")
        assert "provider" in (outcome.error or "")
    if made is not None:
        assert made.disposed == 1


@pytest.mark.parametrize("fatal", [SystemExit, KeyboardInterrupt])
async def test_what_would_end_the_worker_ends_only_its_child(fake_server_url: str, fatal: type[BaseException]) -> None:
    """P6: a provider that raises it must not leave a worker that takes messages and drives nothing."""

    async def result() -> Any:
        raise fatal(3)

    made = MadeRun(result)
    async with driving(fake_server_url, gives(made)) as stage:
        await stage.accept(RUN)
        await activate(stage)
        outcome = await stage.outcome(RUN)
    assert (outcome.status, fatal.__name__ in (outcome.error or ""), made.disposed) == ("failed", True, 1)


async def test_a_run_that_is_too_deep_is_refused_by_the_worker_too(fake_server_url: str) -> None:
    """P9, field fault 26: whatever wrote the record, the worker counts again before anything starts."""
    provider = gives(MadeRun(a_string))
    async with driving(fake_server_url, provider) as stage:
        await stage.accept(RUN)
        await cast("Any", stage.client.hset(stage.keys.session(RUN), "depth", "2"))
        await activate(stage)
        outcome = await stage.outcome(RUN)
    assert (outcome.status, outcome.error, provider.starts) == ("failed", "subagent depth 2 exceeds maxDepth 1", 0)


async def test_our_own_trouble_with_redis_is_no_child_s_outcome(fake_server_url: str) -> None:
    """P1: the run is left to go on from its transcript, whichever step met the outage."""

    async def result() -> Any:
        raise BrokerUnavailable("Redis did not answer")

    async with driving(fake_server_url, gives(MadeRun(result))) as stage:
        await stage.accept(RUN)
        await activate(stage)
        record = await stage.runs.get(RUN)
    assert record is not None
    assert (record.state, record.outcome) == (State.DRIVEN, None)


async def test_text_that_no_store_takes_costs_no_run_its_ending(fake_server_url: str) -> None:
    """P6: models and file names produce lone surrogates, in an answer as in an error."""
    result = ChildResult(stop_reason="completed", output=(text_block("half a \ud83d smile"),))
    async with driving(fake_server_url, gives(MadeRun(lambda: _later(result)))) as stage:
        await stage.accept(RUN)
        await activate(stage)
        assert (await stage.outcome(RUN)).text == "half a ? smile"


async def test_a_start_that_meets_the_run_limit_ends_the_run(fake_server_url: str) -> None:
    """P6: its last question was refused because of the limit, which is an ending and no loss."""

    async def make(drive: Drive) -> Any:
        await cast("Any", drive).stop_requested.wait()
        await drive.announce()

    async with driving(fake_server_url, MadeProvider(make)) as stage:
        await stage.accept(RUN, run_limit_seconds=0.05)
        await activate(stage)
        assert "run limit" in ((await stage.outcome(RUN)).diagnostic or "")


async def fail_to_settle(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drive the run to its end while no settlement arrives: Redis is away for longer than a drive waits."""

    async def away(*_: Any, **__: Any) -> str:
        raise BrokerUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "settle", away)
        await activate(stage)


async def lose_and_let_go(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is driven, its end cannot be written, and two beats later the worker lets it go; then it comes again."""
    await stage.accept(RUN)
    await fail_to_settle(stage, monkeypatch)
    await stage.beat()
    await stage.beat()
    await wait_until(lambda: _not_driven(stage), description="it is let go")
    await stage.beat()
    await activate(stage)


async def test_what_may_not_resume_is_not_started_again_by_the_worker_that_lost_it(
    fake_server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P7: a drive that nobody here remembers is handed back, but not one that must not run twice."""
    provider = gives(MadeRun(lambda: _later(done())), resumable=False)
    async with driving(fake_server_url, provider, lease_seconds=0.1, redis_timeout_seconds=2) as stage:
        await lose_and_let_go(stage, monkeypatch)
        assert provider.starts == 1
        assert (await stage.outcome(RUN)).status == "failed"


async def test_what_may_resume_is_handed_back_by_the_worker_that_lost_it(
    fake_server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protocol §4: a beat hands back ids unknown for two beats running."""
    provider = gives(MadeRun(lambda: _later(done())))
    async with driving(fake_server_url, provider, lease_seconds=0.1, redis_timeout_seconds=2) as stage:
        await lose_and_let_go(stage, monkeypatch)
        assert (await stage.outcome(RUN)).status == "completed"


async def test_a_handing_back_that_fails_is_tried_again_and_quotes_nothing(
    fake_server_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P14, protocol §4."""
    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    async with driving(fake_server_url, gives(None)) as stage:
        await stage.accept(RUN)
        await stage.runs.claim(RUN, queue=stage.queue, worker=stage.process_id, claim_id="of somebody forgotten")
        get = RunStore.get

        async def broken(self: RunStore, run_id: str) -> Any:
            monkeypatch.setattr(RunStore, "get", get)
            raise ValueError("a planted secret")

        monkeypatch.setattr(RunStore, "get", broken)
        with caplog.at_level(logging.DEBUG):
            await stage.beat()
            await stage.beat()
            await wait_until(lambda: RunStore.get is get, description="it was tried")
            await stage.beat()
            await wait_until(lambda: _not_driven(stage), description="it is let go")
        assert errors == []
        assert "secret" not in caplog.text


async def test_a_run_that_no_child_was_started_for_is_handed_back_at_a_shutdown(fake_server_url: str) -> None:
    """P1: its worker leaves before anything began, so another one may begin, resumable or not."""
    provider = gives(None, resumable=False)
    async with driving(fake_server_url, provider) as stage:
        await stage.accept(RUN)
        claim = RunStore.claim

        async def claim_late(self: RunStore, *args: Any, **kwargs: Any) -> Any:
            record = await claim(self, *args, **kwargs)
            asyncio.ensure_future(stage.executor.release_all())  # noqa: RUF006 - ends with the run
            await asyncio.sleep(0)
            return record

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunStore, "claim", claim_late)
            await activate(stage)
        assert (await stage.record(RUN)).state is State.QUEUED
        assert provider.starts == 0


async def test_a_message_that_comes_before_the_first_beat_after_an_outage_is_not_dropped(fake_server_url: str) -> None:
    """P1, protocol §4: the worker lives; its heartbeat is a moment behind its consumer."""
    async with driving(fake_server_url, gives(MadeRun(lambda: _later(done())))) as stage:
        await stage.accept(RUN)
        await stage.client.delete(stage.keys.processes)
        activation = asyncio.ensure_future(activate(stage))
        claim, asked = RunStore.claim, asyncio.Event()

        async def seen(self: RunStore, *args: Any, **kwargs: Any) -> Any:
            answer = await claim(self, *args, **kwargs)
            asked.set()
            return answer

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunStore, "claim", seen)
            await asyncio.wait_for(asked.wait(), 5)
            await stage.beat()
            await activation
        assert await stage.is_settled(RUN)


async def test_an_event_written_while_the_writer_is_cancelled_costs_no_later_one(fake_server_url: str) -> None:
    """P7: a provider may be cancelled inside a write and still has to say how far it came."""
    gate, written = asyncio.Event(), asyncio.Event()
    append = RunStore.append

    async def slow(self: RunStore, *args: Any, **kwargs: Any) -> Any:
        answer = await append(self, *args, **kwargs)
        written.set()
        await gate.wait()
        return answer

    async def make(drive: Drive) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunStore, "append", slow)
            writing = asyncio.ensure_future(drive.record(NewEvent("note", {"number": 1})))
            await asyncio.wait_for(written.wait(), 5)
            writing.cancel()
            await asyncio.wait({writing})
            gate.set()
        await drive.record(NewEvent("note", {"number": 2}))
        return MadeRun(lambda: _later(done()))

    async with driving(fake_server_url, MadeProvider(make)) as stage:
        await stage.accept(RUN)
        await activate(stage)
        notes = [event.data["number"] for event in await stage.runs.transcript(RUN) if event.kind == "note"]
        assert notes == [1, 2]


async def test_a_child_whose_drive_is_cancelled_is_disposed(fake_server_url: str) -> None:
    """P5: disposal always runs; the pool cancels a drive that took too long at a shutdown."""
    started = asyncio.Event()

    async def never() -> ChildResult:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    run = MadeRun(never)
    async with driving(fake_server_url, gives(run)) as stage:
        await stage.accept(RUN)
        activation = asyncio.ensure_future(stage.executor.activate(RUN, stage.queue))
        await asyncio.wait_for(started.wait(), 5)
        activation.cancel()
        await asyncio.wait({activation}, timeout=5)
        assert run.disposed == 1


async def test_an_ending_that_was_refused_is_no_event(fake_server_url: str) -> None:
    """Behaviour §9: the process that settles tells of the end."""

    async def make(drive: Drive) -> Any:
        async def result() -> ChildResult:
            # Taken away meanwhile, as from a process that slept.
            await cast("Any", stage.client.hincrby(stage.keys.session(RUN), "token", 1))
            return done()

        return MadeRun(result)

    async with driving(fake_server_url, MadeProvider(make)) as stage:
        await stage.accept(RUN)
        await activate(stage)
        assert stage.told.started_runs == [RUN]
        assert stage.told.ended_runs == []


class Held(Exception):
    """Holds a lock: no pickle and no JSON can take it."""

    def __init__(self) -> None:
        super().__init__("the lock is held")
        self.lock = threading.Lock()


@pytest.mark.parametrize("where", ["start", "result"])
async def test_an_error_that_cannot_be_stored_is_told_in_words(fake_server_url: str, where: str) -> None:
    """Field fault 23: kind, text and members; plain Celery raises it, and the worker goes on with the next one."""

    async def fails() -> Any:
        raise ExceptionGroup("two things", [Held(), ValueError("another")])

    async def make(drive: Drive) -> Any:
        return await fails() if where == "start" else MadeRun(fails)

    said = "ExceptionGroup: two things [Held: the lock is held; ValueError: another]"
    async with driving(fake_server_url, MadeProvider(make)) as stage:
        for run_id in (RUN, "run-2"):
            await stage.accept(run_id)
            await activate(stage, run_id)
            assert (await stage.outcome(run_id)).error == said
        with Celery(broker=fake_server_url, backend=fake_server_url, set_as_current=False) as celery:
            result = cast("Any", AsyncResult)(RUN, app=celery)
            assert (result.state, said in str(result.result)) == ("FAILURE", True)


async def test_a_claim_under_way_is_not_taken_for_a_leftover(
    fake_server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protocol §4: a drive is registered before its claim is sent; many beats may come before the claim's answer."""
    claim = RunStore.claim

    async def slow(self: RunStore, *args: Any, **named: Any) -> Any:
        claimed = await claim(self, *args, **named)
        for _ in range(10):
            await stage.beat()
        return claimed

    async with driving(fake_server_url, gives(MadeRun(lambda: _later(done())))) as stage:
        monkeypatch.setattr(RunStore, "claim", slow)
        await stage.accept(RUN)
        await activate(stage)
        record = await stage.record(RUN)
    assert (record.token, record.outcome and record.outcome.status) == (1, "completed")


async def test_an_outage_of_two_leases_ends_every_drive_here(fake_server_url: str) -> None:
    """Protocol §4: others may drive its runs by now. Its child is disposed, and the run left to whoever finds it."""
    never = asyncio.Event()

    async def result() -> Any:
        await never.wait()

    made = MadeRun(result)
    made.cancel = _cancelling(never)
    async with driving(fake_server_url, gives(made)) as stage:
        await stage.accept(RUN)
        driving_it = asyncio.ensure_future(activate(stage))
        await wait_until(lambda: stage.told.started_runs, description="it is driven")
        stage.executor.on_outage()
        await driving_it
        assert ((await stage.record(RUN)).state, stage.told.ended_runs, made.disposed) == (State.DRIVEN, [], 1)


async def test_the_output_limit_counts_every_block(fake_server_url: str) -> None:
    """Protocol §6: reasoning, tool calls and structured output are stored and published like text."""
    result = ChildResult(
        stop_reason="completed",
        output=({"type": "reasoning", "text": "r" * 3000}, text_block("the answer")),
        structured="s" * 3000,
    )
    async with driving(fake_server_url, gives(MadeRun(lambda: _later(result))), max_output_bytes=5000) as stage:
        await stage.accept(RUN)
        await activate(stage)
        outcome = await stage.outcome(RUN)
        assert outcome.status == "failed"
        assert outcome.text == "the answer"
        assert len(outcome.to_json()) < 5000
        assert "SUBAGENT_TASKS_MAX_OUTPUT_BYTES" in (outcome.diagnostic or "")


async def test_one_unreadable_record_keeps_nobody_else_from_being_recovered(fake_server_url: str) -> None:
    """P6: each finding of a sweep is on its own."""
    async with driving(fake_server_url, gives(None)) as stage:
        for run_id in ("run-1", "run-2", "run-3"):
            await stage.accept(run_id)
            await stage.runs.claim(run_id, queue=stage.queue, worker=stage.process_id, claim_id=run_id)
        await cast("Any", stage.client.hset(stage.keys.session("run-2"), "spec", "not JSON"))
        await stage.processes.beat("host-1")
        await end_outage(stage.client, stage.keys)
        await cast("Any", stage.client.zadd(stage.keys.processes, {stage.process_id: 1}))
        swept = await stage.sweeper().sweep_once()
        assert (swept.ran, swept.requeued) == (True, 2)


def _cancelling(event: asyncio.Event) -> Any:
    async def cancel(reason: str) -> None:
        event.set()

    return cancel


async def _later(result: ChildResult) -> ChildResult:
    return result


async def _not_driven(stage: Stage) -> bool:
    return (await stage.record(RUN)).state is not State.DRIVEN
