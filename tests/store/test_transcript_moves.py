"""Taking input and appending events: in order, by the driver alone, never past a kill."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from store_kit import OTHER_WORKER, RUN, Store

from subagent_tasks.protocol.interfaces import NewEvent
from subagent_tasks.protocol.models import InboxEntry
from subagent_tasks.store.runs import Lease

Write = Callable[[Store, Lease], Awaitable[object]]

CALL = NewEvent("tool_call", {"name": "read_file"})
RESPONSE = NewEvent("response", {"text": "a"})


async def put(store: Store, text: str, lane: str) -> None:
    """An entry as a message to the child would leave it."""
    entry = InboxEntry.model_validate({"messageId": text, "lane": lane, "text": text})
    await store.client.xadd(store.keys.inbox(RUN), {"lane": lane, "d": entry.to_json()})


async def take(store: Store, lease: Lease, *, seq: int = 0, later: bool = False) -> list[str]:
    taken = await store.runs.take(lease, seq=seq, step="later" if later else "first")
    assert not isinstance(taken, str), taken
    return [entry.text for entry in taken]


async def append(store: Store, lease: Lease, *events: NewEvent, seq: int, announce: bool = False) -> int | str:
    return await store.runs.append(lease, seq=seq, purpose="announce" if announce else "record", events=events)


async def kinds(store: Store) -> list[str]:
    return [event.kind for event in await store.runs.transcript(RUN)]


async def test_taken_input_leaves_the_inbox_and_enters_the_transcript(store: Store) -> None:
    """protocol §1: from then on the transcript alone says what was taken."""
    lease = await store.driven()
    assert await take(store, lease) == ["do it"]
    assert [(event.kind, event.data["text"]) for event in await store.runs.transcript(RUN)] == [("input", "do it")]
    assert not await store.client.exists(store.keys.inbox(RUN))


async def test_the_first_step_takes_the_whole_batch_and_then_one_turn(store: Store) -> None:
    """behaviour §1.7: next-step entries first, then one next-turn message."""
    lease = await store.driven()
    for text, lane in (("turn two", "next-turn"), ("step one", "next-step"), ("step two", "next-step")):
        await put(store, text, lane)
    assert await take(store, lease) == ["step one", "step two", "do it"]


async def test_a_later_step_takes_the_batch_only(store: Store) -> None:
    """behaviour §1.7: later steps take next-step only."""
    lease = await store.driven()
    await take(store, lease)
    for text, lane in (("turn two", "next-turn"), ("step one", "next-step"), ("step two", "next-step")):
        await put(store, text, lane)
    assert await take(store, lease, seq=1, later=True) == ["step one", "step two"]


async def test_what_a_step_may_not_take_stays_in_order(store: Store) -> None:
    """behaviour §1.7: one turn at a time."""
    lease = await store.driven()
    await put(store, "turn two", "next-turn")
    await put(store, "turn three", "next-turn")
    assert await take(store, lease) == ["do it"]
    assert await take(store, lease, seq=1) == ["turn two"]
    assert await take(store, lease, seq=2) == ["turn three"]


async def test_taking_nothing_writes_nothing(store: Store) -> None:
    """An empty step is no step."""
    lease = await store.driven()
    await take(store, lease)
    before = await store.dump()
    assert await take(store, lease, seq=1, later=True) == []
    assert await store.dump() == before


async def test_events_are_numbered_without_gaps(store: Store) -> None:
    """design §2: an append-only log."""
    lease = await store.driven()
    await take(store, lease)
    assert await append(store, lease, CALL, seq=1, announce=True) == 2
    assert await append(store, lease, RESPONSE, RESPONSE, seq=2) == 4
    assert [event.seq for event in await store.runs.transcript(RUN)] == [0, 1, 2, 3]
    assert [event.kind for event in await store.runs.transcript(RUN, after=2)] == ["response", "response"]


async def test_no_effect_starts_after_a_kill(store: Store) -> None:
    """P5: the same script checks token and kill flag."""
    lease = await store.driven()
    await store.kill()
    assert await append(store, lease, CALL, seq=0, announce=True) == "stop"
    assert await append(store, lease, seq=0, announce=True) == "stop"
    assert await kinds(store) == []


async def test_no_input_is_taken_after_a_kill(store: Store) -> None:
    """P5: it stays unclaimed."""
    lease = await store.driven()
    await store.kill()
    assert await store.runs.take(lease, seq=0, step="first") == "stop"
    assert await store.client.xlen(store.keys.inbox(RUN)) == 1


async def test_what_happened_is_written_down_after_a_kill_too(store: Store) -> None:
    """P7: the result of an effect that was announced before the kill."""
    lease = await store.driven()
    await append(store, lease, CALL, seq=0, announce=True)
    await store.kill()
    assert await append(store, lease, NewEvent("tool_result", {"text": "b"}), seq=1) == 2


async def attempts_of(store: Store) -> str | None:
    return await store.field("attempt")


async def test_a_recorded_step_clears_the_attempts(store: Store) -> None:
    """protocol §3: back to 0 with each committed step."""
    lease = await store.driven()
    await store.set_field("attempt", 2)
    await append(store, lease, RESPONSE, seq=0)
    assert await attempts_of(store) == "0"


async def test_an_announced_effect_clears_no_attempts(store: Store) -> None:
    """protocol §3: what kills its workers announces each time before it does."""
    lease = await store.driven()
    await store.set_field("attempt", 2)
    await append(store, lease, CALL, seq=0, announce=True)
    assert await attempts_of(store) == "2"


@pytest.mark.parametrize("seq", [1, 2], ids=["one ahead", "two ahead"])
async def test_a_driver_that_knows_more_than_the_server_writes_nothing(store: Store, seq: int) -> None:
    """protocol §6: a power loss takes up to a second; what is written after it must not leave a gap."""
    lease = await store.driven()
    await put(store, "step", "next-step")
    before = await store.dump()
    assert await store.runs.take(lease, seq=seq, step="first") == "stale"
    assert await append(store, lease, RESPONSE, seq=seq) == "stale"
    assert await store.dump() == before


async def take_stale(store: Store, lease: Lease) -> object:
    return await store.runs.take(lease, seq=0, step="first")


async def announce_stale(store: Store, lease: Lease) -> object:
    return await append(store, lease, CALL, seq=0, announce=True)


async def ask_stale(store: Store, lease: Lease) -> object:
    return await append(store, lease, seq=0, announce=True)


async def record_stale(store: Store, lease: Lease) -> object:
    return await append(store, lease, RESPONSE, seq=0)


async def settle_stale(store: Store, lease: Lease) -> object:
    return await store.settle(lease)


async def release_stale(store: Store, lease: Lease) -> object:
    return await store.release(lease)


WRITES: list[Write] = [take_stale, announce_stale, ask_stale, record_stale, settle_stale, release_stale]


@pytest.mark.parametrize("write", WRITES, ids=["take", "announce", "ask", "record", "settle", "release"])
async def test_a_frozen_driver_changes_nothing_after_another_claimed(store: Store, write: Write) -> None:
    """P2: its token is old; every writing move refuses it."""
    lease = await store.orphaned()
    await store.processes.beat(OTHER_WORKER)
    await store.claim(worker=OTHER_WORKER, claim_id="claim-2")
    await store.processes.beat(lease.worker)
    before = await store.dump()
    assert await write(store, lease) == "stale"
    assert await store.dump() == before


@pytest.mark.parametrize("write", WRITES, ids=["take", "announce", "ask", "record", "settle", "release"])
async def test_a_frozen_driver_changes_nothing_after_its_run_was_queued_again(store: Store, write: Write) -> None:
    """P2: a take-away raises the token, before anybody claims anew."""
    lease = await store.orphaned()
    assert await store.reclaim(lease) == "requeued"
    await store.processes.beat(lease.worker)
    before = await store.dump()
    assert await write(store, lease) == "stale"
    assert await store.dump() == before


async def test_a_silent_driver_goes_on_while_nobody_took_its_run(store: Store) -> None:
    """protocol §4: an outage is not a death."""
    lease = await store.orphaned()
    await store.processes.beat(lease.worker)
    assert await take(store, lease) == ["do it"]
    assert await append(store, lease, RESPONSE, seq=1) == 2
    assert await store.settle(lease) == "settled"
