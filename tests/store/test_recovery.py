"""Handing back, taking from the dead, sending lost messages again, forgetting what expired."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any, cast

from store_kit import HOST, LEASE_MS, NAMESPACE, OTHER_WORKER, PARENT, QUEUE, RUN, WORKER, Store

from broker_config import BrokerSettings
from subagent_tasks.execution import Executor
from subagent_tasks.protocol.ports import Ids
from subagent_tasks.protocol.records import RunRecord
from subagent_tasks.queue.publisher import ScriptPublisher
from subagent_tasks.settling import Settler
from subagent_tasks.store.runs import Lease
from subagent_tasks.sweeper import Sweeper, Swept
from subagent_tasks.testing import wait_until
from subagent_tasks.toolbox import Toolbox

SETTINGS = BrokerSettings(namespace=NAMESPACE, lease_seconds=LEASE_MS / 1000)
IDS = Ids(new=lambda: "fresh-id", now_iso=lambda: "2030-01-01T00:00:00+00:00")


def settler(store: Store) -> Settler:
    return Settler(runs=store.runs, publisher=ScriptPublisher(), settings=SETTINGS, ids=IDS)


async def sweep(store: Store) -> Swept:
    """One sweep of a living host, right now."""
    sweeper = Sweeper(
        runs=store.runs,
        processes=store.processes,
        settler=settler(store),
        publisher=ScriptPublisher(),
        settings=SETTINGS,
        process_id=HOST,
        ids=IDS,
        queues=[QUEUE],
    )
    await store.may_sweep()
    return await sweeper.sweep_once()


async def date_queueing(store: Store, since_ms: int, run_id: str = RUN) -> None:
    await store.client.zadd(store.keys.queued(QUEUE), {run_id: since_ms})


async def test_a_run_handed_back_waits_in_the_queue_with_a_message(store: Store) -> None:
    """protocol §1: back to `queued`, token + 1, Celery message."""
    lease = await store.driven()
    assert await store.release(lease) == "released"
    record = await store.runs.get(RUN)
    assert record is not None
    assert (record.state, record.worker, record.token) == ("queued", "", lease.token + 1)
    assert await store.processes.driven_by(WORKER) == frozenset()
    assert await store.messages() == [f"message of {RUN}", "message after a release"]


async def test_a_repeated_release_does_not_take_the_run_from_the_next_driver(store: Store) -> None:
    """protocol §1: the reply came late, and by then another worker had claimed."""
    lease = await store.driven()
    await store.release(lease)
    await store.processes.beat(OTHER_WORKER)
    assert isinstance(await store.claim(worker=OTHER_WORKER, claim_id="claim-2"), RunRecord)
    assert await store.release(lease) == "released"
    assert await store.field("worker") == OTHER_WORKER


async def test_a_dead_workers_run_is_queued_again_as_a_further_attempt(store: Store) -> None:
    """P6, protocol §1: token + 1, attempt + 1."""
    lease = await store.orphaned()
    assert await store.reclaim(lease) == "requeued"
    record = await store.runs.get(RUN)
    assert record is not None
    assert (record.state, record.token, record.attempt) == ("queued", lease.token + 1, 1)
    assert await store.messages() == [f"message of {RUN}", "message after a loss"]


async def test_a_living_workers_run_is_not_taken(store: Store) -> None:
    """P2: the sweeper looked a moment before the beat came."""
    lease = await store.orphaned()
    await store.processes.beat(WORKER)
    assert await store.reclaim(lease) == "not_driven"
    assert await store.field("worker") == WORKER


async def test_a_run_claimed_anew_by_the_same_worker_is_not_taken(store: Store) -> None:
    """P2: the token tells the drives apart."""
    lease = await store.driven()
    await store.release(lease)
    assert isinstance(await store.claim(claim_id="claim-2"), RunRecord)
    await store.age(WORKER)
    assert await store.reclaim(lease) == "not_driven"
    assert await store.processes.driven_by(WORKER) == {RUN}


async def test_a_repeated_reclaim_does_not_count_twice(store: Store) -> None:
    """protocol §1."""
    lease = await store.orphaned()
    await store.reclaim(lease)
    await store.processes.beat(OTHER_WORKER)
    assert isinstance(await store.claim(worker=OTHER_WORKER, claim_id="claim-2"), RunRecord)
    assert await store.reclaim(lease) == "requeued"
    assert await store.field("attempt") == "1"
    assert await store.field("worker") == OTHER_WORKER


async def test_what_a_takeover_left_behind_is_cleared(store: Store) -> None:
    """P10: the dead worker's set names a run that another drives."""
    await store.orphaned()
    await store.processes.beat(OTHER_WORKER)
    await store.claim(worker=OTHER_WORKER, claim_id="claim-2")
    await sweep(store)
    assert await store.processes.driven_by(WORKER) == frozenset()
    assert await store.field("worker") == OTHER_WORKER


async def test_a_lost_message_is_sent_again(store: Store) -> None:
    """P1: queued, and its queue is empty."""
    await store.queued()
    await store.client.delete(QUEUE)
    await date_queueing(store, 1_000)
    assert (await sweep(store)).republished == 1
    assert len(await store.messages()) == 1


async def test_an_overtaken_message_is_sent_again(store: Store) -> None:
    """protocol §4: something queued later was claimed more than the slack ago."""
    await store.queued("run-1")
    await date_queueing(store, 1_000, "run-1")
    await store.driven("run-2")
    await cast("Any", store.client.hset(store.keys.overtaken(QUEUE), "at", 1))
    assert (await sweep(store)).republished == 1
    assert len(await store.messages()) == 3


async def test_work_that_merely_waits_is_not_sent_again(store: Store) -> None:
    """protocol §4: however long; its message lies in the queue."""
    await store.queued()
    await date_queueing(store, 1_000)
    assert (await sweep(store)).republished == 0


async def test_work_queued_a_moment_ago_is_not_sent_again(store: Store) -> None:
    """protocol §4: a worker holds its message and claims in a moment."""
    await store.queued()
    await store.client.delete(QUEUE)
    assert (await sweep(store)).republished == 0


async def test_a_message_sent_again_waits_anew(store: Store) -> None:
    """Each sweep would send another one."""
    await store.queued()
    await store.client.delete(QUEUE)
    await date_queueing(store, 1_000)
    await sweep(store)
    await store.client.delete(QUEUE)
    assert (await sweep(store)).republished == 0


async def test_queued_work_whose_record_was_removed_is_looked_for_once(store: Store) -> None:
    """P10: without a record nothing is left to be found, and every sweep would look again."""
    await store.queued()
    await store.client.delete(QUEUE, store.keys.session("run-1"))
    await date_queueing(store, 1_000)
    assert (await sweep(store)).republished == 0
    assert await store.client.exists(store.keys.queued(QUEUE)) == 0


async def test_what_was_claimed_meanwhile_is_not_sent_again(store: Store) -> None:
    """protocol §4: each item is its own move."""
    await store.driven()
    word = await store.runs.republish(RUN, queue=QUEUE, since_ms=1_000, message="sent again")
    assert word == "moved_on"
    assert await store.messages() == [f"message of {RUN}"]


async def test_a_sweep_queues_a_dead_workers_run_and_forgets_the_worker(store: Store) -> None:
    """P6."""
    await store.orphaned()
    swept = await sweep(store)
    assert (swept.ran, swept.requeued, swept.settled) == (True, 1, 0)
    assert set(await store.processes.alive()) == {HOST}


async def test_poisoned_work_ends_as_failed(store: Store) -> None:
    """P6: never loops."""
    await store.orphaned()
    await store.set_field("attempt", 2)
    assert (await sweep(store)).settled == 1
    record = await store.runs.get(RUN)
    assert record is not None
    assert record.outcome is not None
    assert (record.outcome.status, record.outcome.detail) == ("failed", "worker lost")


async def test_a_killed_run_of_a_dead_worker_ends_as_killed(store: Store) -> None:
    """P5, P6: no other worker is needed."""
    await store.orphaned()
    await store.kill(reason="enough")
    assert (await sweep(store)).settled == 1
    record = await store.runs.get(RUN)
    assert record is not None
    assert record.snapshot().status == "killed"


async def test_a_newer_run_does_not_keep_the_others_from_recovery(store: Store) -> None:
    """Upgrades: an older sweeper leaves it to a newer one and goes on."""
    await store.driven("run-1")
    await store.driven("run-2")
    await store.age(WORKER)
    await store.set_field("version", 99, "run-1")
    assert (await sweep(store)).requeued == 1
    assert await store.field("state", "run-2") == "queued"
    assert await store.processes.driven_by(WORKER) == {"run-1"}


async def test_an_expired_job_leaves_its_owners_list(store: Store) -> None:
    """P10: the index of a session that lives on does not grow for ever."""
    await store.settled()
    await store.client.delete(store.keys.session(RUN))
    await store.client.zadd(store.keys.expiring, {json.dumps([PARENT, RUN]): 1})
    assert (await sweep(store)).forgotten == 1
    assert await store.client.zcard(store.keys.expiring) == 0
    assert await store.client.zcard(store.keys.jobs(PARENT)) == 0


async def test_a_job_whose_id_was_used_again_stays_in_the_list(store: Store) -> None:
    """protocol §3: the same call after the retention is a new run, and no sweep may hide it."""
    await store.settled()
    await store.client.delete(store.keys.session(RUN))
    await store.client.zadd(store.keys.expiring, {json.dumps([PARENT, RUN]): 1})
    assert (await store.admit()).state == "queued"
    await sweep(store)
    assert [job.id for job in await store.runs.jobs(PARENT)] == [RUN]


async def test_a_lease_of_nobody_takes_nothing(store: Store) -> None:
    """How a sweeper clears what a takeover left: it must not take the run of a worker that claimed it meanwhile."""
    lease = await store.driven()
    assert await store.reclaim(Lease(RUN, -1, WORKER)) == "not_driven"
    assert await store.settle(lease) == "settled"


def executor(store: Store) -> Executor:
    """The driver of the worker's process; it remembers no drive."""
    return Executor(
        runs=store.runs,
        providers={},
        tools_of=lambda _: nullcontext(Toolbox()),
        settler=settler(store),
        publisher=ScriptPublisher(),
        settings=SETTINGS,
        process_id=WORKER,
        ids=IDS,
    )


async def beat_twice(store: Store, driver: Executor) -> None:
    """A difference must stand for two beats."""
    for _ in range(2):
        answer = await store.processes.beat(WORKER)
        driver.on_beat(flagged=answer.flagged, driven=answer.driven)


async def test_a_claim_that_nobody_remembers_is_handed_back(store: Store) -> None:
    """protocol §4: the answer to the claim was lost for good."""
    await store.driven()
    driver = executor(store)
    await beat_twice(store, driver)

    async def is_queued() -> bool:
        return await store.field("state") == "queued"

    await wait_until(is_queued, description="the run is back in the queue")


async def test_a_claim_that_nobody_remembers_ends_if_it_was_killed(store: Store) -> None:
    """P5: without waiting for another worker."""
    await store.driven()
    await store.kill(reason="enough")
    driver = executor(store)
    await beat_twice(store, driver)

    async def is_settled() -> bool:
        return await store.field("state") == "settled"

    await wait_until(is_settled, description="the run is settled")
    assert await store.field("status") == "killed"


async def test_a_worker_that_came_back_clears_what_was_taken_from_it(store: Store) -> None:
    """P10: it lives, so no sweeper would; and it could never leave while its set names anything."""
    await store.orphaned()
    await store.processes.beat(OTHER_WORKER)
    await store.claim(worker=OTHER_WORKER, claim_id="claim-2")
    driver = executor(store)
    await beat_twice(store, driver)

    async def drives_nothing() -> bool:
        return await store.processes.driven_by(WORKER) == frozenset()

    await wait_until(drives_nothing, description="the worker's set is empty")
    assert await store.field("worker") == OTHER_WORKER
