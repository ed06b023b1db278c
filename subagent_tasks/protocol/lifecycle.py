"""The lifecycle of a session that is run: one table for one-shot runs and continuable children alike.

    queued ──claim──► driven ──settle──► settled
      ▲                │ ▲ │
      ├──release───────┤ │ └──suspend──► suspended
      ├──reclaim───────┘ └──claim (driver is dead)
      └──wake──────────────────────────── suspended

A move is legal from the states listed for it and from no other; a missing entry is the refusal. The scripts are
compare-and-set: they are told which states they may leave by this table (`departs`), so the table is the only truth.
`suspended` (a child that waits for its own child) counts as running for everyone who asks.
"""

from __future__ import annotations

from enum import StrEnum

from subagent_tasks.protocol.models import JobStatus


class State(StrEnum):
    """Where a run stands."""

    QUEUED = "queued"
    DRIVEN = "driven"
    SUSPENDED = "suspended"
    SETTLED = "settled"


class Move(StrEnum):
    """Every change of a run's state (protocol §1)."""

    CLAIM = "claim"
    SUSPEND = "suspend"
    WAKE = "wake"
    RELEASE = "release"
    RECLAIM = "reclaim"
    SETTLE = "settle"
    KILL = "kill"


TRANSITIONS: dict[tuple[State, Move], State] = {
    (State.QUEUED, Move.CLAIM): State.DRIVEN,
    (State.DRIVEN, Move.CLAIM): State.DRIVEN,
    (State.DRIVEN, Move.SUSPEND): State.SUSPENDED,
    (State.SUSPENDED, Move.WAKE): State.QUEUED,
    (State.DRIVEN, Move.RELEASE): State.QUEUED,
    (State.DRIVEN, Move.RECLAIM): State.QUEUED,
    (State.DRIVEN, Move.SETTLE): State.SETTLED,
    (State.QUEUED, Move.KILL): State.SETTLED,
    (State.SUSPENDED, Move.KILL): State.SETTLED,
}


def departs(move: Move) -> frozenset[State]:
    """The states `move` may leave."""
    return frozenset(state for state, candidate in TRANSITIONS if candidate is move)


def job_status(state: State, *, outcome: JobStatus | None, kill_requested: bool) -> JobStatus:
    """The public word for a run (protocol §2): what `job_list` and `job_output` say."""
    match state:
        case State.QUEUED:
            return "queued"
        case State.DRIVEN | State.SUSPENDED:
            return "stopping" if kill_requested else "running"
        case State.SETTLED:
            if outcome is None:
                raise ValueError("a settled run has an outcome; the record holds none")
            return outcome
