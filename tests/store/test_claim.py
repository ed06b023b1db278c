"""Claiming: one driver, a newer token each time, and the marks that tell lost work from waiting work."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

from store_kit import LEASE_MS, OTHER_WORKER, QUEUE, RUN, WORKER, Store

from subagent_tasks.protocol.keys import celery_result_key
from subagent_tasks.protocol.records import RunRecord

NOW_MS = 10**13  # later than any Redis time of these tests


async def test_a_claim_makes_the_worker_the_driver(store: Store) -> None:
    """P2."""
    lease = await store.driven()
    record = await store.runs.get(RUN)
    assert record is not None
    assert (record.state, record.worker, record.token) == ("driven", WORKER, lease.token)
    assert await store.processes.driven_by(WORKER) == {RUN}
    assert await store.runs.queued(QUEUE) == []


async def test_of_many_claims_one_is_granted(store: Store) -> None:
    """P2: a message delivered twice is driven once."""
    await store.queued()
    workers = [f"worker-{n}" for n in range(8)]
    for worker in workers:
        await store.processes.beat(worker)
    answers = await asyncio.gather(*(store.claim(worker=worker, claim_id=worker) for worker in workers))
    assert sum(isinstance(answer, RunRecord) for answer in answers) == 1


async def test_a_living_driver_keeps_its_run(store: Store) -> None:
    """Field fault 1: a second delivery sees a live lease."""
    await store.driven()
    await store.processes.beat(OTHER_WORKER)
    assert await store.claim(worker=OTHER_WORKER, claim_id="claim-2") == "driven"


async def test_the_driver_itself_cannot_claim_twice(store: Store) -> None:
    """P2: a second delivery to the same worker starts no second drive."""
    await store.driven()
    assert await store.claim(worker=WORKER, claim_id="claim-2") == "driven"


async def test_a_silent_worker_can_claim_nothing(store: Store) -> None:
    """protocol §1: only for a worker whose own heartbeat lives."""
    await store.queued()
    assert await store.claim() == "no_heartbeat"
    await store.processes.beat(WORKER)
    await store.age(WORKER)
    assert await store.claim() == "no_heartbeat"


async def test_a_dead_drivers_run_is_taken_over_as_a_further_attempt(store: Store) -> None:
    """protocol §3: attempts count takings from a dead worker; P2: with a newer token."""
    lease = await store.orphaned()
    await store.processes.beat(OTHER_WORKER)
    record = await store.claim(worker=OTHER_WORKER, claim_id="claim-2")
    assert isinstance(record, RunRecord)
    assert (record.attempt, record.worker) == (1, OTHER_WORKER)
    assert record.token > lease.token


async def test_a_run_handed_back_is_no_further_attempt(store: Store) -> None:
    """protocol §3: only takings from a dead worker count."""
    await store.release(await store.driven())
    record = await store.claim(claim_id="claim-2")
    assert isinstance(record, RunRecord)
    assert record.attempt == 0


async def test_each_claim_raises_the_token(store: Store) -> None:
    """P2: the newest fencing token."""
    first = await store.driven()
    await store.release(first)
    record = await store.claim(claim_id="claim-2")
    assert isinstance(record, RunRecord)
    assert record.token > first.token


async def test_the_start_is_the_first_claim(store: Store) -> None:
    """behaviour §3.4: a run does not start anew when it is resumed."""
    lease = await store.driven()
    await store.set_field("started_at", 5)
    await store.release(lease)
    record = await store.claim(claim_id="claim-2")
    assert isinstance(record, RunRecord)
    assert record.started_at == 5


async def test_a_driven_run_is_started_for_celery(store: Store) -> None:
    """protocol §2: a stray `revoke` must not store REVOKED over it."""
    await store.driven()
    result = json.loads(cast("str", await store.client.get(celery_result_key(RUN))))
    assert (result["status"], result["task_id"]) == ("STARTED", RUN)


async def test_a_newer_record_is_left_to_newer_workers(store: Store) -> None:
    """Upgrades: an older worker changes nothing of it."""
    await store.queued()
    await store.processes.beat(WORKER)
    await store.set_field("version", 99)
    assert await store.claim() == "unsupported"
    assert [run_id for run_id, _ in await store.runs.queued(QUEUE)] == [RUN]


async def claim_queued_at(store: Store, run_id: str, since_ms: int) -> None:
    """Admit a run, date its queueing, and claim it."""
    await store.queued(run_id)
    await store.client.zadd(store.keys.queued(QUEUE), {run_id: since_ms})
    await store.processes.beat(WORKER)
    assert isinstance(await store.claim(run_id, claim_id=run_id), RunRecord)


async def date_last_mark(store: Store, *, age_ms: int) -> None:
    """Let the newest high-water mark be that old."""
    now_ms = await redis_time_ms(store)
    await cast("Any", store.client.hset(store.keys.overtaken(QUEUE), "at", now_ms - age_ms))


async def redis_time_ms(store: Store) -> int:
    seconds, micros = await store.client.time()
    return seconds * 1000 + micros // 1000


async def test_an_unused_queue_has_no_mark(store: Store) -> None:
    """Nothing was overtaken."""
    assert await store.runs.overtaken_before_ms(QUEUE, now_ms=NOW_MS) == 0


async def test_a_claim_of_a_moment_ago_marks_nothing_yet(store: Store) -> None:
    """protocol §4: claimed more than `slack` ago; a neighbour's message may still be on its way."""
    await claim_queued_at(store, "run-1", 500)
    assert await store.runs.overtaken_before_ms(QUEUE, now_ms=await redis_time_ms(store)) == 0


async def test_a_claim_older_than_the_slack_marks_what_was_queued_before(store: Store) -> None:
    """protocol §4."""
    await claim_queued_at(store, "run-1", 500)
    await date_last_mark(store, age_ms=2 * LEASE_MS)
    assert await store.runs.overtaken_before_ms(QUEUE, now_ms=await redis_time_ms(store)) == 500


async def test_marks_survive_further_claims(store: Store) -> None:
    """protocol §4: in a busy queue the newest mark is always young, and older ones must count."""
    await claim_queued_at(store, "run-1", 500)
    await date_last_mark(store, age_ms=LEASE_MS)
    await claim_queued_at(store, "run-2", 700)
    await date_last_mark(store, age_ms=LEASE_MS)
    await claim_queued_at(store, "run-3", 900)
    assert await store.runs.overtaken_before_ms(QUEUE, now_ms=await redis_time_ms(store)) == 500


async def test_a_mark_never_falls(store: Store) -> None:
    """Work that was queued again is younger than what is claimed after it."""
    await claim_queued_at(store, "run-1", 900)
    await claim_queued_at(store, "run-2", 500)
    await date_last_mark(store, age_ms=2 * LEASE_MS)
    assert await store.runs.overtaken_before_ms(QUEUE, now_ms=await redis_time_ms(store)) == 900


async def test_a_takeover_marks_nothing(store: Store) -> None:
    """What was not taken from the queue says nothing about the queue."""
    await store.orphaned()
    before = await cast("Any", store.client.hgetall(store.keys.overtaken(QUEUE)))
    await store.processes.beat(OTHER_WORKER)
    await store.claim(worker=OTHER_WORKER, claim_id="claim-2")
    assert await cast("Any", store.client.hgetall(store.keys.overtaken(QUEUE))) == before


async def test_what_listeners_are_told_of_stays_one_until_a_worker_is_lost(store: Store) -> None:
    """behaviour §10.192: handed back, the run goes on; after a loss nobody knows what was told, so it begins anew."""
    lease = await store.driven()
    assert await store.runs.release(lease, queue=QUEUE, message="m", is_told=True) == "released"
    second = await store.claim(claim_id="claim-2")
    assert isinstance(second, RunRecord)
    await store.age(WORKER)
    await store.processes.beat(OTHER_WORKER)
    third = await store.claim(worker=OTHER_WORKER, claim_id="claim-3")
    assert isinstance(third, RunRecord)
    assert (second.episode, third.episode) == ("claim-1", "claim-3")
