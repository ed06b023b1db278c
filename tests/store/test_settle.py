"""Settling: everything at once, once, by whoever may."""

from __future__ import annotations

import asyncio
import json

import pytest
from store_kit import NAMESPACE, OTHER_WORKER, PARENT, QUEUE, RUN, WORKER, Store, celery_state, listening

from subagent_tasks.protocol.keys import celery_result_key
from subagent_tasks.protocol.models import Mode
from subagent_tasks.testing import assert_no_leaked_keys, assert_settled


async def test_settling_changes_record_result_and_notice_together(store: Store) -> None:
    """P3."""
    await store.settled()
    record = await store.runs.get(RUN)
    assert record is not None
    assert record.is_settled
    assert record.outcome is not None
    assert record.outcome.text == "done"
    assert await celery_state(store) == "SUCCESS"
    assert [notice.sender_id for notice in await store.sessions.notices(PARENT, after="0-0")] == [RUN]
    assert [event.kind for event in await store.runs.transcript(RUN)] == ["input", "settled"]


async def test_a_settled_run_is_driven_by_nobody(store: Store) -> None:
    """P10: neither lease nor queue entry is left."""
    await store.settled()
    assert await store.processes.driven_by(WORKER) == frozenset()
    assert await store.runs.queued(QUEUE) == []
    assert (await store.processes.beat(WORKER)).driven == frozenset()


@pytest.mark.parametrize("mode", ["foreground", "background"])
async def test_no_key_is_left_without_a_lifetime(store: Store, mode: Mode) -> None:
    """P10: after settling, retention takes everything."""
    await store.settled(mode=mode)
    await store.processes.retire(WORKER, on_behalf="self")
    await store.client.delete(QUEUE)
    await assert_settled(store.client, NAMESPACE)
    await assert_no_leaked_keys(store.client, NAMESPACE)


@pytest.mark.parametrize("mode", ["foreground", "background"])
async def test_a_killed_run_leaves_no_key_without_a_lifetime(store: Store, mode: Mode) -> None:
    """P10: with its prompt still in the inbox."""
    await store.queued(mode=mode)
    assert await store.kill() == "killed"
    await store.client.delete(QUEUE)
    await assert_settled(store.client, NAMESPACE)
    await assert_no_leaked_keys(store.client, NAMESPACE)


async def test_a_run_killed_while_driven_leaves_no_key_without_a_lifetime(store: Store) -> None:
    """P10: the flag goes with the run."""
    lease = await store.driven()
    await store.kill()
    await store.settle(lease)
    await store.client.delete(QUEUE)
    await assert_no_leaked_keys(store.client, NAMESPACE)


async def test_whoever_waits_is_told_when_it_is_true(store: Store) -> None:
    """P3: result, notice and announcement are published by the settling script."""
    lease = await store.driven()
    ending = await store.ending()
    owner = store.keys.session_channel(PARENT)
    async with listening(store, celery_result_key(RUN), owner) as heard:
        await store.settle(lease, ending=ending)
    notice = (await store.sessions.notices(PARENT, after="0-0"))[0]
    assert (celery_result_key(RUN), ending.result) in heard
    assert (owner, ending.announcement) in heard
    assert [json.loads(text)["id"] for channel, text in heard if channel == owner and "notice" in text] == [notice.id]


async def test_the_published_notice_is_the_stored_one(store: Store) -> None:
    """protocol §5: payload = the notice with its stream id."""
    lease = await store.driven()
    async with listening(store, store.keys.session_channel(PARENT)) as heard:
        await store.settle(lease)
    rung = next(json.loads(text) for _, text in heard if "notice" in json.loads(text))
    stored = (await store.sessions.notices(PARENT, after="0-0"))[0]
    assert {**rung["notice"], "id": rung["id"]} == json.loads(stored.to_json())


async def test_a_repeated_settlement_rings_nobody_again(store: Store) -> None:
    """P4: never twice to one reader."""
    lease = await store.driven()
    ending = await store.ending()
    await store.settle(lease, ending=ending)
    async with listening(store, celery_result_key(RUN), store.keys.session_channel(PARENT)) as heard:
        assert await store.settle(lease, ending=ending) == "settled"
    assert heard == []


async def test_a_foreground_ending_has_no_notice(store: Store) -> None:
    """protocol §5: it is told as the call's result."""
    await store.settled(mode="foreground")
    assert await store.sessions.notices(PARENT, after="0-0") == []
    assert await celery_state(store) == "SUCCESS"


async def test_of_two_settlers_one_wins(store: Store) -> None:
    """P3: the driver comes back in the moment the sweeper gives it up."""
    lease = await store.orphaned()
    endings = [await store.ending(settle_id=settler, text=settler) for settler in ("driver:1", "sweeper:1")]
    words = await asyncio.gather(
        store.settle(lease, ending=endings[0]), store.settle(lease, ending=endings[1], on_behalf="sweeper")
    )
    assert sorted(words) == ["already", "settled"]
    record = await store.runs.get(RUN)
    assert record is not None
    assert record.outcome is not None
    assert record.outcome.text == ("driver:1", "sweeper:1")[words.index("settled")]
    assert len(await store.sessions.notices(PARENT, after="0-0")) == 1


async def test_a_later_settlement_changes_nothing(store: Store) -> None:
    """P3: the first outcome wins."""
    lease = await store.settled()
    before = await store.dump()
    assert await store.settle(lease, ending=await store.ending(settle_id="other", text="other")) == "already"
    assert await store.dump() == before


async def test_a_sweeper_cannot_settle_what_a_living_worker_drives(store: Store) -> None:
    """P2: the heartbeat is read again inside the script."""
    lease = await store.driven()
    before = await store.dump()
    assert await store.settle(lease, on_behalf="sweeper") == "stale"
    assert await store.dump() == before


async def test_a_sweeper_settles_what_a_dead_worker_drove(store: Store) -> None:
    """P6."""
    lease = await store.orphaned()
    assert await store.settle(lease, on_behalf="sweeper") == "settled"
    assert await store.processes.driven_by(WORKER) == frozenset()


async def test_another_workers_name_does_not_help(store: Store) -> None:
    """P2: token and worker must both fit."""
    lease = await store.driven()
    stolen = type(lease)(lease.run_id, lease.token, OTHER_WORKER)
    assert await store.settle(stolen) == "stale"


async def test_live_work_has_no_lifetime(store: Store) -> None:
    """protocol §6: nor has its owner."""
    await store.driven()
    for key in (store.keys.session(RUN), store.keys.session(PARENT), store.keys.jobs(PARENT), celery_result_key(RUN)):
        assert not await store.has_lifetime(key)


async def test_an_idle_session_has_a_lifetime(store: Store) -> None:
    """P10: opened and forgotten leaves nothing."""
    await store.sessions.open(PARENT)
    assert await store.has_lifetime(store.keys.session(PARENT))


async def test_settling_gives_everything_a_lifetime(store: Store) -> None:
    """protocol §6: settling sets one lifetime on all keys of the session."""
    keys = store.keys
    await store.settled()
    await store.sessions.acknowledge(PARENT, "main", "1-1")
    session = [keys.session(PARENT), keys.jobs(PARENT), keys.notices(PARENT), keys.cursors(PARENT)]
    for key in [keys.session(RUN), keys.transcript(RUN), celery_result_key(RUN), *session]:
        assert await store.has_lifetime(key), key


async def test_an_accepted_run_takes_its_owners_lifetime_away_again(store: Store) -> None:
    """protocol §6: an accepted move removes it in its script."""
    keys = store.keys
    await store.settled("run-1")
    await store.sessions.acknowledge(PARENT, "main", "1-1")
    await store.admit("run-2")
    for key in [keys.session(PARENT), keys.jobs(PARENT), keys.notices(PARENT), keys.cursors(PARENT)]:
        assert not await store.has_lifetime(key), key


async def test_an_owner_with_other_work_keeps_living(store: Store) -> None:
    """protocol §6: live work has no lifetime."""
    await store.queued("run-2")
    await store.settled("run-1")
    assert not await store.has_lifetime(store.keys.session(PARENT))
    assert await store.has_lifetime(store.keys.session("run-1"))


async def test_a_reopened_session_with_work_keeps_living(store: Store) -> None:
    """protocol §6: reopening is no settlement."""
    await store.queued()
    await store.sessions.open(PARENT)
    assert not await store.has_lifetime(store.keys.session(PARENT))


async def test_record_and_result_expire_together(store: Store) -> None:
    """P3: `AsyncResult` agrees until both expire."""
    await store.settled()
    record_ms = await store.client.pttl(store.keys.session(RUN))
    result_ms = await store.client.pttl(celery_result_key(RUN))
    assert abs(record_ms - result_ms) < 1_000
