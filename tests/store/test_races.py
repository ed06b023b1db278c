"""Settlers that race: driver, sweeper and kills, each reading the record at one moment and making its move at a later
one, in any order and any number of times."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Literal, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_kit import LEASE_MS, OWN_RUN, PARENT, QUEUE, RUN, Store, a_record

from subagent_tasks.protocol.endings import Ending
from subagent_tasks.protocol.keys import celery_result_key
from subagent_tasks.protocol.models import Mode
from subagent_tasks.protocol.records import RunRecord
from subagent_tasks.store.runs import Lease

Kind = Literal["driver", "sweeper", "operator's kill", "model's kill"]
Start = Literal["queued", "driven", "orphaned", "suspended"]
STATUS_OF: dict[Kind, str] = {
    "driver": "completed",
    "sweeper": "failed",
    "operator's kill": "killed",
    "model's kill": "killed",
}
CELERY_STATE = {"completed": "SUCCESS", "failed": "FAILURE", "killed": "REVOKED"}


@dataclass
class Settler:
    """One of them: what it read, and what it was answered."""

    name: str
    kind: Kind
    record: RunRecord | None = None
    ending: Ending | None = None
    words: tuple[str, ...] = ()

    async def step(self, store: Store, lease: Lease) -> None:
        """Read, the first time; from then on make the move, once more each time."""
        if self.ending is None:
            self.record = await store.runs.get(RUN)
            killed = "enough" if "kill" in self.kind else None
            self.ending = await store.ending(settle_id=self.name, text=self.name, killed=killed)
            if self.kind == "sweeper":
                self.ending = failed(self.ending)
            return
        self.words = (*self.words, await self._move(store, lease, self.record or a_record(), self.ending))

    async def _move(self, store: Store, lease: Lease, record: RunRecord, ending: Ending) -> str:
        if self.kind == "driver" or self.kind == "sweeper":
            ended = await store.runs.settle(record, lease, on_behalf=self.kind, ending=ending, wake_message="")
            return ended.word
        ended = await store.runs.kill(
            record,
            kill_id=self.name,
            reason="enough",
            authority="",
            told="kill" if self.kind == "model's kill" else "",
            ending=ending,
            lease_ms=LEASE_MS,
        )
        return ended.word

    @property
    def has_won(self) -> bool:
        return bool(self.words) and self.words[0] in ("settled", "killed")


def failed(ending: Ending) -> Ending:
    """The same texts, saying that it failed."""
    outcome = {**json.loads(ending.outcome), "status": "failed", "stopReason": "error"}
    result = {**json.loads(ending.result), "status": "FAILURE"}
    return Ending(
        settle_id=ending.settle_id,
        status="failed",
        detail=ending.detail,
        outcome=json.dumps(outcome),
        event=ending.event,
        result=json.dumps(result),
        notice=ending.notice.replace("completed", "failed"),
        announcement=ending.announcement,
        expiry=ending.expiry,
    )


@settings(max_examples=80)
@given(
    kinds=st.lists(st.sampled_from(tuple(STATUS_OF)), min_size=2, max_size=5),
    start=st.sampled_from(("queued", "driven", "orphaned", "suspended")),
    mode=st.sampled_from(("foreground", "background")),
    data=st.data(),
)
def check(kinds: list[Kind], start: Start, mode: Mode, data: st.DataObject, url: str) -> None:
    settlers = [Settler(f"{number}", kind) for number, kind in enumerate(kinds)]
    order = data.draw(st.permutations([number for number in range(len(settlers)) for _ in range(3)]), label="order")
    asyncio.run(race(url, settlers, order, start, mode))


@pytest.mark.timeout(300)
def test_of_any_settlers_in_any_order_one_wins(server: str) -> None:
    """P3: and record, Celery result, transcript and notice are all the winner's; P4: told once, or to who asked."""
    check(url=server)


async def race(url: str, settlers: list[Settler], order: list[int], start: Start, mode: Mode) -> None:
    store = Store(url)
    try:
        await store.client.flushdb()
        lease = await brought(store, start, mode)
        for number in order:
            await settlers[number].step(store, lease)
        await judge(store, settlers, start, mode)
    finally:
        await store.close()


async def brought(store: Store, start: Start, mode: Mode) -> Lease:
    match start:
        case "queued":
            await store.queued(mode=mode)
            return Lease(RUN, 0, "")
        case "driven":
            return await store.driven(mode=mode)
        case "orphaned":
            return await store.orphaned(mode=mode)
        case "suspended":
            lease = await store.driven(mode=mode)
            await store.admit(OWN_RUN, owner=RUN, mode="foreground", token=lease.token)
            await store.suspend(lease)
            return lease


def may_win(kind: Kind, start: Start) -> bool:
    """Who may end a run in that state; driven work is only asked to end by a kill."""
    match kind:
        case "driver":
            return start in ("driven", "orphaned")
        case "sweeper":
            return start == "orphaned"
        case _:
            return start in ("queued", "suspended")


async def judge(store: Store, settlers: list[Settler], start: Start, mode: Mode) -> None:
    for settler in settlers:
        # A refusal is looked at anew, and says `already` once somebody has won; it never becomes a win.
        wins = set(settler.words) & {"settled", "killed"}
        assert not wins or len(set(settler.words)) == 1, f"{settler.kind}: {settler.words}"
    winners = [settler for settler in settlers if settler.has_won]
    record = await store.runs.get(RUN)
    assert record is not None
    notices = await store.sessions.notices(PARENT, after="0-0")
    ends = [event for event in await store.runs.transcript(RUN) if event.kind == "settled"]
    if not any(may_win(settler.kind, start) for settler in settlers):
        assert (winners, ends, notices, record.is_settled) == ([], [], [], False)
        return
    (winner,) = winners
    assert may_win(winner.kind, start)
    assert winner.ending is not None
    status = STATUS_OF[winner.kind]

    assert record.is_settled
    assert record.outcome is not None
    assert json.loads(record.outcome.to_json()) == json.loads(winner.ending.outcome)
    assert record.snapshot().status == status
    assert await store.field("settle_id") == winner.name
    result = json.loads(cast("str", await store.client.get(celery_result_key(RUN))))
    assert result == json.loads(winner.ending.result)
    assert result["status"] == CELERY_STATE[status]
    assert len(ends) == 1

    # Its owner's model needs no notice of what it was told, be it by its kill's success or by its kill's coming late.
    asked = [settler for settler in settlers if settler.kind == "model's kill"]
    is_known = any(settler.has_won or "already_finished" in settler.words for settler in asked)
    told = [notice for notice in notices if notice.sender_id == RUN]
    assert len(told) == (0 if mode == "foreground" or is_known else 1)
    assert all(f"[status: {status}" in notice.text for notice in told)

    assert RUN not in [run_id for run_id, _ in await store.runs.queued(QUEUE)]
    assert RUN not in await store.runs.unsettled(PARENT)
