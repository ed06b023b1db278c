"""What an operator's look at a namespace reads: processes, queues, and the runs that are unsettled or ended lately.

Reading only, in batches, and never an outcome or a prompt: ten thousand settled runs cost three small fields each,
once. Every bound says when it cut something. What it all means is decided in `subagent_tasks.overview`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

from broker_config import BrokerSettings
from subagent_tasks.errors import UnreadableRecord, UnsupportedVersion
from subagent_tasks.protocol.keys import Keys
from subagent_tasks.protocol.lifecycle import State
from subagent_tasks.protocol.models import JobStatus
from subagent_tasks.protocol.records import RunRecord, read_record, read_snapshot
from subagent_tasks.store.connection import Moves, connect

SCAN_COUNT = 2500
MAX_SCANS = 400
"""A million keys: on a server that holds more, what is unsettled may be missed, and that is said."""
MAX_RECORDS = 50_000
MAX_UNSETTLED = 2000
MAX_ENDED = 100
MAX_LAST_EVENTS = 50
BATCH = 500

# What `read_record` reads, but for the outcome, which may be large, and the digest.
FIELDS = (
    "version",
    "status",
    *(field.name for field in dataclasses.fields(RunRecord) if field.name not in ("outcome", "digest")),
)


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """A process that beat, the Redis time (ms) its heartbeat lapses or lapsed, and how many runs are in its name."""

    id: str
    lapses_at_ms: int
    driven: int


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """How many runs wait in a queue, and since when (ms) the first of them."""

    name: str
    waiting: int
    oldest_since_ms: int | None


@dataclass(frozen=True, slots=True)
class LastEvent:
    """The newest entry of a transcript: its kind and time (ms), and where a tool was called or returned, its name."""

    kind: str
    at_ms: int
    tool_name: str | None = None


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A run's record without its outcome, its public state, and for what a worker drives the last event."""

    record: RunRecord
    status: JobStatus
    last: LastEvent | None = None


@dataclass(frozen=True, slots=True)
class Omissions:
    """What the bounds left out: numbers of runs, and whether the server has more keys than were looked at."""

    unsettled: int = 0
    ended: int = 0
    unread: int = 0
    unreadable: int = 0
    keys: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """One look, at the Redis time `now_ms`. Among the runs are the owners of those that were looked for."""

    now_ms: int
    processes: tuple[ProcessFacts, ...]
    queues: tuple[QueueFacts, ...]
    runs: tuple[RunFacts, ...]
    omissions: Omissions = Omissions()


@asynccontextmanager
async def open_overview(settings: BrokerSettings) -> AsyncGenerator[OverviewStore]:
    """A reader with a connection of its own."""
    client = connect(settings, max_connections=1)
    try:
        yield OverviewStore(Moves(client, settings), Keys(settings.namespace))
    finally:
        await client.aclose()


class OverviewStore:
    """Looks at one namespace, as often as asked; what ended long ago is not looked at twice."""

    def __init__(self, moves: Moves, keys: Keys) -> None:
        self._moves = moves
        self._keys = keys
        self._passed: set[str] = set()
        self._last: dict[str, tuple[int, LastEvent]] = {}

    async def kind(self, session_id: str) -> str | None:
        """What the id names: `parent`, `one-shot`, or None for nothing."""
        return await self._moves.read(cast("Any", self._moves.client.hget(self._keys.session(session_id), "kind")))

    async def waiting_queues(self) -> list[str]:
        """The queues in which anything waits."""
        found, _ = await self._scan()
        return found["queued"]

    async def read(self, *, recent_ms: int) -> Facts:
        """Everything unsettled, and what ended within `recent_ms`. Raises `BrokerUnavailable`."""
        found, keys_cut = await self._scan()
        owners = await self._batched(found["unsettled"], lambda pipe, owner: pipe.smembers(self._keys.unsettled(owner)))
        unsettled_ids = {str(run_id) for members in owners for run_id in members}
        chosen, omissions = await self._choose(found["session"], unsettled_ids, recent_ms=recent_ms)
        records, unreadable = await self._records(chosen)
        # Last: a worker that started meanwhile must not count as gone.
        now_ms, processes = await self._processes()
        queues = await self._queues({*found["queued"], *(run.record.spec.queue for run in records.values())})
        await self._add_last_events(records)
        return Facts(
            now_ms=now_ms,
            processes=processes,
            queues=queues,
            runs=tuple(records.values()),
            omissions=dataclasses.replace(omissions, unreadable=unreadable, keys=keys_cut),
        )

    async def _scan(self) -> tuple[dict[str, list[str]], bool]:
        """The names behind the keys of three kinds, by kind, and whether there are keys that were not looked at."""
        found: dict[str, set[str]] = {"session": set(), "unsettled": set(), "queued": set()}
        prefix = self._keys.session("").removesuffix("session:")
        cursor = 0
        for _ in range(MAX_SCANS):
            # One pass for all three; the class of first letters spares most other names the way here.
            cursor, names = cast(
                "tuple[int, list[str]]",
                await self._moves.read(self._moves.client.scan(cursor, match=f"{prefix}[suq]*", count=SCAN_COUNT)),
            )
            for name in names:
                kind, _, rest = name.removeprefix(prefix).partition(":")
                if kind in found and rest:
                    found[kind].add(rest)
            if cursor == 0:
                break
        return {kind: sorted(names) for kind, names in found.items()}, cursor != 0

    async def _choose(
        self, sessions: Sequence[str], unsettled_ids: set[str], *, recent_ms: int
    ) -> tuple[list[str], Omissions]:
        """The runs to show: the oldest unsettled ones and the ones that ended last."""
        unknown = [name for name in sessions if name not in self._passed and name not in unsettled_ids]
        looked_at = [*sorted(unsettled_ids), *unknown[:MAX_RECORDS]]
        since_ms = await self._now_ms() - recent_ms
        unsettled: list[tuple[int, str]] = []
        ended: list[tuple[int, str]] = []
        answers = await self._batched(
            looked_at,
            lambda pipe, name: pipe.hmget(self._keys.session(name), ["state", "created_at", "finished_at"]),
        )
        for name, (state, created_at, finished_at) in zip(looked_at, answers, strict=True):
            if state is not None and state != State.SETTLED:
                unsettled.append((int(created_at or 0), name))
            elif state is not None and int(finished_at or 0) >= since_ms:
                ended.append((-int(finished_at or 0), name))
            else:
                # A parent's, or of a run that ended long ago: neither comes back.
                self._passed.add(name)
        chosen = [name for _, name in (*sorted(unsettled)[:MAX_UNSETTLED], *sorted(ended)[:MAX_ENDED])]
        return chosen, Omissions(
            unsettled=max(0, len(unsettled) - MAX_UNSETTLED),
            ended=max(0, len(ended) - MAX_ENDED),
            unread=max(0, len(unknown) - MAX_RECORDS),
        )

    async def _records(self, chosen: Sequence[str]) -> tuple[dict[str, RunFacts], int]:
        """The runs and, so that each hangs below its parent, their owners up to the session; and how many have no
        record that this version reads."""
        runs: dict[str, RunFacts] = {}
        asked: set[str] = set()
        unreadable = 0
        wanted = list(chosen)
        while wanted:
            asked.update(wanted)
            answers = await self._batched(wanted, lambda pipe, name: pipe.hmget(self._keys.session(name), FIELDS))
            for answer in answers:
                fields = {name: value for name, value in zip(FIELDS, answer, strict=True) if value is not None}
                if not fields.get("state"):
                    continue
                try:
                    record = read_record(fields)
                    runs[record.id] = RunFacts(record, read_snapshot(fields).status)
                except (UnsupportedVersion, UnreadableRecord):
                    # One record that cannot be read must not hide all the others.
                    unreadable += 1
            owners = {run.record.owner for run in runs.values() if run.record.owner != run.record.root}
            wanted = sorted(owners - asked)
        return runs, unreadable

    async def _add_last_events(self, runs: dict[str, RunFacts]) -> None:
        """What the runs that are driven longest are at."""
        driven = sorted(
            (run.record for run in runs.values() if run.record.state is State.DRIVEN and run.record.seq > 0),
            key=lambda record: record.claimed_at or 0,
        )[:MAX_LAST_EVENTS]
        known = {record.id: self._last[record.id] for record in driven if record.id in self._last}
        # An entry may hold a long prompt or tool result: it is read again only when there is a newer one.
        changed = [record for record in driven if known.get(record.id, (0,))[0] != record.seq]
        answers = await self._batched(
            [record.id for record in changed],
            lambda pipe, name: pipe.xrevrange(self._keys.transcript(name), count=1),
        )
        for record, entries in zip(changed, answers, strict=True):
            for entry_id, fields in entries:
                known[record.id] = (int(entry_id.partition("-")[0]), _last_event(fields))
        self._last = known
        for run_id, (_, last) in known.items():
            runs[run_id] = dataclasses.replace(runs[run_id], last=last)

    async def _processes(self) -> tuple[int, tuple[ProcessFacts, ...]]:
        rows = cast(
            "list[tuple[str, float]]",
            await self._moves.read(self._moves.client.zrange(self._keys.processes, 0, -1, withscores=True)),
        )
        counts = await self._batched([name for name, _ in rows], lambda pipe, name: pipe.scard(self._keys.driven(name)))
        facts = tuple(
            ProcessFacts(name, int(lapses_at_ms), int(count))
            for (name, lapses_at_ms), count in zip(rows, counts, strict=True)
        )
        return await self._now_ms(), facts

    async def _queues(self, names: Iterable[str]) -> tuple[QueueFacts, ...]:
        queues = sorted(names)
        lengths = await self._batched(queues, lambda pipe, name: pipe.zcard(self._keys.queued(name)))
        firsts = await self._batched(
            queues, lambda pipe, name: pipe.zrange(self._keys.queued(name), 0, 0, withscores=True)
        )
        return tuple(
            QueueFacts(name, int(length), int(first[0][1]) if first else None)
            for name, length, first in zip(queues, lengths, firsts, strict=True)
        )

    async def _now_ms(self) -> int:
        seconds, microseconds = await self._moves.read(self._moves.client.time())
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def _batched(self, names: Sequence[str], ask: Callable[[Any, str], object]) -> list[Any]:
        """One answer for each name, `BATCH` of them in a round trip."""
        answers: list[Any] = []
        for start in range(0, len(names), BATCH):
            pipeline = self._moves.client.pipeline(transaction=False)
            for name in names[start : start + BATCH]:
                ask(pipeline, name)
            answers += await self._moves.read(pipeline.execute())
        return answers


def _last_event(fields: dict[str, str]) -> LastEvent:
    is_of_a_tool = fields["k"] in ("tool_call", "tool_result")
    tool_name = json.loads(fields["d"]).get("tool_name") if is_of_a_tool else None
    return LastEvent(fields["k"], int(float(fields["t"])), None if tool_name is None else str(tool_name))
