"""Every script, in every outcome it can have: repeated, and with its reply lost (protocol §1).

`prepare` brings the keys where the move finds them and returns the lease it presents, `move` is the one call that is
repeated with the same arguments. What each move does is in the other files of this folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import redis
from store_kit import (
    HOST,
    OTHER_HOST,
    OTHER_WORKER,
    OWN_RUN,
    PARENT,
    QUEUE,
    RUN,
    WORKER,
    Store,
    masked,
)

from subagent_tasks.errors import SubagentError
from subagent_tasks.protocol import scripts
from subagent_tasks.protocol.interfaces import NewEvent
from subagent_tasks.protocol.scripts import Script
from subagent_tasks.store.connection import pairs
from subagent_tasks.store.runs import Lease
from subagent_tasks.testing.faults import FaultyServer

NOBODY = Lease(RUN, 0, WORKER)
Prepare = Callable[[Store], Awaitable[Lease | None]]
Move = Callable[[Store, Lease], Awaitable[object]]


@dataclass(frozen=True)
class Case:
    """One outcome of one script: `answer` is its first word, or its first two."""

    script: Script
    answer: tuple[str, ...]
    prepare: Prepare
    move: Move
    note: str = ""

    @property
    def id(self) -> str:
        return "-".join(filter(None, (self.script.name, *self.answer, self.note)))


async def nothing(_: Store) -> None:
    """An empty server."""


async def opened(store: Store) -> None:
    await store.sessions.open(PARENT)


async def newer_session(store: Store) -> None:
    await opened(store)
    await store.set_field("version", 99, PARENT)


async def queued(store: Store) -> None:
    await store.queued()


async def queued_with_beat(store: Store) -> None:
    await store.queued()
    await store.processes.beat(WORKER)


async def newer_run(store: Store) -> None:
    await queued_with_beat(store)
    await store.set_field("version", 99)


async def suspended(store: Store) -> Lease:
    return await store.suspended()


async def delegating(store: Store) -> Lease:
    return await store.delegating()


async def own_run_driven(store: Store) -> Lease:
    return await store.own_run_driven()


async def own_run_settled(store: Store) -> Lease:
    lease = await store.delegating()
    assert await store.kill(OWN_RUN, authority=RUN) == "killed"
    return lease


async def killed_while_delegating(store: Store) -> Lease:
    lease = await store.delegating()
    assert await store.kill(kill_id="earlier") == "requested"
    return lease


async def alarmed(store: Store) -> None:
    await store.suspended(alarm_ms=1_000)


async def alarmed_and_sweepable(store: Store) -> None:
    await alarmed(store)
    await store.may_sweep()


async def ended_with_its_own_unsettled(store: Store) -> None:
    lease = await store.delegating()
    assert await store.settle(lease) == "settled"


async def cascaded_through(store: Store) -> None:
    await ended_with_its_own_unsettled(store)
    assert await store.kill(OWN_RUN, authority="") == "killed"


async def called(store: Store) -> None:
    await store.processes.beat(HOST)
    await store.queued(mode="foreground")


async def called_by_the_lost(store: Store) -> None:
    await called(store)
    await store.client.zadd(store.keys.processes, {HOST: 1_000})


async def called_and_driven(store: Store) -> None:
    await called_by_the_lost(store)
    await store.processes.beat(WORKER)
    assert await store.claim() != "driven"


async def called_again_elsewhere(store: Store) -> None:
    await called_by_the_lost(store)
    assert (await store.admit(mode="foreground", caller=OTHER_HOST)).word == "accepted"


async def driven(store: Store) -> Lease:
    return await store.driven()


async def driven_foreground(store: Store) -> Lease:
    return await store.driven(mode="foreground")


async def driven_elsewhere(store: Store) -> Lease:
    await store.processes.beat(OTHER_WORKER)
    return await store.driven()


async def taken(store: Store) -> Lease:
    lease = await store.driven()
    await store.runs.take(lease, seq=0, step="first")
    return lease


async def killed_while_driven(store: Store) -> Lease:
    lease = await store.driven()
    assert await store.kill(kill_id="earlier") == "requested"
    return lease


async def orphaned(store: Store) -> Lease:
    return await store.orphaned()


async def orphaned_with_heir(store: Store) -> Lease:
    lease = await store.orphaned()
    await store.processes.beat(OTHER_WORKER)
    return lease


async def killed_and_orphaned(store: Store) -> Lease:
    lease = await killed_while_driven(store)
    await store.age(WORKER)
    return lease


async def settled(store: Store) -> Lease:
    return await store.settled()


async def expired(store: Store) -> Lease:
    lease = await store.settled()
    await store.client.delete(store.keys.session(RUN))
    return lease


async def sweepable(store: Store) -> None:
    await store.orphaned()
    await store.may_sweep()


async def swept_by_another(store: Store) -> None:
    await store.may_sweep()
    assert await store.processes.guard(OTHER_WORKER, hold_ms=60_000) is not None


async def beating(store: Store) -> None:
    await store.processes.beat(WORKER)


async def acknowledged(store: Store) -> None:
    await store.settled()
    await store.sessions.acknowledge(PARENT, "main", "9000000000000-7")


def first_claim(store: Store, _: Lease) -> Awaitable[object]:
    return store.claim()


def other_claim(store: Store, _: Lease) -> Awaitable[object]:
    return store.claim(worker=OTHER_WORKER, claim_id="claim-2")


def take(store: Store, lease: Lease) -> Awaitable[object]:
    return store.runs.take(lease, seq=0, step="first")


def take_later(store: Store, lease: Lease) -> Awaitable[object]:
    return store.runs.take(lease, seq=1, step="later")


def announce(store: Store, lease: Lease) -> Awaitable[object]:
    call = NewEvent("tool_call", {"name": "read_file"})
    return store.runs.append(lease, seq=0, purpose="announce", events=[call])


def announce_nothing(store: Store, lease: Lease) -> Awaitable[object]:
    return store.runs.append(lease, seq=0, purpose="announce", events=[])


def record(store: Store, lease: Lease) -> Awaitable[object]:
    events = [NewEvent("response", {"text": "a"}), NewEvent("tool_result", {"text": "b"})]
    return store.runs.append(lease, seq=1, purpose="record", events=events)


def settle(store: Store, lease: Lease) -> Awaitable[object]:
    return store.settle(lease)


async def settle_otherwise(store: Store, lease: Lease) -> object:
    return await store.settle(lease, ending=await store.ending(settle_id="sweeper:1", text="other"))


def settle_for_dead(store: Store, lease: Lease) -> Awaitable[object]:
    return store.settle(lease, on_behalf="sweeper")


def kill(store: Store, _: Lease) -> Awaitable[object]:
    return store.kill()


def kill_by_model(store: Store, _: Lease) -> Awaitable[object]:
    return store.kill(told="kill")


def release(store: Store, lease: Lease) -> Awaitable[object]:
    return store.release(lease)


def admit_own(store: Store, lease: Lease) -> Awaitable[object]:
    return store.admit("own-run-2", owner=RUN, mode="foreground", token=lease.token)


def admit_own_for_another(store: Store, lease: Lease) -> Awaitable[object]:
    return store.admit("own-run-2", owner=RUN, mode="foreground", token=lease.token + 1)


def admit_elsewhere(store: Store, _: Lease) -> Awaitable[object]:
    return store.admit(mode="foreground", caller=OTHER_HOST)


def suspend(store: Store, lease: Lease) -> Awaitable[object]:
    return store.suspend(lease)


def wake(store: Store, _: Lease) -> Awaitable[object]:
    return store.runs.wake(RUN, queue=QUEUE, alarm_ms=1_000, message="message after an alarm")


def kill_for_the_lost(store: Store, _: Lease) -> Awaitable[object]:
    return store.kill(authority="", lost_caller=HOST)


def unhold(store: Store, _: Lease) -> Awaitable[object]:
    return store.runs.unhold(RUN, caller=HOST)


def cascaded(store: Store, _: Lease) -> Awaitable[object]:
    return store.runs.cascaded(RUN)


def reclaim(store: Store, lease: Lease) -> Awaitable[object]:
    return store.reclaim(lease)


async def forget(store: Store, _: Lease) -> object:
    return await store.runs.forget(RUN, owner=PARENT, expiry=(await store.ending()).expiry)


def collect(store: Store, _: Lease) -> Awaitable[object]:
    return store.runs.collect(RUN, owner=PARENT, is_child=False)


def acknowledge(store: Store, _: Lease) -> Awaitable[object]:
    return store.sessions.acknowledge(PARENT, "main", "1-1")


def guard(store: Store, _: Lease) -> Awaitable[object]:
    return store.processes.guard(HOST, hold_ms=60_000)


def republish_since(seen_ms: int) -> Move:
    return lambda store, _: store.runs.republish(RUN, queue=QUEUE, since_ms=seen_ms, message="sent again")


async def queued_long_ago(store: Store) -> None:
    await store.queued()
    await store.client.zadd(store.keys.queued(QUEUE), {RUN: 1_000})


async def killed(store: Store) -> None:
    await store.queued()
    assert await store.kill() == "killed"


async def killed_without_transcript(store: Store) -> None:
    await killed(store)
    await store.client.delete(store.keys.transcript(RUN))


async def killed_and_requeued(store: Store) -> None:
    await killed(store)
    assert await store.requeue("run-2") == ("requeued", "run-2")


async def killed_in_an_expired_session(store: Store) -> None:
    await killed(store)
    await store.client.delete(store.keys.session(PARENT))


def requeue(store: Store, _: Lease) -> Awaitable[object]:
    return store.requeue("run-2")


S = scripts
CASES = [
    Case(S.OPEN, ("open",), nothing, lambda store, _: store.sessions.open(PARENT), "new"),
    Case(S.OPEN, ("open",), settled, lambda store, _: store.sessions.open(PARENT), "again"),
    Case(S.OPEN, ("open",), queued, lambda store, _: store.sessions.open(PARENT), "busy"),
    Case(S.OPEN, ("not_a_parent",), queued, lambda store, _: store.sessions.open(RUN)),
    Case(S.OPEN, ("unsupported",), newer_session, lambda store, _: store.sessions.open(PARENT)),
    Case(S.ADMIT, ("accepted", "queued"), opened, lambda store, _: store.admit(), "job"),
    Case(S.ADMIT, ("accepted", "queued"), opened, lambda store, _: store.admit(mode="foreground"), "foreground"),
    Case(S.ADMIT, ("accepted", "settled"), settled, lambda store, _: store.admit()),
    Case(S.ADMIT, ("conflict",), queued, lambda store, _: store.admit(prompt="something else")),
    Case(S.ADMIT, ("refused", "depth"), opened, lambda store, _: store.admit(max_depth=0)),
    Case(S.ADMIT, ("refused", "active_jobs"), queued, lambda store, _: store.admit("run-2", max_active_jobs=1)),
    Case(S.ADMIT, ("unknown_owner",), nothing, lambda store, _: store.admit()),
    Case(S.ADMIT, ("accepted", "queued"), delegating, admit_own, "by-a-child"),
    Case(S.ADMIT, ("accepted", "queued"), called_by_the_lost, admit_elsewhere, "again-elsewhere"),
    Case(S.ADMIT, ("stop", "kill"), killed_while_delegating, admit_own),
    Case(S.ADMIT, ("stale",), delegating, admit_own_for_another),
    Case(S.REQUEUE, ("requeued", "run-2"), killed, requeue),
    Case(S.REQUEUE, ("requeued", "run-2"), killed_and_requeued, lambda store, _: store.requeue("run-3"), "by-another"),
    Case(S.REQUEUE, ("unfinished",), driven, requeue),
    Case(S.REQUEUE, ("completed",), settled, requeue),
    Case(S.REQUEUE, ("no_prompt",), killed_without_transcript, requeue),
    Case(S.REQUEUE, ("refused", "active_jobs"), killed, lambda store, _: store.requeue("run-2", max_active_jobs=0)),
    Case(S.REQUEUE, ("unknown",), nothing, requeue),
    Case(S.REQUEUE, ("unknown_owner",), killed_in_an_expired_session, requeue),
    Case(S.CLAIM, ("claimed",), queued_with_beat, first_claim, "queued"),
    Case(S.CLAIM, ("claimed",), orphaned_with_heir, other_claim, "from-the-dead"),
    Case(S.CLAIM, ("nothing_to_do", "gone"), nothing, first_claim),
    Case(S.CLAIM, ("nothing_to_do", "settled"), settled, first_claim),
    Case(S.CLAIM, ("nothing_to_do", "suspended"), suspended, first_claim),
    Case(S.CLAIM, ("nothing_to_do", "driven"), driven_elsewhere, other_claim),
    Case(S.CLAIM, ("nothing_to_do", "no_heartbeat"), queued, first_claim),
    Case(S.CLAIM, ("nothing_to_do", "unsupported"), newer_run, first_claim),
    Case(S.TAKE, ("entries",), driven, take, "first"),
    Case(S.TAKE, ("entries",), taken, take_later, "none-left"),
    Case(S.TAKE, ("stop", "kill"), killed_while_driven, take),
    Case(S.TAKE, ("stale",), settled, take),
    Case(S.APPEND, ("ok",), driven, announce, "announce"),
    Case(S.APPEND, ("ok",), driven, announce_nothing, "ask"),
    Case(S.APPEND, ("ok",), taken, record, "record"),
    Case(S.APPEND, ("stop", "kill"), killed_while_driven, announce),
    Case(S.APPEND, ("stale",), settled, announce),
    Case(S.SUSPEND, ("suspended",), delegating, suspend),
    Case(S.SUSPEND, ("go_on",), own_run_settled, suspend),
    Case(S.SUSPEND, ("stop", "kill"), killed_while_delegating, suspend),
    Case(S.SUSPEND, ("stale",), settled, suspend),
    Case(S.WAKE, ("woken",), alarmed, wake),
    Case(S.WAKE, ("moved_on",), suspended, wake),
    Case(S.CASCADED, ("done",), cascaded_through, cascaded),
    Case(S.CASCADED, ("not_yet",), ended_with_its_own_unsettled, cascaded),
    Case(S.UNHOLD, ("forgotten",), called_again_elsewhere, unhold),
    Case(S.UNHOLD, ("kept",), called, unhold),
    Case(S.SETTLE, ("settled", "wake"), own_run_driven, settle),
    Case(S.SETTLE, ("settled", "cascade"), delegating, settle),
    Case(S.SETTLE, ("settled",), driven, settle, "job"),
    Case(S.SETTLE, ("settled",), driven_foreground, settle, "foreground"),
    Case(S.SETTLE, ("settled",), killed_while_driven, settle, "killed"),
    Case(S.SETTLE, ("settled",), orphaned, settle_for_dead, "for-the-dead"),
    Case(S.SETTLE, ("already", "completed"), settled, settle_otherwise),
    Case(S.SETTLE, ("stale",), driven, settle_for_dead),
    Case(S.SETTLE, ("unknown",), nothing, settle),
    Case(S.KILL, ("killed",), queued, kill, "announced"),
    Case(S.KILL, ("killed",), queued, kill_by_model, "by-the-model"),
    Case(S.KILL, ("requested",), driven, kill, "first"),
    Case(S.KILL, ("requested",), killed_while_driven, kill_by_model, "second"),
    Case(S.KILL, ("already_finished",), settled, kill, "announced"),
    Case(S.KILL, ("already_finished",), settled, kill_by_model, "by-the-model"),
    Case(S.KILL, ("killed", "cascade"), suspended, kill),
    Case(S.KILL, ("requested", "cascade"), delegating, kill),
    Case(S.KILL, ("killed",), called_by_the_lost, kill_for_the_lost, "for-a-lost-caller"),
    Case(S.KILL, ("requested",), called_and_driven, kill_for_the_lost, "for-a-lost-caller"),
    Case(S.KILL, ("not_lost",), called, kill_for_the_lost, "in-time"),
    Case(S.KILL, ("not_lost",), called_again_elsewhere, kill_for_the_lost, "elsewhere"),
    Case(S.KILL, ("unauthorized",), queued, lambda store, _: store.kill(authority="stranger")),
    Case(S.KILL, ("unknown",), nothing, kill),
    Case(S.RELEASE, ("released",), driven, release),
    Case(S.RELEASE, ("stop", "kill"), killed_while_driven, release),
    Case(S.RELEASE, ("stale",), settled, release),
    Case(S.RECLAIM, ("requeued",), orphaned, reclaim),
    Case(S.RECLAIM, ("stop", "kill"), killed_and_orphaned, reclaim),
    Case(S.RECLAIM, ("not_driven",), driven, reclaim),
    Case(S.REPUBLISH, ("republished",), queued_long_ago, republish_since(1_000)),
    Case(S.REPUBLISH, ("moved_on",), queued, republish_since(1_000)),
    Case(S.BEAT, ("ok",), nothing, lambda store, _: store.processes.beat(WORKER), "first"),
    Case(S.BEAT, ("ok",), killed_while_driven, lambda store, _: store.processes.beat(WORKER), "killed"),
    Case(S.RETIRE, ("retired",), beating, lambda store, _: store.processes.retire(WORKER, on_behalf="self")),
    Case(S.RETIRE, ("still_needed",), driven, lambda store, _: store.processes.retire(WORKER, on_behalf="self")),
    Case(S.RETIRE, ("still_needed",), called, lambda store, _: store.processes.retire(HOST, on_behalf="self"), "held"),
    Case(S.GUARD, ("sweep",), sweepable, guard),
    Case(S.GUARD, ("sweep",), alarmed_and_sweepable, guard, "alarmed"),
    Case(S.GUARD, ("wait",), swept_by_another, guard),
    Case(S.FORGET, ("forgotten",), expired, forget),
    Case(S.FORGET, ("kept",), settled, forget),
    Case(S.COLLECT, ("job",), settled, collect, "settled"),
    Case(S.COLLECT, ("job",), driven, collect, "running"),
    Case(
        S.COLLECT, ("unauthorized",), queued, lambda store, _: store.runs.collect(RUN, owner="stranger", is_child=False)
    ),
    Case(S.COLLECT, ("unknown",), nothing, collect),
    Case(S.ACK_NOTICE, ("ok",), settled, acknowledge, "first"),
    Case(S.ACK_NOTICE, ("ok",), acknowledged, acknowledge, "late"),
]
every_outcome = pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])


@every_outcome
async def test_a_move_repeated_answers_the_same_and_changes_nothing(store: Store, case: Case) -> None:
    """protocol §1: what a retry of the client, or of the caller, may not do twice."""
    lease = await case.prepare(store) or NOBODY
    first = await answer_of(store, case, lease)
    after_first = await store.dump()

    second = await answer_of(store, case, lease)

    assert tuple(first[: len(case.answer)]) == case.answer
    assert masked(second) == masked(first)
    assert await store.dump() == after_first


@every_outcome
async def test_a_lost_reply_changes_neither_answer_nor_keys(store: Store, server: str, case: Case) -> None:
    """protocol §1: the command ran, its reply was lost, redis-py sent it again."""
    with FaultyServer(server) as faulty:
        distant = Store(faulty.url)
        lease = await case.prepare(store) or NOBODY
        unharmed = await answer_of(distant, case, lease)
        wanted = await store.dump()
        with redis.Redis.from_url(server) as client:
            client.flushdb()

        lease = await case.prepare(store) or NOBODY
        faulty.lose_reply(case.script)
        answer = await answer_of(distant, case, lease)
        await distant.close()

    assert faulty.replies_lost == 1
    assert masked(answer) == masked(unharmed)
    assert await store.dump() == wanted


def test_every_script_is_repeated() -> None:
    """A new script without a case would escape the two tests above."""
    assert {case.script.name for case in CASES} == {script.name for script in scripts.ALL}


async def answer_of(store: Store, case: Case, lease: Lease) -> list[Any]:
    """The script's raw answer, whatever the store makes of it."""
    store.moves.last = ("", [])
    with contextlib.suppress(SubagentError):
        await case.move(store, lease)
    name, answer = store.moves.last
    assert name == case.script.name
    # A record comes as HGETALL gives it, in no order that is promised.
    return [pairs(cast("list[str]", part)) if isinstance(part, list) and "version" in part else part for part in answer]
