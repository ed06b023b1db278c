"""The scripts against a pure model, over random histories: crashes, silence, stale leases and repeats in any order.

After every move the answer's word and everything that can be seen must be what the model says; a move that is made
twice answers the same and changes nothing (protocol §1). `HISTORIES=5000` plays so many of them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pure_model import MAX_DEPTH, MAX_JOBS, OWNER_OF, PARENT, Model
from store_kit import HOST, QUEUE, Store

from subagent_tasks.protocol.interfaces import NewEvent
from subagent_tasks.protocol.records import RunRecord
from subagent_tasks.store.runs import Lease

RUNS = tuple(OWNER_OF)
WORKERS = ("worker-1", "worker-2")
ALARM = 10**15


@dataclass(frozen=True)
class Step:
    """One move of a history. `late` presents the lease of an earlier driver, if there was one; `again` repeats it."""

    move: str
    run: str
    worker: str
    late: bool
    again: bool


MOVES = (
    "admit", "beat", "lapse", "claim", "claim", "take first", "take later", "announce", "record", "suspend", "wake",
    "release", "reclaim", "settle", "settle for the dead", "kill", "kill by model", "collect", "cascaded",
)  # fmt: skip
WHAT_MOVES = {
    None: ("admit",),
    "queued": ("claim", "kill"),
    "driven": ("take first", "announce", "record", "suspend", "release", "settle", "kill", "admit own", "admit own"),
    "suspended": ("wake", "kill"),
    "settled": ("collect", "kill by model", "cascaded"),
}
"""State -> the moves that leave it or build on it. Anything at any time would seldom come further than an admission."""


@st.composite
def steps(draw: st.DrawFn, model: Model) -> Step:
    """The next step: mostly one that moves something on, else any."""
    if draw(st.integers(0, 3)):
        run_id = draw(st.sampled_from(model.open_runs() or RUNS))
        run = model.runs.get(run_id)
        move = draw(st.sampled_from(WHAT_MOVES[run.state if run else None]))
        if move == "admit own":
            run_id, move = draw(st.sampled_from([own for own in RUNS if OWNER_OF[own] == "a"])), "admit"
        worker = draw(st.sampled_from(sorted(model.alive) or WORKERS))
    else:
        run_id, move, worker = (draw(st.sampled_from(each)) for each in (RUNS, MOVES, WORKERS))
    return Step(move, run_id, worker, late=draw(st.integers(0, 7)) == 7, again=draw(st.booleans()))


HISTORIES = int(os.environ.get("HISTORIES", "25"))


# Not shrunk: that takes minutes, and the steps are drawn one by one, so the failure lists them anyway.
@settings(deadline=None, phases=(Phase.explicit, Phase.generate), derandomize=True, max_examples=HISTORIES)
@given(data=st.data())
def check_histories(data: st.DataObject, url: str) -> None:
    """One history of up to fifty steps, on an empty server."""
    asyncio.run(play(url, data))


@pytest.mark.timeout(300)
def test_any_history_goes_as_the_model_says(server: str) -> None:
    """Protocol §1 and §3; P2, P3, P4, P9."""
    check_histories(url=server)


async def play(url: str, data: st.DataObject) -> None:
    store = Store(url)
    try:
        await store.client.flushdb()
        await store.sessions.open(PARENT)
        for worker in WORKERS:
            await store.processes.beat(worker)
        game = Game(store)
        for number in range(data.draw(st.integers(10, 50))):
            await game.play(data.draw(steps(game.model)), number)
    finally:
        await store.close()


class Game:
    """A store and its model, side by side."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.model = Model(alive=set(WORKERS))
        # Every lease that a claim ever gave, oldest first.
        self.leases: dict[str, list[Lease]] = {run_id: [] for run_id in RUNS}

    async def play(self, step: Step, number: int) -> None:
        lease = self.lease(step)
        move = self.moves(step, lease, number)
        expected = self.expected(step, lease, number)
        answer = await move()
        assert answer == expected, step
        seen, predicted = await self.seen(), self.predicted()
        assert seen == predicted, {kind: (seen[kind], predicted[kind]) for kind in seen}
        if step.again:
            dump = await self.store.dump()
            assert await move() == expected
            assert await self.store.dump() == dump

    def lease(self, step: Step) -> Lease:
        known = self.leases[step.run]
        if not known:
            return Lease(step.run, 1, step.worker)
        return known[0 if step.late else -1]

    def seq(self, lease: Lease) -> int:
        """What its driver believes: the driver of now knows the length, an earlier one may not."""
        run = self.model.runs.get(lease.run_id)
        return run.seq if run else 0

    def moves(self, step: Step, lease: Lease, number: int) -> Callable[[], Awaitable[Any]]:
        store, run_id, seq = self.store, step.run, self.seq(lease)

        async def admit() -> str:
            owner = OWNER_OF[run_id]
            above = self.leases.get(owner, [])
            mode: Literal["foreground", "background"] = "foreground" if "f" in run_id else "background"
            token = None if owner == PARENT else above[0 if step.late else -1].token if above else 1
            admission = await store.admit(
                run_id,
                owner=owner,
                mode=mode,
                token=token,
                caller=HOST if token is None else WORKERS[0],
                max_active_jobs=MAX_JOBS,
                max_depth=MAX_DEPTH,
            )
            return admission.word

        async def beat() -> str:
            await store.processes.beat(step.worker)
            return "ok"

        async def lapse() -> str:
            await store.age(step.worker)
            return "ok"

        async def claim() -> str:
            claimed = await store.claim(run_id, worker=step.worker, claim_id=f"claim-{number}")
            if not isinstance(claimed, RunRecord):
                return claimed
            if (known := Lease(run_id, claimed.token, step.worker)) not in self.leases[run_id]:
                self.leases[run_id].append(known)
            return "claimed"

        async def take(which: Literal["first", "later"]) -> str:
            taken = await store.runs.take(lease, seq=seq, step=which)
            return taken if isinstance(taken, str) else "entries"

        async def append(purpose: Literal["announce", "record"]) -> str:
            event = NewEvent("response", {"number": number})
            length = await store.runs.append(lease, seq=seq, purpose=purpose, events=[event])
            return length if isinstance(length, str) else "ok"

        async def suspend() -> str:
            return await store.runs.suspend(lease, seq=seq, awaited=self.own(run_id), wake_at=0, alarm_ms=ALARM)

        async def collect() -> str:
            found = await store.runs.collect(run_id, owner=OWNER_OF[run_id], is_child=OWNER_OF[run_id] != PARENT)
            return found if isinstance(found, str) else "job"

        return {
            "admit": admit,
            "beat": beat,
            "lapse": lapse,
            "claim": claim,
            "take first": lambda: take("first"),
            "take later": lambda: take("later"),
            "announce": lambda: append("announce"),
            "record": lambda: append("record"),
            "suspend": suspend,
            "wake": lambda: store.runs.wake(run_id, queue=QUEUE, alarm_ms=ALARM, message="message"),
            "release": lambda: store.release(lease),
            "reclaim": lambda: store.reclaim(lease),
            "settle": lambda: store.settle(lease),
            "settle for the dead": lambda: store.settle(lease, on_behalf="sweeper"),
            "kill": lambda: store.kill(run_id, kill_id=f"kill-{number}", authority=""),
            "kill by model": lambda: store.kill(run_id, kill_id=f"kill-{number}", authority="", told="kill"),
            "collect": collect,
            "cascaded": lambda: store.runs.cascaded(run_id),
        }[step.move]

    def expected(self, step: Step, lease: Lease, number: int) -> str:
        model, run_id, seq, token = self.model, step.run, self.seq(lease), lease.token
        match step.move:
            case "admit":
                above = self.leases.get(OWNER_OF[run_id], [])
                if OWNER_OF[run_id] != PARENT and not above:
                    # Nobody has ever driven its owner.
                    return "unknown_owner" if OWNER_OF[run_id] not in model.runs else "stale"
                return model.admit(run_id, owner_token=above[0 if step.late else -1].token if above else None)
            case "beat":
                model.alive.add(step.worker)
                return "ok"
            case "lapse":
                model.alive.discard(step.worker)
                return "ok"
            case "claim":
                return model.claim(run_id, worker=step.worker, claim=f"claim-{number}")
            case "take first" | "take later":
                return model.take(run_id, token=token, seq=seq, step=step.move.removeprefix("take "))
            case "announce" | "record":
                return model.append(run_id, token=token, seq=seq, purpose=step.move)
            case "suspend":
                return model.suspend(run_id, token=token, seq=seq, awaited=set(self.own(run_id)))
            case "wake":
                return model.wake(run_id)
            case "release":
                return model.release(run_id, token=token)
            case "reclaim":
                return model.reclaim(run_id, token=token, worker=lease.worker)
            case "settle" | "settle for the dead":
                on_behalf = "driver" if step.move == "settle" else "sweeper"
                return model.settle(run_id, token=token, worker=lease.worker, on_behalf=on_behalf)
            case "kill" | "kill by model":
                return model.kill(run_id, by_model=step.move == "kill by model")
            case "collect":
                return model.collect(run_id)
            case _:
                return model.cascaded(run_id)

    def own(self, run_id: str) -> list[str]:
        return [own for own, owner in OWNER_OF.items() if owner == run_id]

    def predicted(self) -> dict[str, Any]:
        """What can be seen, by the model."""
        model = self.model
        return {
            "runs": {
                run.id: (run.state, run.token, run.seq, run.attempt, run.status, len(run.lanes))
                for run in model.runs.values()
            },
            "driven": model.driven,
            "queued": model.queued(),
            "active": {owner: model.active(owner) for owner in (PARENT, "a")},
            "unsettled": {owner: model.unsettled(owner) for owner in (PARENT, "a")},
            "awaited": model.runs["a"].awaited if "a" in model.runs else set[str](),
            "alarms": {run.id for run in model.runs.values() if run.state == "suspended"},
            "cascade": model.cascade,
            "notices": model.notices,
        }

    async def seen(self) -> dict[str, Any]:
        """The same, by the server."""
        store, keys, client = self.store, self.store.keys, cast("Any", self.store.client)
        runs: dict[str, Any] = {}
        for run_id in RUNS:
            if record := await store.runs.get(run_id):
                status = record.outcome.status if record.outcome else ""
                waiting = await client.xlen(keys.inbox(run_id))
                length = await client.xlen(keys.transcript(run_id))
                assert length == record.seq
                runs[run_id] = (record.state, record.token, record.seq, record.attempt, status, waiting)
        return {
            "runs": runs,
            "driven": {(worker, run_id) for worker in WORKERS for run_id in await client.smembers(keys.driven(worker))},
            "queued": set(await client.zrange(keys.queued(QUEUE), 0, -1)),
            "active": {owner: await client.smembers(keys.active(owner)) for owner in (PARENT, "a")},
            "unsettled": {owner: await client.smembers(keys.unsettled(owner)) for owner in (PARENT, "a")},
            "awaited": await client.smembers(keys.awaited("a")),
            "alarms": set(await client.zrange(keys.alarms, 0, -1)),
            "cascade": await client.smembers(keys.cascade),
            "notices": [notice.sender_id for notice in await store.sessions.notices(PARENT, after="0-0")],
        }
