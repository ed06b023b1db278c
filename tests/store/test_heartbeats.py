"""Beats, the sweeper's guard, and leaving: Redis time judges, and an outage is not a death."""

from __future__ import annotations

from typing import Any, cast

import pytest
from store_kit import HOST, LEASE_MS, OTHER_WORKER, RUN, WORKER, Store

from subagent_tasks.store.processes import Sweep
from subagent_tasks.testing.faults import end_outage

HOLD_MS = 60_000


async def silent_for(store: Store, silent_ms: int) -> None:
    """Nobody beat for that long."""
    seconds, micros = await store.client.time()
    now_ms = seconds * 1000 + micros // 1000
    await cast("Any", store.client.hset(store.keys.clock, "last", now_ms - silent_ms))


async def guard(store: Store, process: str = HOST) -> Sweep | None:
    return await store.processes.guard(process, hold_ms=HOLD_MS)


async def test_a_beat_lasts_one_lease(store: Store) -> None:
    """protocol §4."""
    await store.processes.beat(WORKER)
    seconds, micros = await store.client.time()
    lapses_ms = (await store.processes.alive())[WORKER]
    assert 0 < lapses_ms - (seconds * 1000 + micros // 1000) <= LEASE_MS


async def test_a_beat_answers_with_what_the_process_drives(store: Store) -> None:
    """protocol §1: so that it sees what it no longer owns."""
    lease = await store.driven()
    assert (await store.processes.beat(WORKER)).driven == {RUN}
    await store.release(lease)
    assert (await store.processes.beat(WORKER)).driven == frozenset()


async def test_a_silent_process_is_found_dead(store: Store) -> None:
    """P6."""
    await store.processes.beat(WORKER)
    await store.age(WORKER)
    await store.may_sweep()
    sweep = await guard(store)
    assert sweep is not None
    assert sweep.dead == (WORKER,)


async def test_a_beat_brings_a_silent_process_back(store: Store) -> None:
    """protocol §4: an outage is not a death."""
    await store.processes.beat(WORKER)
    await store.age(WORKER)
    await store.processes.beat(WORKER)
    await store.may_sweep()
    sweep = await guard(store)
    assert sweep is not None
    assert sweep.dead == ()


async def test_one_process_sweeps_at_a_time(store: Store) -> None:
    """protocol §4: guard key."""
    await store.may_sweep()
    assert await guard(store, HOST) is not None
    assert await guard(store, OTHER_WORKER) is None
    assert await guard(store, HOST) is not None


async def test_the_guard_of_a_dead_sweeper_lapses(store: Store) -> None:
    """P6: whoever holds it must sweep again in time to keep it."""
    await store.may_sweep()
    await guard(store, OTHER_WORKER)
    assert await store.has_lifetime(store.keys.sweeper)


async def test_nobody_sweeps_before_anybody_beat(store: Store) -> None:
    """protocol §4: an empty server may have lost everything a moment ago."""
    assert await guard(store) is None


async def test_nobody_sweeps_in_the_first_lease_of_a_server(store: Store) -> None:
    """protocol §4: the others have not come back yet."""
    await store.processes.beat(HOST)
    assert await guard(store) is None
    await end_outage(store.client, store.keys)
    assert await guard(store) is not None


@pytest.mark.parametrize("silent_ms", [LEASE_MS * 2 // 3, LEASE_MS, 10 * LEASE_MS])
async def test_the_first_beat_after_an_outage_makes_sweepers_wait(store: Store, silent_ms: int) -> None:
    """protocol §4: for one lease. A shorter outage than a lease can make a lease lapse too."""
    await store.may_sweep()
    await silent_for(store, silent_ms)
    await store.processes.beat(HOST)
    assert await guard(store) is None


@pytest.mark.parametrize("silent_ms", [LEASE_MS * 2 // 3, LEASE_MS, 10 * LEASE_MS])
async def test_a_sweeper_faster_than_the_first_beat_waits_too(store: Store, silent_ms: int) -> None:
    """protocol §4: when the server answers again, it is chance which command of a process comes first."""
    await store.orphaned()
    await store.may_sweep()
    await silent_for(store, silent_ms)
    assert await guard(store) is None


async def test_beats_at_their_usual_distance_are_no_outage(store: Store) -> None:
    """P6: a lone host must be able to sweep."""
    await store.may_sweep()
    await silent_for(store, LEASE_MS // 3 + 500)
    assert await guard(store) is not None
    await store.processes.beat(HOST)
    assert await guard(store) is not None


async def test_a_process_that_drives_nothing_may_leave(store: Store) -> None:
    """P10: nothing of it is left."""
    await store.processes.beat(WORKER)
    assert await store.processes.retire(WORKER, on_behalf="self") == "retired"
    assert await store.processes.alive() == {}


async def test_a_process_that_leaves_work_behind_stays_known(store: Store) -> None:
    """P6: or nobody would find its work."""
    await store.driven()
    assert await store.processes.retire(WORKER, on_behalf="self") == "still_needed"
    assert set(await store.processes.alive()) == {WORKER}


async def test_a_sweeper_does_not_retire_the_living(store: Store) -> None:
    """P2: it beat since the sweeper looked."""
    await store.processes.beat(WORKER)
    assert await store.processes.retire(WORKER, on_behalf="sweeper") == "still_needed"
