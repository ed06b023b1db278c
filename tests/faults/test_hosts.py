"""Faults around a host: its doorbell, its heartbeat, its waits, and what is left when it stops."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis
from driving_kit import OWNER, MadeProvider, MadeRun, done, driving

from broker_config import BrokerSettings, EmbeddedServer
from subagent_tasks.app import SubagentApp
from subagent_tasks.protocol.ids import run_id_for_call
from subagent_tasks.protocol.interfaces import Drive
from subagent_tasks.protocol.keys import Keys
from subagent_tasks.protocol.models import Notice
from subagent_tasks.providers import SpawnProvider
from subagent_tasks.queue.publisher import BrokerPublisher
from subagent_tasks.store.doorbell import Doorbell
from subagent_tasks.store.heartbeat import Heartbeat
from subagent_tasks.store.processes import BeatAnswer
from subagent_tasks.testing import Kit, ScriptedModel, fake_app, reply, wait_for, wait_until
from subagent_tasks.testing.faults import FaultyServer
from subagent_tasks.waiting import Waiting

TASK = {"description": "a task", "prompt": "say hello"}
JOB = {**TASK, "run_in_background": True}


def settings_of(url: str, **more: Any) -> BrokerSettings:
    return BrokerSettings(broker_url=url, namespace=f"test-{uuid.uuid4().hex[:12]}", **more)


def hello() -> ScriptedModel:
    model = ScriptedModel()
    model.on("hello", reply("hi there"))
    return model


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    """A real server that the test may freeze."""
    with EmbeddedServer() as server:
        yield server
        server.thaw()


# Ids.


def test_two_sessions_never_share_a_run() -> None:
    """P2, P14: ids hold colons, so where the session's ends and the call's begins is part of what is named."""
    one = run_id_for_call(namespace="ns", session_id="user", call_id="42:c1")
    other = run_id_for_call(namespace="ns", session_id="user:42", call_id="c1")
    assert one != other


async def test_a_process_has_another_id_at_every_start(fake_server_url: str) -> None:
    """Protocol §4: else a restarted one would hold the leases of the one that died."""
    async with fake_app(hello(), url=fake_server_url, worker=False) as kit:
        ids = {kit.host.process.id}
        for _ in range(2):
            async with kit.app.host() as host:
                ids.add(host.process.id)
    assert len(ids) == 3


async def test_an_id_that_another_owner_holds_is_a_conflict(fake_server_url: str) -> None:
    """P14: whoever repeats it must not be handed the other's result."""

    async def make(drive: Drive) -> Any:
        return MadeRun(_done)

    async with driving(fake_server_url, MadeProvider(make)) as stage:
        await stage.accept("run-1")
        record = await stage.record("run-1")
        await stage.sessions.open("somebody else")
        spec = record.spec.model_copy(update={"request": record.spec.request.model_copy(update={"prompt": "do it"})})
        with pytest.raises(Exception, match="used before"):
            await stage.delegation.start("run-1", owner="somebody else", mode="background", spec=spec)
        assert await stage.delegation.start("run-1", owner=OWNER, mode="background", spec=spec) is False


# Heartbeat.


class Beats:
    """A heartbeat over a server that is not there: each beat is the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, loop_stall_seconds: float = 30) -> None:
        self.beaten, self.stalled = threading.Semaphore(0), threading.Event()
        self.fault: Exception | None = None
        self.told: list[str] = []
        made = self

        def beat(_: Heartbeat) -> BeatAnswer:
            return made.beat()

        monkeypatch.setattr(Heartbeat, "_beat", beat)
        settings = settings_of("redis://127.0.0.1:1/0", lease_seconds=0.06, loop_stall_seconds=loop_stall_seconds)
        self.heartbeat = Heartbeat(
            settings,
            Keys(settings.namespace),
            process_id="host-1",
            on_beat=lambda _: self.told.append("beat"),
            on_outage=lambda: self.told.append("outage"),
            on_stall=self.stalled.set,
        )

    def beat(self) -> BeatAnswer:
        self.beaten.release()
        if self.fault is not None:
            raise self.fault
        return BeatAnswer(flagged=frozenset(), driven=frozenset())


async def beats(of: Beats, count: int = 1) -> None:
    for _ in range(count):
        assert await asyncio.to_thread(of.beaten.acquire, timeout=5)


async def test_no_error_ends_the_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field fault 4: whatever one beat fails with, the next one comes, and a long silence is told."""
    of = Beats(monkeypatch)
    of.fault = ValueError("no such answer")
    of.heartbeat.start()
    try:
        await beats(of, 3)
        await wait_until(lambda: "outage" in of.told, description="the outage is told")
        of.fault = None
        await wait_until(lambda: "beat" in of.told, description="it beats again")
    finally:
        await asyncio.to_thread(of.heartbeat.stop)


async def test_a_host_whose_loop_ticks_again_beats_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: a host that blocked its loop once must not be silent, and sweep nothing, for ever."""
    of = Beats(monkeypatch, loop_stall_seconds=0.1)
    of.heartbeat.start()
    try:
        await beats(of)
        of.stalled.wait(5)  # the loop is blocked here
        assert of.stalled.is_set()
        while of.beaten.acquire(blocking=False):
            pass
        await beats(of)
    finally:
        await asyncio.to_thread(of.heartbeat.stop)


async def test_a_loop_that_does_not_tick_beats_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protocol §4: a process whose loop hangs must not hold its leases."""
    of = Beats(monkeypatch, loop_stall_seconds=0.1)
    of.heartbeat.start()
    try:
        await beats(of)
        assert of.stalled.wait(5)
        while of.beaten.acquire(blocking=False):
            pass
        assert not of.beaten.acquire(timeout=0.2)  # still blocked: ten beats would have come
    finally:
        await asyncio.to_thread(of.heartbeat.stop)


async def test_a_process_that_was_frozen_has_no_stalled_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protocol §4: the loop could not tick because nothing could; a machine that slept is no hang."""
    of = Beats(monkeypatch, loop_stall_seconds=1)
    frozen = SimpleNamespace(by=0.0)
    monotonic = time.monotonic
    clock = SimpleNamespace(monotonic=lambda: monotonic() + frozen.by)
    monkeypatch.setattr("subagent_tasks.store.heartbeat.time", clock)
    of.heartbeat.start()
    try:
        await beats(of)
        frozen.by = 3600
        await beats(of, 3)
        assert not of.stalled.is_set()
    finally:
        await asyncio.to_thread(of.heartbeat.stop)


# Doorbell.


async def test_every_listener_looks_again_after_any_reconnection(bundled_server_url: str) -> None:
    """P4: what was published meanwhile is gone."""
    heard: dict[str, list[str | None]] = {"one": [], "two": []}
    with FaultyServer(bundled_server_url) as faulty:
        doorbell = Doorbell(settings_of(faulty.url))
        try:
            for channel, messages in heard.items():
                await doorbell.listen(channel, messages.append)
            faulty.cut()
            await wait_until(lambda: all(None in messages for messages in heard.values()), description="all are told")
        finally:
            await doorbell.close()


async def test_no_error_ends_the_doorbell(bundled_server_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field fault 9: alive and deaf is the worst of both."""
    heard: list[str | None] = []
    doorbell = Doorbell(settings_of(bundled_server_url))
    try:
        await doorbell.listen("channel", heard.append)
        pubsub = cast("Any", doorbell)._pubsub
        get_message, failed = pubsub.get_message, asyncio.Event()

        async def broken(**_: Any) -> Any:
            monkeypatch.setattr(pubsub, "get_message", get_message)
            failed.set()
            raise RuntimeError("a planted fault")

        monkeypatch.setattr(pubsub, "get_message", broken)
        with redis.Redis.from_url(bundled_server_url) as client:
            client.publish("channel", "wakes the pending read")
            await asyncio.wait_for(failed.wait(), 5)
            client.publish("channel", "after the fault")
        await wait_until(lambda: "after the fault" in heard, description="it is heard")
    finally:
        await doorbell.close()


async def test_a_listener_that_fails_is_not_quoted(bundled_server_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """P14: messages hold outcomes, and errors quote what they could not read."""

    def fails(text: str | None) -> None:
        raise ValueError(f"cannot read {text}")

    doorbell = Doorbell(settings_of(bundled_server_url))
    try:
        with caplog.at_level(logging.DEBUG), redis.Redis.from_url(bundled_server_url) as client:
            await doorbell.listen("channel", fails)
            client.publish("channel", "a planted secret")
            await wait_until(lambda: "listener failed" in caplog.text, description="it is logged")
        assert "secret" not in caplog.text
    finally:
        await doorbell.close()


async def test_leaving_after_the_end_connects_to_nothing(bundled_server_url: str) -> None:
    """P10: a session closed after its host leaves no connection behind."""
    doorbell = Doorbell(settings_of(bundled_server_url))
    await doorbell.listen("channel", lambda _: None)
    await doorbell.close()
    await doorbell.leave("channel")
    assert cast("Any", doorbell)._pubsub.connection is None


async def test_leaving_a_silent_server_is_bounded(own_server: EmbeddedServer) -> None:
    """P8: it accepts a connection and then says nothing."""
    with FaultyServer(own_server.url) as faulty:
        doorbell = Doorbell(settings_of(faulty.url, redis_timeout_seconds=0.5))
        try:
            await doorbell.listen("channel", lambda _: None)
            own_server.freeze()
            faulty.cut()
            started_at = time.monotonic()
            await asyncio.wait_for(doorbell.leave("channel"), 4)
            assert time.monotonic() - started_at < 3
        finally:
            own_server.thaw()
            await doorbell.close()


# Waiting.


async def test_a_session_that_is_reopened_while_it_is_closed_still_hears(bundled_server_url: str) -> None:
    """P4: one reader leaves while another arrives."""
    settings = settings_of(bundled_server_url)
    keys = Keys(settings.namespace)
    doorbell = Doorbell(settings)
    waiting = Waiting(runs=cast("Any", None), doorbell=doorbell, keys=keys, recheck_seconds=60)
    try:
        await waiting.attach("session")
        listen, between, go_on = doorbell.listen, asyncio.Event(), asyncio.Event()

        async def late(channel: str, listener: Any) -> None:
            await listen(channel, listener)
            between.set()
            await go_on.wait()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(doorbell, "listen", late)
            attaching = asyncio.ensure_future(waiting.attach("session"))
            await asyncio.wait_for(between.wait(), 5)
            await waiting.detach("session")
            go_on.set()
            await attaching
        bell = waiting.add_bell("session")
        with redis.Redis.from_url(bundled_server_url) as client:
            client.publish(keys.session_channel("session"), json.dumps({"notice": {}}))
        await asyncio.wait_for(bell.wait(), 5)
    finally:
        await doorbell.close()


class CountingRuns:
    """Knows no run, and counts what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def outcomes(self, run_ids: list[str]) -> list[None]:
        self.asked += run_ids
        return [None] * len(run_ids)


async def test_looking_for_one_run_reads_one_record() -> None:
    """With thousands outstanding, each waiting read and each large output would else read them all."""
    runs = CountingRuns()
    waiting = Waiting(runs=cast("Any", runs), doorbell=cast("Any", None), keys=Keys("ns"), recheck_seconds=60)
    looking = asyncio.ensure_future(waiting.run())
    for number in range(5000):
        waiting.expect(f"run-{number}")
    waiting.look("run-7")
    await wait_until(lambda: runs.asked, description="it looks")
    looking.cancel()
    await asyncio.wait({looking})
    assert runs.asked == ["run-7"]


# Calls and notices.


async def test_a_call_in_flight_ends_when_its_host_stops(fake_server_url: str) -> None:
    """P8: nobody would hear its ending any more; and protocol §3: its run goes with it."""
    never = asyncio.Event()
    model = ScriptedModel()
    model.on("hello", [wait_for(never), reply("too late")])
    async with fake_app(model, url=fake_server_url) as kit:
        async with kit.app.host() as host:
            session = await host.open_session("another")
            call = asyncio.ensure_future(session.call("subagent", TASK, timeout=60))
            await wait_until(lambda: model.requests, description="the child asks its model")
        result = await asyncio.wait_for(call, 5)
        assert result.is_error
        assert "host" in result.text
        # The kit asserts that nothing is left unsettled.


async def test_a_waiting_read_ends_when_its_host_stops(fake_server_url: str) -> None:
    """P8: likewise; the job goes on."""
    gate = asyncio.Event()
    model = ScriptedModel()
    model.on("hello", [wait_for(gate), reply("hi there")])
    async with fake_app(model, url=fake_server_url) as kit:
        async with kit.app.host() as host:
            session = await host.open_session("another")
            job_id = job_of(await session.call("subagent", JOB))
            call = asyncio.ensure_future(session.call("job_output", {"job_id": job_id, "wait": True}))
            await wait_until(lambda: cast("Any", host.process.waiting)._futures, description="it waits")
        result = await asyncio.wait_for(call, 5)
        gate.set()
        assert result.is_error
        assert "host" in result.text


@pytest.mark.parametrize("ends", ["the session", "the host"])
async def test_reading_notices_ends_with_the_session_or_the_host(fake_server_url: str, ends: str) -> None:
    """P8: nothing would ever ring again."""
    async with fake_app(hello(), url=fake_server_url, worker=False) as kit:
        host = kit.app.host()
        await host.__aenter__()
        session = await host.open_session("another")
        reading = asyncio.ensure_future(all_of(session.notices()))
        await wait_until(lambda: bells_of(host.process.waiting, "another"), description="it waits for the bell")
        if ends == "the session":
            await session.close()
        else:
            await host.__aexit__(None, None, None)
        assert await asyncio.wait_for(reading, 5) == []
        await host.__aexit__(None, None, None)


async def test_a_notice_withdrawn_while_another_is_handled_is_not_given(fake_server_url: str) -> None:
    """Protocol §5: a job that was read is told; its notice must not wake the model for nothing."""
    async with fake_app(hello(), url=fake_server_url) as kit:
        jobs = [job_of(await kit.session.call("subagent", JOB)) for _ in range(3)]
        await wait_until(lambda: _stored(kit, 3), description="all three are announced")
        given: list[str] = []
        others: list[str] = []
        async for notice in kit.session.notices():
            given.append(notice.sender_id)
            if len(given) == 1:
                first, *others = (job for job in jobs if job not in given)
                await kit.session.call("job_output", {"job_id": first})
            else:
                break
        assert given[1:] == others


async def test_notices_older_than_the_retention_are_dropped_from_a_session_that_lives_on(server: str) -> None:
    """P10, field fault 21: a session that never rests would keep every notice for ever."""

    async def make(drive: Drive) -> Any:
        return MadeRun(_done)

    async with driving(server, MadeProvider(make)) as stage:
        notices = stage.keys.notices(OWNER)
        old, young = await _at(stage, -8 * 86_400), await _at(stage, -6 * 86_400)
        for at in (old, young):
            await cast("Any", stage.client.xadd(notices, {"n": "{}"}, id=at))
        await stage.accept("run-1")
        await stage.executor.activate("run-1", stage.queue)
        kept = [entry_id for entry_id, _ in await cast("Any", stage.client.xrange(notices))]
        assert kept[0] == young
        assert len(kept) == 2


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [("job_list", {}), ("job_kill", {"job_id": "a job"}), ("subagent", JOB)],
    ids=["job_list", "job_kill", "a background start"],
)
async def test_every_call_returns_within_its_timeout(
    own_server: EmbeddedServer, tool: str, arguments: dict[str, Any]
) -> None:
    """P8: the stated wait holds for calls that only ask, too."""
    async with fake_app(hello(), url=own_server.url, worker=False, check_leaks=False) as kit:
        own_server.freeze()
        started_at = time.monotonic()
        result = await kit.session.call(tool, arguments, timeout=0.2)
        took_seconds = time.monotonic() - started_at
        own_server.thaw()
    assert result.code == "BROKER_UNAVAILABLE", result
    assert took_seconds < 3


async def test_a_call_repeated_after_an_outage_finds_its_run_alive(own_server: EmbeddedServer) -> None:
    """Decision 1: the repeat re-attaches to the run that an unanswered admission may have started; nobody killed it."""
    async with fake_app(hello(), url=own_server.url, settings={"lease_seconds": 0.6}, check_leaks=False) as kit:
        own_server.freeze()
        unanswered = await kit.session.call("subagent", TASK, call_id="c1", timeout=0.2)
        own_server.thaw()
        repeated = await kit.session.call("subagent", TASK, call_id="c1", timeout=4)
    assert (unanswered.code, repeated.text) == ("BROKER_UNAVAILABLE", "hi there"), repeated


async def test_a_server_that_is_full_is_a_tool_result(own_server: EmbeddedServer) -> None:
    """Design §6: `call` never raises for what a broker does wrong; decision 6."""
    async with fake_app(hello(), url=own_server.url, worker=False, check_leaks=False) as kit:
        # The test's own connection: the app's user may not.
        with redis.Redis.from_url(own_server.url) as client:
            client.config_set("maxmemory", "1")
            result = await kit.session.call("subagent", JOB)
            client.config_set("maxmemory", "0")
    assert result.code == "BROKER_UNAVAILABLE", result
    assert "memory" in result.text


async def test_a_user_that_may_not_is_told_so(own_server: EmbeddedServer) -> None:
    """P13: an ACL too narrow is the operator's to mend, and a tool result all the same (decision 6)."""
    with redis.Redis.from_url(own_server.url) as client:
        client.execute_command("ACL", "SETUSER", "narrow", "on", ">secret", "~*", "&*", "+@all")
        url = own_server.url.replace("redis://", "redis://narrow:secret@")
        async with fake_app(hello(), url=url, worker=False, check_leaks=False) as kit:
            client.execute_command("ACL", "SETUSER", "narrow", "-zadd")
            result = await kit.session.call("subagent", JOB)
            client.execute_command("ACL", "SETUSER", "narrow", "+zadd", "-evalsha")
            other = await kit.session.call("subagent", JOB)
            client.execute_command("ACL", "SETUSER", "narrow", "+@all")
    for refused in (result, other):
        assert refused.code == "BROKER_UNAVAILABLE", refused
        assert "its ACL does not allow this user" in refused.text
        assert "secret" not in refused.text


async def test_a_listing_reads_no_outputs(fake_server_url: str) -> None:
    """P8: a hundred jobs with large outputs would else be a listing that never arrives in time."""
    async with fake_app(hello(), url=fake_server_url) as kit:
        job_id = job_of(await kit.session.call("subagent", JOB))
        await kit.session.call("job_output", {"job_id": job_id, "wait": True})
        record = kit.host.process.keys.session(job_id)
        await cast("Any", kit.redis.hset(record, "outcome", "nobody can read this"))
        listing = await kit.session.call("job_list", {})
        assert not listing.is_error
        assert job_id in listing.text
        assert "completed" in listing.text


def test_a_blocking_reader_of_notices_ends_with_its_session(fake_server_url: str) -> None:
    """P8: the iteration in another thread ends like any other."""
    app = SubagentApp(settings_of(fake_server_url))
    app.add_provider(SpawnProvider(hello()))
    app.add_delegation_tool(provider="spawn")
    read: list[list[Notice]] = []
    with app.sync_host() as host:
        session = host.open_session("another")
        reader = threading.Thread(target=lambda: read.append(list(session.notices())), daemon=True)
        reader.start()
        waiting = cast("Any", host)._host.process.waiting
        deadline = time.monotonic() + 5
        while not bells_of(waiting, "another") and time.monotonic() < deadline:
            reader.join(0.01)
        session.close()
        reader.join(5)
    app.celery.close()
    assert read == [[]]


async def test_a_publisher_never_fails(caplog: pytest.LogCaptureFixture) -> None:
    """P1: the move has accepted the work, whatever the broker's library raises."""

    def send_task(*_: Any, **__: Any) -> None:
        raise RuntimeError("a planted secret")

    publisher = BrokerPublisher(cast("Any", SimpleNamespace(send_task=send_task)), namespace="hosts")
    with caplog.at_level(logging.DEBUG):
        await publisher.publish("run-1", queue="queue", task_id="task")
    assert "the sweeper will" in caplog.text
    assert "secret" not in caplog.text


async def all_of(notices: AsyncIterator[Notice]) -> list[Notice]:
    return [notice async for notice in notices]


def bells_of(waiting: Waiting, session_id: str) -> set[asyncio.Event]:
    return cast("Any", waiting)._bells.get(session_id, set())


def job_of(result: Any) -> str:
    return str(result.value["jobId"])


async def _done() -> Any:
    return done()


async def _stored(kit: Kit, count: int) -> bool:
    return len(await kit.host.process.sessions.notices(kit.session.id, after="0-0")) == count


async def _at(stage: Any, offset_seconds: float) -> str:
    seconds, _ = await stage.client.time()
    return f"{int((int(seconds) + offset_seconds) * 1000)}-0"
