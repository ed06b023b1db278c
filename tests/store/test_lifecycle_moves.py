"""The scripts leave the states the table names, and no other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from store_kit import OTHER_WORKER, Store

from subagent_tasks.protocol.lifecycle import TRANSITIONS, Move, State
from subagent_tasks.store.runs import Lease

# As each is asked for when its other conditions hold: a living heir, a dead driver, the newest token.
MOVES: dict[Move, Callable[[Store, Lease], Awaitable[object]]] = {
    Move.CLAIM: lambda store, _: store.claim(worker=OTHER_WORKER, claim_id="claim-2"),
    Move.RELEASE: lambda store, lease: store.release(lease),
    Move.RECLAIM: lambda store, lease: store.reclaim(lease),
    Move.SETTLE: lambda store, lease: store.settle(lease),
    Move.KILL: lambda store, _: store.kill(),
}


@pytest.mark.parametrize("move", list(MOVES))
@pytest.mark.parametrize("state", list(State))
async def test_a_script_leaves_a_state_only_as_the_table_says(store: Store, state: State, move: Move) -> None:
    """style: scripts are compare-and-set, told by Python which states they may leave."""
    lease = await store.orphaned()
    await store.processes.beat(OTHER_WORKER)
    await store.set_field("state", state)

    await MOVES[move](store, lease)

    assert await store.field("state") == TRANSITIONS.get((state, move), state)
