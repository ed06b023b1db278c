"""Heartbeats and what a process drives, in Redis. Redis time judges; nothing here compares a local clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from subagent_tasks.protocol import scripts
from subagent_tasks.protocol.keys import Keys
from subagent_tasks.store.connection import Moves


@dataclass(frozen=True, slots=True)
class BeatAnswer:
    """What a heartbeat learned: ids of this process with an unanswered kill, and all ids Redis says it drives."""

    flagged: frozenset[str]
    driven: frozenset[str]


@dataclass(frozen=True, slots=True)
class Sweep:
    """The right to sweep once, and what there is to see to.

    `dead` are processes whose heartbeat lapsed, `expired` index entries of expired jobs, `cascading` runs whose
    descendants must end, `alarms` suspended runs whose alarm is due, with its time. Times are Redis milliseconds.
    """

    now_ms: int
    dead: tuple[str, ...]
    expired: tuple[str, ...]
    cascading: tuple[str, ...]
    alarms: tuple[tuple[str, int], ...]


class ProcessStore:
    """Moves on processes of one namespace."""

    def __init__(self, moves: Moves, keys: Keys, *, lease_ms: int) -> None:
        self._moves = moves
        self._keys = keys
        self._lease_ms = lease_ms

    async def beat(self, process: str) -> BeatAnswer:
        """Prove life for one lease."""
        answer = await self._moves.run(
            scripts.BEAT,
            keys={
                "processes": self._keys.processes,
                "driven": self._keys.driven(process),
                "flagged": self._keys.flagged,
                "clock": self._keys.clock,
            },
            args={"process": process, "lease_ms": self._lease_ms},
        )
        return BeatAnswer(flagged=frozenset(answer[1]), driven=frozenset(answer[2]))

    async def retire(self, process: str, *, on_behalf: Literal["self", "sweeper"]) -> str:
        """Forget a process that drives nothing: `retired` or `still_needed`."""
        answer = await self._moves.run(
            scripts.RETIRE,
            keys={
                "processes": self._keys.processes,
                "driven": self._keys.driven(process),
                "held": self._keys.held(process),
            },
            args={"process": process, "on_behalf": on_behalf},
        )
        return str(answer[0])

    async def guard(self, process: str, *, hold_ms: int) -> Sweep | None:
        """The right to sweep now, or None: another process sweeps, or the server was away a moment ago."""
        answer: Sequence[Any] = await self._moves.run(
            scripts.GUARD,
            keys={
                "sweeper": self._keys.sweeper,
                "clock": self._keys.clock,
                "processes": self._keys.processes,
                "expiring": self._keys.expiring,
                "cascade": self._keys.cascade,
                "alarms": self._keys.alarms,
            },
            args={"process": process, "hold_ms": hold_ms, "lease_ms": self._lease_ms},
        )
        if answer[0] != "sweep":
            return None
        _, now_ms, dead, expired, cascading, alarms = answer
        return Sweep(
            now_ms=int(now_ms),
            dead=tuple(dead),
            expired=tuple(expired),
            cascading=tuple(cascading),
            alarms=tuple((run_id, int(float(at))) for run_id, at in zip(alarms[::2], alarms[1::2], strict=True)),
        )

    async def now_ms(self) -> int:
        """Redis time."""
        seconds, microseconds = await self._moves.read(self._moves.client.time())
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def alarms_before(self, moment_ms: int) -> list[int]:
        """The alarms of suspended runs that were due before that Redis time, the oldest thousand."""
        rows = cast(
            "list[tuple[str, float]]",
            await self._moves.read(
                self._moves.client.zrangebyscore(
                    self._keys.alarms, "-inf", moment_ms, start=0, num=1000, withscores=True
                )
            ),
        )
        return [int(due_ms) for _, due_ms in rows]

    async def driven_by(self, process: str) -> frozenset[str]:
        """The ids Redis says a process drives."""
        members = await self._moves.read(cast("Any", self._moves.client.smembers(self._keys.driven(process))))
        return frozenset(members)

    async def alive(self) -> dict[str, int]:
        """All known processes and the Redis time (ms) their heartbeat lapses."""
        rows = cast(
            "list[tuple[str, float]]",
            await self._moves.read(self._moves.client.zrange(self._keys.processes, 0, -1, withscores=True)),
        )
        return {process: int(lapses) for process, lapses in rows}
