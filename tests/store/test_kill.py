"""Killing: durable, at once where nobody drives, and told to everybody who was not there."""

from __future__ import annotations

import json

from store_kit import OTHER_WORKER, PARENT, RUN, WORKER, Store, celery_state, listening

from subagent_tasks.protocol.records import RunRecord


async def status(store: Store) -> str:
    record = await store.runs.get(RUN)
    assert record is not None
    return record.snapshot().status


async def told(store: Store) -> list[str]:
    """Of which runs the parent has a notice."""
    return [notice.sender_id for notice in await store.sessions.notices(PARENT, after="0-0")]


async def test_a_queued_run_is_settled_by_its_kill(store: Store) -> None:
    """P5, P3: also while no worker runs (field fault 15)."""
    await store.queued()
    assert await store.kill() == "killed"
    assert await status(store) == "killed"
    assert await celery_state(store) == "REVOKED"


async def test_the_message_of_a_killed_run_starts_nothing(store: Store) -> None:
    """P5: it lies in the queue still."""
    await store.queued()
    await store.kill()
    await store.processes.beat(WORKER)
    assert await store.claim() == "settled"


async def test_a_suspended_run_is_settled_by_its_kill(store: Store) -> None:
    """protocol §1: queued and suspended work is settled there."""
    await store.driven()
    await store.set_field("state", "suspended")
    assert await store.kill() == "killed"


async def test_a_kill_of_queued_work_is_published(store: Store) -> None:
    """P3: a waiting host hears of it like of any ending."""
    await store.queued()
    async with listening(store, store.keys.session_channel(PARENT)) as heard:
        await store.kill()
    assert [json.loads(text).get("settled") for _, text in heard] == [None, RUN]


async def test_a_driver_is_rung_once(store: Store) -> None:
    """protocol §2: a kill can arrive many times."""
    await store.driven()
    async with listening(store, store.keys.process_channel(WORKER)) as heard:
        assert await store.kill(kill_id="kill-1") == "requested"
        assert await store.kill(kill_id="kill-2") == "requested"
    assert heard == [(store.keys.process_channel(WORKER), RUN)]


async def test_a_driver_that_missed_the_ring_learns_of_it_by_its_beat(store: Store) -> None:
    """protocol §1: the answer carries the ids that have a flag."""
    await store.driven()
    await store.kill()
    assert (await store.processes.beat(WORKER)).flagged == {RUN}


async def test_a_beat_tells_nobody_of_anothers_kills(store: Store) -> None:
    """protocol §1: ids of this process."""
    await store.driven()
    await store.kill()
    assert (await store.processes.beat(OTHER_WORKER)).flagged == frozenset()


async def test_a_killed_run_is_stopping_until_its_driver_ended_it(store: Store) -> None:
    """protocol §2."""
    lease = await store.driven()
    await store.kill()
    assert await status(store) == "stopping"
    await store.settle(lease, ending=await store.ending(killed="no longer needed"))
    assert await status(store) == "killed"
    assert (await store.processes.beat(WORKER)).flagged == frozenset()


async def test_the_first_reason_stands(store: Store) -> None:
    """protocol §2: the flag is set once."""
    await store.driven()
    await store.kill(kill_id="kill-1", reason="first")
    await store.kill(kill_id="kill-2", reason="second")
    record = await store.runs.get(RUN)
    assert record is not None
    assert (record.kill, record.kill_reason) == ("kill-1", "first")


async def test_a_kill_survives_its_worker(store: Store) -> None:
    """P5: whoever takes the run over sees the flag."""
    await store.orphaned()
    await store.kill()
    await store.processes.beat(OTHER_WORKER)
    record = await store.claim(worker=OTHER_WORKER, claim_id="claim-2")
    assert isinstance(record, RunRecord)
    assert record.kill == "kill-1"
    assert (await store.processes.beat(OTHER_WORKER)).flagged == {RUN}


async def test_a_killed_run_is_not_handed_back(store: Store) -> None:
    """P5: in the queue it would wait for another worker only to be ended; its driver settles it."""
    lease = await store.driven()
    await store.kill()
    assert await store.release(lease) == "stop"
    assert await status(store) == "stopping"


async def test_a_killed_run_of_a_dead_worker_is_not_queued_again(store: Store) -> None:
    """P5: a kill between the sweeper's look and its move."""
    lease = await store.orphaned()
    await store.kill()
    assert await store.reclaim(lease) == "stop"
    assert await store.settle(lease, on_behalf="sweeper") == "settled"


async def test_a_finished_run_cannot_be_killed(store: Store) -> None:
    """Field fault 16: the kill says so, and changes nothing."""
    await store.settled()
    before = await store.dump()
    assert await store.kill() == "already_finished"
    assert await store.dump() == before


async def test_a_stranger_can_kill_nothing(store: Store) -> None:
    """design §6: the caller's session id is checked in the script."""
    await store.queued()
    before = await store.dump()
    assert await store.kill(authority="stranger") == "unauthorized"
    assert await store.dump() == before


async def test_an_operator_may_kill_anything(store: Store) -> None:
    """protocol §1: anyone with authority."""
    await store.queued()
    assert await store.kill(authority="") == "killed"


async def test_a_kill_by_the_owners_model_needs_no_notice(store: Store) -> None:
    """protocol §5: it is marked reported in the same script."""
    await store.queued()
    await store.kill(told="kill")
    assert await told(store) == []


async def test_a_kill_by_the_owners_model_of_driven_work_needs_no_notice(store: Store) -> None:
    """protocol §5: the driver ends it later."""
    lease = await store.driven()
    await store.kill(told="kill")
    await store.settle(lease, ending=await store.ending(killed="no longer needed"))
    assert await told(store) == []


async def test_a_kill_by_anybody_else_is_announced(store: Store) -> None:
    """protocol §5: command line, Flower, a cascade or a lost caller."""
    await store.queued()
    await store.kill(authority="")
    assert await told(store) == [RUN]


async def test_a_completion_that_beat_its_kill_is_announced(store: Store) -> None:
    """protocol §5: the model was told that it is being killed."""
    lease = await store.driven()
    await store.kill(told="kill")
    await store.settle(lease)
    assert await status(store) == "completed"
    assert await told(store) == [RUN]


async def test_a_kill_repeated_after_the_ending_answers_as_before(store: Store) -> None:
    """protocol §1, §5: it was told `requested`, so the ending has not been told yet."""
    lease = await store.driven()
    assert await store.kill(told="kill") == "requested"
    await store.settle(lease)
    assert await store.kill(told="kill") == "requested"
    assert await told(store) == [RUN]


async def test_killing_what_has_finished_withdraws_its_notice(store: Store) -> None:
    """protocol §5: the answer told the model how it ended."""
    await store.settled()
    assert await told(store) == [RUN]
    await store.kill(told="kill")
    assert await told(store) == []
