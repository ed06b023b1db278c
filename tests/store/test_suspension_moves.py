"""Runs with runs of their own (protocol §1, §3): suspending, waking, cascading, holding, and what a child admits."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from store_kit import (
    HOST,
    LEASE_MS,
    NAMESPACE,
    OTHER_HOST,
    OTHER_WORKER,
    OWN_RUN,
    PARENT,
    QUEUE,
    RUN,
    WORKER,
    Store,
    celery_state,
)

from subagent_tasks.protocol.interfaces import NewEvent
from subagent_tasks.protocol.models import Mode
from subagent_tasks.protocol.records import RunRecord
from subagent_tasks.store.runs import Lease
from subagent_tasks.testing import assert_no_leaked_keys, assert_settled

SECOND, THIRD = "own-run-2", "own-run-3"
WAKING = "message after waking"


async def started(store: Store, *own_runs: str, mode: Mode = "foreground") -> Lease:
    """A driven run that has started these runs of its own."""
    lease = await store.driven()
    for own_run in own_runs:
        assert (await store.admit(own_run, owner=RUN, mode=mode, token=lease.token)).word == "accepted"
    return lease


async def waiting(store: Store, *own_runs: str, wake_at: int = 0) -> Lease:
    """A run that is suspended until no more than `wake_at` of these runs of its own are unsettled."""
    lease = await started(store, *own_runs)
    assert await store.suspend(lease, *own_runs, wake_at=wake_at) == "suspended"
    return lease


async def end(store: Store, own_run: str = OWN_RUN) -> str:
    """Drive an own run to its end."""
    record = await store.claim(own_run, claim_id=f"claim of {own_run}")
    assert isinstance(record, RunRecord), record
    return await store.settle(Lease(own_run, record.token, WORKER))


async def members(store: Store, key: str) -> set[str]:
    return cast("set[str]", await cast("Any", store.client.smembers(key)))


async def alarms(store: Store) -> dict[str, int]:
    found = cast("list[tuple[str, float]]", await store.client.zrange(store.keys.alarms, 0, -1, withscores=True))
    return {run_id: int(at_ms) for run_id, at_ms in found}


async def is_queued(store: Store) -> bool:
    """Whether the run waits in the queue, and its last message says so."""
    waits = RUN in [run_id for run_id, _ in await store.runs.queued(QUEUE)]
    assert waits == (await store.field("state") == "queued") == ((await store.messages())[-1] == WAKING)
    return waits


# Suspending.


async def test_a_suspended_run_is_nobody_s(store: Store) -> None:
    """protocol §1: it leaves the driven state; the next driver gets a newer token."""
    lease = await store.suspended()
    record = await store.runs.get(RUN)
    assert record is not None
    assert (record.state, record.worker, record.token) == ("suspended", "", lease.token + 1)
    assert await store.processes.driven_by(WORKER) == frozenset()


async def test_waiting_counts_as_progress(store: Store) -> None:
    """protocol §3: attempts return to 0 with each committed step."""
    lease = await store.delegating()
    await store.set_field("attempt", 2)
    await store.suspend(lease)
    assert await store.field("attempt") == "0"


async def test_a_suspended_run_is_running_for_everybody_else(store: Store) -> None:
    """protocol §2: in the listing and for plain Celery."""
    await store.suspended()
    assert [(job.id, job.status) for job in await store.runs.jobs(PARENT)] == [(RUN, "running")]
    assert await celery_state(store) == "STARTED"


async def test_only_what_is_unsettled_is_waited_for(store: Store) -> None:
    """protocol §3: what has ended meanwhile will not end again."""
    lease = await started(store, OWN_RUN, SECOND)
    await end(store)
    assert await store.suspend(lease, OWN_RUN, SECOND) == "suspended"
    assert await members(store, store.keys.awaited(RUN)) == {SECOND}


async def test_unknown_and_foreign_runs_are_not_waited_for(store: Store) -> None:
    """protocol §3: nothing would ever wake the run for them."""
    lease = await store.delegating()
    assert (await store.admit("run-2")).word == "accepted"
    assert await store.suspend(lease, OWN_RUN, "run-2", "unknown") == "suspended"
    assert await members(store, store.keys.awaited(RUN)) == {OWN_RUN}


async def test_a_run_that_could_only_wait_for_others_runs_goes_on(store: Store) -> None:
    """protocol §3: nothing that it waits for is its own."""
    lease = await store.delegating()
    assert (await store.admit("run-2")).word == "accepted"
    assert await store.suspend(lease, "run-2", "unknown") == "go_on"


async def test_the_transcript_says_what_was_waited_for(store: Store) -> None:
    """protocol §3: whoever reads the story sees why nothing happened for so long."""
    await waiting(store, OWN_RUN, SECOND)
    (event,) = await store.runs.transcript(RUN)
    assert (event.kind, event.data) == ("suspended", {"awaited": [OWN_RUN, SECOND]})


async def test_the_alarm_is_kept_beside_the_others(store: Store) -> None:
    """protocol §3: when the run goes on at the latest."""
    await store.suspended(alarm_ms=1_234)
    assert await alarms(store) == {RUN: 1_234}


@pytest.mark.parametrize("ended", [1, 2])
async def test_a_run_whose_wait_is_over_is_not_suspended(store: Store, ended: int) -> None:
    """protocol §1: `go_on` when no more than `wake_at` are unsettled; nothing was changed."""
    lease = await started(store, OWN_RUN, SECOND)
    for own_run in (OWN_RUN, SECOND)[:ended]:
        await end(store, own_run)
    before = await store.dump()
    assert await store.suspend(lease, OWN_RUN, SECOND, wake_at=1) == "go_on"
    assert await store.dump() == before


async def test_a_killed_run_is_not_suspended(store: Store) -> None:
    """P5: suspended, it would have to be woken only to be ended."""
    lease = await store.delegating()
    await store.kill()
    before = await store.dump()
    assert await store.suspend(lease) == "stop"
    assert await store.dump() == before


async def test_only_the_driver_suspends_a_run(store: Store) -> None:
    """P2: one whose token or transcript is old changes nothing."""
    lease = await store.delegating()
    before = await store.dump()
    assert await store.suspend(Lease(RUN, lease.token - 1, WORKER)) == "stale"
    assert await store.runs.suspend(lease, seq=7, awaited=[OWN_RUN], wake_at=0, alarm_ms=1) == "stale"
    assert await store.dump() == before


async def test_the_driver_that_suspended_a_run_drives_it_no_more(store: Store) -> None:
    """P2: whatever it still writes is refused."""
    lease = await store.suspended()
    before = await store.dump()
    assert await store.runs.append(lease, seq=1, purpose="record", events=[]) == "stale"
    assert await store.runs.take(lease, seq=1, step="later") == "stale"
    assert await store.release(lease) == "stale"
    assert await store.settle(lease) == "stale"
    assert (await store.admit(SECOND, owner=RUN, token=lease.token)).word == "stale"
    assert await store.dump() == before


async def test_a_suspended_run_cannot_be_claimed(store: Store) -> None:
    """protocol §2: a message that came twice finds nothing to do."""
    await store.suspended()
    before = await store.dump()
    assert await store.claim(claim_id="claim-2") == "suspended"
    assert await store.dump() == before


# Waking by an ending.


async def test_the_last_ending_queues_the_run(store: Store) -> None:
    """protocol §3: in the settling step, with its Celery message."""
    await waiting(store, OWN_RUN, SECOND)
    await end(store)
    assert not await is_queued(store)
    await end(store, SECOND)
    assert await is_queued(store)
    assert (await store.messages()).count(WAKING) == 1


async def test_a_run_with_calls_behind_is_queued_by_the_first_ending(store: Store) -> None:
    """Behaviour §7: a settlement starts the next; it said how many may be unsettled still."""
    await waiting(store, OWN_RUN, SECOND, THIRD, wake_at=2)
    await end(store, SECOND)
    assert await is_queued(store)


async def test_a_woken_run_leaves_nothing_of_its_waiting(store: Store) -> None:
    """P10: though some of what it waited for is unsettled."""
    await waiting(store, OWN_RUN, SECOND, wake_at=1)
    await end(store)
    assert await store.client.exists(store.keys.awaited(RUN), store.keys.alarms) == 0


async def test_a_woken_run_is_not_woken_again(store: Store) -> None:
    """P2: the other ending finds it queued."""
    await waiting(store, OWN_RUN, SECOND, wake_at=1)
    await end(store)
    before = await store.messages()
    await end(store, SECOND)
    assert await store.messages() == before


async def test_an_ending_does_not_disturb_a_driven_owner(store: Store) -> None:
    """protocol §3: it waits in process, or not at all."""
    await store.delegating()
    before = await store.messages()
    await end(store)
    assert (await store.field("state"), await store.messages()) == ("driven", before)


async def test_an_ending_that_nobody_waits_for_wakes_nobody(store: Store) -> None:
    """protocol §3: a job of the run ends while it waits for something else."""
    lease = await started(store, OWN_RUN, SECOND)
    await store.suspend(lease, OWN_RUN)
    await end(store, SECOND)
    assert not await is_queued(store)


async def test_killing_what_is_waited_for_wakes_the_run(store: Store) -> None:
    """P5: queued work is settled by its kill, and its owner goes on."""
    await store.suspended()
    assert await store.kill(OWN_RUN, authority=RUN) == "killed"
    assert await is_queued(store)


async def test_giving_up_what_is_waited_for_wakes_the_run(store: Store) -> None:
    """P6: the sweeper settles for a dead driver."""
    lease = await store.own_run_driven()
    await store.age(WORKER)
    assert await store.settle(lease, on_behalf="sweeper") == "settled"
    assert await is_queued(store)


async def test_with_another_broker_the_message_is_the_caller_s_to_send(store: Store) -> None:
    """protocol §1: the script pushes none, and the answer says that the owner was queued."""
    lease = await store.own_run_driven()
    record = await store.runs.get(OWN_RUN)
    assert record is not None
    before = await store.messages()
    ended = await store.runs.settle(record, lease, on_behalf="driver", ending=await store.ending(OWN_RUN))
    assert (ended.wakes_owner, await store.field("state"), await store.messages()) == (True, "queued", before)


async def test_a_woken_run_goes_on_as_the_same_episode(store: Store) -> None:
    """Behaviour §9: its beginning was told; a run taken from the dead begins anew."""
    await store.suspended()
    episode = await store.field("episode")
    await end(store)
    assert isinstance(await store.claim(claim_id="claim-2"), RunRecord)
    assert await store.field("episode") == episode
    await store.age(WORKER)
    await store.processes.beat(OTHER_WORKER)
    assert isinstance(await store.claim(worker=OTHER_WORKER, claim_id="claim-3"), RunRecord)
    assert await store.field("episode") == "claim-3"


# Waking by the alarm.


async def wake(store: Store, alarm_ms: int) -> str:
    return await store.runs.wake(RUN, queue=QUEUE, alarm_ms=alarm_ms, message=WAKING)


async def test_the_alarm_queues_the_run_whatever_it_waits_for(store: Store) -> None:
    """P8: a wait ends when it was said to."""
    await store.suspended(alarm_ms=1_000)
    assert await wake(store, 1_000) == "woken"
    assert await is_queued(store)
    assert await store.client.exists(store.keys.awaited(RUN), store.keys.alarms) == 0


async def test_an_ending_behind_the_alarm_queues_the_run_no_second_time(store: Store) -> None:
    """P2: it is queued already."""
    await store.suspended(alarm_ms=1_000)
    await wake(store, 1_000)
    before = await store.messages()
    await end(store)
    assert await store.messages() == before


async def test_an_earlier_alarm_does_not_wake(store: Store) -> None:
    """protocol §1: the sweeper saw the alarm of a suspension before this one."""
    await store.suspended(alarm_ms=2_000)
    before = await store.dump()
    assert await wake(store, 1_000) == "moved_on"
    assert await store.dump() == before


async def test_an_alarm_that_was_left_behind_is_dropped(store: Store) -> None:
    """P10: the run it names is gone; without this every sweep would find it."""
    await store.client.zadd(store.keys.alarms, {RUN: 1_000})
    assert await wake(store, 1_000) == "moved_on"
    assert await alarms(store) == {}


async def test_a_run_suspended_again_is_woken_again_by_the_same_alarm(store: Store) -> None:
    """P8: its limit stays where it is; a clock that was set back brings the run there twice."""
    await store.suspended(alarm_ms=1_000)
    await wake(store, 1_000)
    record = await store.claim(claim_id="claim-2")
    assert isinstance(record, RunRecord)
    lease = Lease(RUN, record.token, WORKER)
    assert await store.runs.suspend(lease, seq=1, awaited=[OWN_RUN], wake_at=0, alarm_ms=1_000) == "suspended"
    assert await wake(store, 1_000) == "woken"
    assert await is_queued(store)


async def test_a_sweep_learns_of_alarms_that_are_due(store: Store) -> None:
    """protocol §4: by Redis time, and of no others."""
    await store.suspended(alarm_ms=1_000)
    await store.client.zadd(store.keys.alarms, {"later": 10**15})
    await store.may_sweep()
    sweep = await store.processes.guard(HOST, hold_ms=60_000)
    assert sweep is not None
    assert sweep.alarms == ((RUN, 1_000),)


# Killing and cascading.


async def test_a_killed_run_leaves_nothing_of_its_waiting(store: Store) -> None:
    """P5, P10: suspended work is settled by the kill."""
    await store.suspended()
    assert await store.kill() == "killed"
    assert await store.client.exists(store.keys.awaited(RUN), store.keys.alarms) == 0


async def test_what_ends_behind_its_owner_wakes_nobody(store: Store) -> None:
    """P3: a settled owner stays settled."""
    await store.suspended()
    await store.kill()
    before = await store.messages()
    assert await store.kill(OWN_RUN, authority="") == "killed"
    assert (await store.field("state"), await store.messages()) == ("settled", before)


async def test_what_ends_with_unsettled_runs_of_its_own_is_to_be_walked(store: Store) -> None:
    """protocol §3: whatever ends a child ends its unsettled jobs; durable, so that any process can walk."""
    lease = await started(store, OWN_RUN, mode="background")
    assert await store.settle(lease) == "settled"
    assert await members(store, store.keys.cascade) == {RUN}


async def test_a_kill_of_a_suspended_run_is_to_be_walked(store: Store) -> None:
    """P5: cascades to descendants of the killed run."""
    await store.suspended()
    await store.kill()
    assert await members(store, store.keys.cascade) == {RUN}


async def test_a_kill_of_a_driven_run_is_to_be_walked_before_its_driver_notices(store: Store) -> None:
    """P5: a dead driver would keep what it had started alive for a lease."""
    await store.delegating()
    assert await store.kill() == "requested"
    assert await members(store, store.keys.cascade) == {RUN}


async def test_what_owns_nothing_unsettled_is_not_to_be_walked(store: Store) -> None:
    """P10: nothing to do, nothing to keep."""
    lease = await store.delegating()
    await end(store)
    await store.settle(lease)
    assert await store.client.exists(store.keys.cascade) == 0


async def test_a_walk_ends_once_nothing_is_unsettled(store: Store) -> None:
    """protocol §3: what is driven still needs another look, unless its own ending is the last."""
    lease = await store.delegating()
    record = await store.claim(OWN_RUN)
    assert isinstance(record, RunRecord)
    await store.settle(lease)
    assert await store.kill(OWN_RUN, authority="") == "requested"
    assert await store.runs.cascaded(RUN) == "not_yet"
    assert await store.settle(Lease(OWN_RUN, record.token, WORKER)) == "settled"
    assert await store.client.exists(store.keys.cascade) == 0
    assert await store.runs.cascaded(RUN) == "done"


async def grown(store: Store) -> tuple[Lease, Lease]:
    """RUN drives OWN_RUN, which drives SECOND and has THIRD in the queue; then RUN is killed. The leases of the two."""
    await started(store, OWN_RUN)
    own = await claimed(store, OWN_RUN)
    for run_id in (SECOND, THIRD):
        assert (await store.admit(run_id, owner=OWN_RUN, token=own.token)).word == "accepted"
    below = await claimed(store, SECOND)
    assert await store.kill() == "requested"
    return own, below


async def claimed(store: Store, run_id: str) -> Lease:
    record = await store.claim(run_id, claim_id=f"claim of {run_id}")
    assert isinstance(record, RunRecord), record
    return Lease(run_id, record.token, WORKER)


async def test_nothing_is_claimed_below_a_killed_run(store: Store) -> None:
    """P5: before the walk has come to it, and however deep; a slot that the walk frees is no way out."""
    await grown(store)
    assert await store.claim(THIRD) == "ended_above"
    assert await store.field("state", THIRD) == "queued"


async def test_no_effect_starts_below_a_killed_run(store: Store) -> None:
    """P5: exact: no tool, no model request and no run of its own, from the kill on."""
    own, below = await grown(store)
    assert await store.runs.append(below, seq=0, purpose="announce", events=[]) == "stop"
    assert await store.runs.take(below, seq=0, step="later") == "stop"
    assert (await store.admit("deeper", owner=SECOND, token=below.token)).word == "stop"
    assert (await store.admit("beside", owner=OWN_RUN, token=own.token)).word == "stop"


async def test_what_was_under_way_below_a_killed_run_may_still_be_written_down(store: Store) -> None:
    """P7: what has happened is on record."""
    _, below = await grown(store)
    result = NewEvent("tool_result", {"tool_call_id": "c1"})
    assert await store.runs.append(below, seq=0, purpose="record", events=[result]) == 1


async def test_a_kill_stops_nothing_beside_or_above(store: Store) -> None:
    """P5: siblings and owners go on."""
    lease = await started(store, OWN_RUN, SECOND)
    own = await claimed(store, OWN_RUN)
    assert (await store.admit(THIRD, owner=OWN_RUN, token=own.token)).word == "accepted"
    assert await store.kill(OWN_RUN, authority="") == "requested"
    assert isinstance(await store.claim(SECOND), RunRecord)
    assert await store.runs.append(lease, seq=0, purpose="announce", events=[]) == 0


async def test_a_sweep_learns_of_walks_that_were_not_ended(store: Store) -> None:
    """P5: whoever began may be dead."""
    await store.suspended()
    await store.kill()
    await store.may_sweep()
    sweep = await store.processes.guard(HOST, hold_ms=60_000)
    assert sweep is not None
    assert sweep.cascading == (RUN,)


# Holding.


async def test_a_foreground_run_is_held_by_its_caller(store: Store) -> None:
    """protocol §3: foreground runs belong to their caller."""
    await store.queued(mode="foreground")
    assert await store.runs.held_by(HOST) == [RUN]


async def test_a_job_is_held_by_nobody(store: Store) -> None:
    """design §6: jobs outlive the host."""
    await store.queued()
    assert await store.runs.held_by(HOST) == []


async def test_a_child_s_foreground_run_is_held_by_no_process(store: Store) -> None:
    """protocol §3: a child waits as a record; whichever worker started it may leave."""
    await store.delegating()
    assert await store.runs.held_by(HOST) == []


@pytest.mark.parametrize("how", ["settled", "killed"])
async def test_what_has_ended_is_held_no_more(store: Store, how: str) -> None:
    """P10."""
    if how == "settled":
        await store.settled(mode="foreground")
    else:
        await store.queued(mode="foreground")
        await store.kill()
    assert await store.client.exists(store.keys.held(HOST)) == 0


async def test_a_run_goes_over_to_who_repeats_the_call(store: Store) -> None:
    """protocol §3: the same call id re-attaches, and the new caller's death is the one that counts."""
    await store.queued(mode="foreground")
    assert (await store.admit(mode="foreground", caller=OTHER_HOST)).word == "accepted"
    assert (await store.field("caller"), await store.runs.held_by(OTHER_HOST)) == (OTHER_HOST, [RUN])
    assert await store.runs.unhold(RUN, caller=HOST) == "forgotten"
    assert await store.runs.unhold(RUN, caller=OTHER_HOST) == "kept"
    assert (await store.runs.held_by(HOST), await store.runs.held_by(OTHER_HOST)) == ([], [RUN])


async def test_a_settled_run_is_held_by_nobody_who_repeats_the_call(store: Store) -> None:
    """P10: the answer is there."""
    await store.settled(mode="foreground")
    assert (await store.admit(mode="foreground", caller=OTHER_HOST)).state == "settled"
    assert await store.runs.held_by(OTHER_HOST) == []


async def silent_for(store: Store, leases: float) -> None:
    """The host's last beat is so many leases ago; a beat counts for one of them."""
    seconds, microseconds = await store.client.time()
    now_ms = seconds * 1000 + microseconds // 1000
    await store.client.zadd(store.keys.processes, {HOST: now_ms - int((leases - 1) * LEASE_MS)})


@pytest.mark.parametrize(("leases", "word"), [(0.5, "not_lost"), (1.9, "not_lost"), (2.0, "killed")])
async def test_a_caller_is_lost_after_two_leases(store: Store, leases: float, word: str) -> None:
    """protocol §3: so long it may be frozen, or the network away."""
    await store.queued(mode="foreground")
    await silent_for(store, leases)
    assert await store.kill(authority="", lost_caller=HOST, reason="caller lost") == word


async def test_a_caller_that_was_forgotten_is_lost(store: Store) -> None:
    """P6: nobody will ever hear of it again."""
    await store.queued(mode="foreground")
    assert await store.kill(authority="", lost_caller=HOST, reason="caller lost") == "killed"


# What a child admits.


async def test_a_child_s_run_is_one_deeper_in_the_same_tree(store: Store) -> None:
    """P9: depth counts from the root."""
    await store.delegating()
    record = await store.runs.get(OWN_RUN)
    assert record is not None
    assert (record.owner, record.root, record.depth) == (RUN, PARENT, 2)


async def test_a_child_at_the_cap_starts_nothing(store: Store) -> None:
    """P9: counted in the admitting script."""
    lease = await store.driven()
    admission = await store.admit(OWN_RUN, owner=RUN, token=lease.token, max_depth=1)
    assert (admission.cap, admission.details) == ("depth", ("2", "1"))


async def test_a_child_s_jobs_are_counted_apart_from_its_parent_s(store: Store) -> None:
    """P9: per owner; the parent's one job is the child itself."""
    lease = await started(store, OWN_RUN, mode="background")
    assert (await store.admit(SECOND, owner=RUN, token=lease.token, max_active_jobs=1)).cap == "active_jobs"
    assert (await store.admit(SECOND, owner=RUN, token=lease.token, max_active_jobs=2)).word == "accepted"


@pytest.mark.parametrize("token", [0, 2], ids=["an older token", "a newer token"])
async def test_only_its_driver_starts_a_child_s_runs(store: Store, token: int) -> None:
    """P2: one that slept through its lease starts nothing."""
    await store.driven()
    before = await store.dump()
    assert (await store.admit(OWN_RUN, owner=RUN, token=token)).word == "stale"
    assert await store.dump() == before


async def test_nobody_starts_a_run_for_a_child_without_driving_it(store: Store) -> None:
    """P14: a child's id is no key to its tree."""
    await store.driven()
    before = await store.dump()
    assert (await store.admit(OWN_RUN, owner=RUN)).word == "stale"
    assert await store.dump() == before


async def test_a_killed_child_starts_nothing(store: Store) -> None:
    """P5: so the walk down the tree meets all there is."""
    lease = await store.driven()
    await store.kill()
    before = await store.dump()
    assert (await store.admit(OWN_RUN, owner=RUN, token=lease.token)).word == "stop"
    assert await store.dump() == before


async def test_a_settled_child_starts_nothing(store: Store) -> None:
    """P3: nobody would end it any more."""
    lease = await store.settled()
    before = await store.dump()
    assert (await store.admit(OWN_RUN, owner=RUN, token=lease.token)).word == "stale"
    assert await store.dump() == before


async def test_a_child_s_repeated_call_finds_its_run_though_it_asks_otherwise(store: Store) -> None:
    """protocol §3: it repeats what stands in its transcript; a configuration that changed since is no conflict."""
    lease = await store.delegating()
    before = await store.dump()
    admission = await store.admit(OWN_RUN, owner=RUN, mode="foreground", token=lease.token, prompt="otherwise")
    assert (admission.word, admission.state) == ("accepted", "queued")
    assert await store.dump() == before


async def test_a_host_s_repeated_call_must_ask_for_the_same(store: Store) -> None:
    """design §4: with other arguments it is refused."""
    await store.queued()
    assert (await store.admit(prompt="otherwise")).word == "conflict"


async def test_a_child_finds_no_other_s_run(store: Store) -> None:
    """P14: an id that another owner holds is a conflict, whoever asks."""
    lease = await store.driven()
    assert (await store.admit("run-2")).word == "accepted"
    assert (await store.admit("run-2", owner=RUN, token=lease.token)).word == "conflict"


# Lifetimes.


@pytest.mark.parametrize("mode", ["foreground", "background"])
async def test_an_own_run_that_ended_gives_its_living_owner_no_lifetime(store: Store, mode: Mode) -> None:
    """protocol §6: live work has no lifetime, whatever ends below it or beside it."""
    keys = store.keys
    lease = await started(store, OWN_RUN, mode=mode)
    await store.runs.take(lease, seq=0, step="first")
    await end(store)
    living = [keys.session(RUN), keys.transcript(RUN), keys.session(PARENT), keys.jobs(PARENT)]
    for key in [*living, *([keys.jobs(RUN), keys.inbox(RUN)] if mode == "background" else [])]:
        assert not await store.has_lifetime(key), key
    assert await store.has_lifetime(keys.session(OWN_RUN))


async def test_a_settled_child_s_job_index_expires(store: Store) -> None:
    """P10: with the child's own settling, and a job that ends behind it keeps it so."""
    lease = await started(store, OWN_RUN, mode="background")
    await store.settle(lease)
    assert await store.has_lifetime(store.keys.jobs(RUN))
    assert await store.kill(OWN_RUN, authority="") == "killed"
    assert await store.has_lifetime(store.keys.jobs(RUN))


async def test_a_parent_session_rests_once_its_own_runs_have_ended(store: Store) -> None:
    """protocol §6: not when a run further down has."""
    lease = await store.delegating()
    await end(store)
    assert not await store.has_lifetime(store.keys.session(PARENT))
    await store.settle(lease)
    for key in (store.keys.session(PARENT), store.keys.jobs(PARENT), store.keys.notices(PARENT)):
        assert await store.has_lifetime(key), key


@pytest.mark.parametrize("mode", ["foreground", "background"])
async def test_a_tree_that_has_ended_leaves_no_key_without_a_lifetime(store: Store, mode: Mode) -> None:
    """P10: suspended, woken, resumed and settled; the job's notice was never taken."""
    lease = await started(store, OWN_RUN, mode=mode)
    await store.suspend(lease)
    await end(store)
    record = await store.claim(claim_id="claim-2")
    assert isinstance(record, RunRecord)
    assert await store.settle(Lease(RUN, record.token, WORKER)) == "settled"
    await store.processes.retire(WORKER, on_behalf="self")
    await store.client.delete(QUEUE)
    await assert_settled(store.client, NAMESPACE)
    await assert_no_leaked_keys(store.client, NAMESPACE)


# Notices of a child's jobs.


async def taken(store: Store, lease: Lease, *, seq: int) -> list[str]:
    """What the run takes before a later step: whose endings it is told of."""
    entries = await store.runs.take(lease, seq=seq, step="later")
    assert not isinstance(entries, str)
    assert {(entry.lane, entry.source) for entry in entries} <= {("next-step", "job-completed")}
    return [entry.message_id for entry in entries]


async def test_a_child_is_told_of_its_job_at_its_next_step(store: Store) -> None:
    """protocol §5: a session that is a child gets notices in its inbox, lane `next-step`; once."""
    lease = await started(store, OWN_RUN, mode="background")
    await store.runs.take(lease, seq=0, step="first")
    await end(store)
    assert await taken(store, lease, seq=1) == [OWN_RUN]
    assert await taken(store, lease, seq=2) == []
    assert await store.sessions.notices(PARENT, after="0-0") == []


async def test_a_suspended_child_is_told_when_it_goes_on(store: Store) -> None:
    """protocol §5: the notice is no reason to wake it, and waits."""
    lease = await started(store, OWN_RUN, SECOND, mode="background")
    await store.suspend(lease, SECOND)
    await end(store)
    assert not await is_queued(store)
    await end(store, SECOND)
    record = await store.claim(claim_id="claim-2")
    assert isinstance(record, RunRecord)
    # Its prompt was never taken here, and a later step leaves that where it is.
    assert await taken(store, Lease(RUN, record.token, WORKER), seq=1) == [OWN_RUN, SECOND]


async def test_a_child_is_told_nothing_of_a_foreground_run(store: Store) -> None:
    """protocol §5: a foreground ending is a result."""
    lease = await started(store, OWN_RUN)
    await end(store)
    assert await taken(store, lease, seq=0) == []


async def test_reading_a_job_withdraws_its_notice_from_the_inbox(store: Store) -> None:
    """protocol §5: a terminal reading is the report."""
    lease = await started(store, OWN_RUN, mode="background")
    await end(store)
    assert isinstance(await store.runs.collect(OWN_RUN, owner=RUN, is_child=True), RunRecord)
    assert await taken(store, lease, seq=0) == []


async def test_a_kill_by_the_child_s_model_needs_no_notice(store: Store) -> None:
    """protocol §5."""
    lease = await started(store, OWN_RUN, mode="background")
    assert await store.kill(OWN_RUN, authority=RUN, told="kill") == "killed"
    assert await taken(store, lease, seq=0) == []


async def test_a_settled_child_is_told_nothing(store: Store) -> None:
    """P10: nobody would ever take it."""
    lease = await started(store, OWN_RUN, mode="background")
    await store.settle(lease)
    assert await store.kill(OWN_RUN, authority="") == "killed"
    assert await store.client.exists(store.keys.inbox(RUN)) == 0


async def test_a_child_whose_record_is_gone_is_told_nothing(store: Store) -> None:
    """P10: it expired before a job of it could be ended; a notice to nobody would stay for ever."""
    lease = await started(store, OWN_RUN, mode="background")
    await store.settle(lease)
    await store.client.delete(store.keys.session(RUN))
    assert await store.kill(OWN_RUN, authority="") == "killed"
    assert await store.client.exists(store.keys.inbox(RUN)) == 0


async def test_an_announcement_rings_whoever_waits_for_the_child_s_run(store: Store) -> None:
    """protocol §5: on the owner's channel, which is the child's."""
    await store.delegating()
    pubsub = store.client.pubsub()
    await pubsub.subscribe(store.keys.session_channel(RUN))
    await pubsub.get_message(timeout=5)
    await end(store)
    message = cast("Any", await pubsub.get_message(timeout=5))
    await cast("Any", pubsub).aclose()
    assert json.loads(message["data"])["settled"] == OWN_RUN
