"""The table of states: complete, and the only truth about what may follow what."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subagent_tasks.protocol.lifecycle import TRANSITIONS, Move, State, departs, job_status

PAIRS = list(itertools.product(State, Move))

# Written out once more, from protocol §1 and §2: the table must say exactly this.
LEGAL = {
    ("queued", "claim"): "driven",
    ("driven", "claim"): "driven",
    ("driven", "suspend"): "suspended",
    ("suspended", "wake"): "queued",
    ("driven", "release"): "queued",
    ("driven", "reclaim"): "queued",
    ("driven", "settle"): "settled",
    ("queued", "kill"): "settled",
    ("suspended", "kill"): "settled",
}


@pytest.mark.parametrize(("state", "move"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_a_move_is_in_the_table_or_refused(state: State, move: Move) -> None:
    """protocol §2: a missing entry is the refusal."""
    assert TRANSITIONS.get((state, move)) == LEGAL.get((state.value, move.value))
    assert (state in departs(move)) == ((state.value, move.value) in LEGAL)


def test_nothing_leaves_settled() -> None:
    """P3: the first outcome wins."""
    assert not [move for move in Move if State.SETTLED in departs(move)]


@given(st.lists(st.sampled_from(Move), max_size=30))
def test_no_sequence_of_moves_does_what_none_of_them_may(moves: list[Move]) -> None:
    """protocol §2: driven by a claim alone, settled once and for good, and never a word that says otherwise."""
    state = State.QUEUED
    for move in moves:
        before, state = state, TRANSITIONS.get((state, move), state)
        if before is State.SETTLED:
            assert state is State.SETTLED
        elif state is not before:
            assert (state is State.DRIVEN) == (move is Move.CLAIM)
            assert (state is State.SETTLED) == (move in (Move.SETTLE, Move.KILL))
            assert (state is State.SUSPENDED) == (move is Move.SUSPEND)
        word = job_status(state, outcome="completed", kill_requested=False)
        assert (word == "completed") == (state is State.SETTLED)


@pytest.mark.parametrize("state", State)
def test_every_state_is_reached_from_the_queue(state: State) -> None:
    """A state nobody can enter is dead text."""
    assert state in reachable(State.QUEUED)


@pytest.mark.parametrize("state", State)
def test_every_state_leads_to_an_ending(state: State) -> None:
    """P6: nothing is left in a state it cannot leave."""
    assert State.SETTLED in reachable(state)


@pytest.mark.parametrize(
    ("state", "outcome", "killed", "word"),
    [
        (State.QUEUED, None, False, "queued"),
        (State.DRIVEN, None, False, "running"),
        (State.DRIVEN, None, True, "stopping"),
        (State.SUSPENDED, None, False, "running"),
        (State.SUSPENDED, None, True, "stopping"),
        (State.SETTLED, "completed", False, "completed"),
        (State.SETTLED, "completed", True, "completed"),
        (State.SETTLED, "killed", True, "killed"),
        (State.SETTLED, "failed", False, "failed"),
    ],
)
def test_a_run_has_one_public_word(state: State, outcome: str | None, killed: bool, word: str) -> None:
    """protocol §2: suspended counts as running, a kill that was not answered as stopping."""
    assert job_status(state, outcome=outcome, kill_requested=killed) == word  # pyright: ignore[reportArgumentType]  # parametrised text


def test_a_settled_run_without_an_outcome_has_no_word() -> None:
    """P3: settling and its outcome are one step, so this is a broken record and not a status."""
    with pytest.raises(ValueError, match="outcome"):
        job_status(State.SETTLED, outcome=None, kill_requested=False)


def reachable(start: State) -> set[State]:
    found, left = {start}, [start]
    while left:
        state = left.pop()
        following = {target for (source, _), target in TRANSITIONS.items() if source is state} - found
        found |= following
        left += following
    return found
