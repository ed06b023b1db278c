"""Runs in Redis: their records, inboxes and transcripts, each change one script.

Answers are the scripts' words; what they mean to a caller, a model or an operator is decided by the use cases.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from subagent_tasks.errors import UnsupportedVersion
from subagent_tasks.logs import event_logger
from subagent_tasks.protocol import scripts
from subagent_tasks.protocol.endings import Ending
from subagent_tasks.protocol.interfaces import NewEvent
from subagent_tasks.protocol.keys import Keys, celery_result_key
from subagent_tasks.protocol.models import InboxEntry, JobSnapshot, Mode, Outcome, TranscriptEvent
from subagent_tasks.protocol.records import (
    LISTED,
    RECORD_VERSION,
    RunRecord,
    RunSpec,
    celery_result,
    read_record,
    read_snapshot,
)
from subagent_tasks.store.connection import Moves, pairs

logger = event_logger(__name__)

Refusal = Literal["conflict", "unknown_owner"]
KillWord = Literal["killed", "requested", "already_finished", "unauthorized", "unknown"]


@dataclass(frozen=True, slots=True)
class Admission:
    """What `admit` answered: accepted, with the state the run is in by now, or why not."""

    word: Literal["accepted", "conflict", "refused", "unknown_owner"]
    state: str = ""
    cap: str = ""
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to drive one run: what every write of a driver presents."""

    run_id: str
    token: int
    worker: str


class RunStore:
    """All moves on runs of one namespace. `queue_key` is the Celery queue's list."""

    def __init__(self, moves: Moves, keys: Keys, *, retention_ms: int, slack_ms: int, max_notices: int) -> None:
        self._moves = moves
        self._keys = keys
        self._retention_ms = retention_ms
        self._max_notices = max_notices
        self._slack_ms = slack_ms

    async def admit(
        self,
        run_id: str,
        *,
        owner: str,
        mode: Mode,
        spec: RunSpec,
        entry: InboxEntry,
        message: str,
        max_active_jobs: int,
    ) -> Admission:
        """Accept a run, or answer why not; `message` is empty when the broker is another server."""
        max_depth = spec.request.max_depth
        stored = spec.model_copy(update={"request": spec.request.model_copy(update={"prompt": ""})})
        answer = await self._moves.run(
            scripts.ADMIT,
            keys={
                "record": self._keys.session(run_id),
                "inbox": self._keys.inbox(run_id),
                **self._owner_keys(owner),
                "queued": self._keys.queued(spec.queue),
                "queue": spec.queue,
            },
            args={
                "id": run_id,
                "owner_id": owner,
                "version": RECORD_VERSION,
                "digest": spec.digest(mode=mode),
                "mode": mode,
                "max_active_jobs": max_active_jobs,
                "max_depth": "" if max_depth is None else max_depth,
                "entry": entry.to_json(),
                "message": message,
            },
            rest=("spec", stored.to_json()),
        )
        word, *details = answer
        if word == "accepted":
            return Admission("accepted", state=str(details[0]))
        if word == "refused":
            return Admission("refused", cap=details[0], details=tuple(str(item) for item in details[1:]))
        return Admission(cast("Refusal", word))

    async def claim(self, run_id: str, *, queue: str, worker: str, claim_id: str) -> RunRecord | str:
        """Become the driver: the record with its new token, or the word why there is nothing to do."""
        answer = await self._moves.run(
            scripts.CLAIM,
            keys={
                "record": self._keys.session(run_id),
                "result": celery_result_key(run_id),
                "processes": self._keys.processes,
                "driven": self._keys.driven(worker),
                "queued": self._keys.queued(queue),
                "overtaken": self._keys.overtaken(queue),
            },
            args={
                "id": run_id,
                "worker": worker,
                "claim_id": claim_id,
                "version": RECORD_VERSION,
                "started": celery_result(run_id, state="STARTED"),
                "slack_ms": self._slack_ms,
            },
        )
        return read_record(pairs(answer[2])) if answer[0] == "claimed" else str(answer[1])

    async def take(self, lease: Lease, *, seq: int, step: Literal["first", "later"]) -> tuple[InboxEntry, ...] | str:
        """Move input into the transcript: the entries, or `stop` or `stale`."""
        answer = await self._moves.run(
            scripts.TAKE,
            keys={
                "record": self._keys.session(lease.run_id),
                "inbox": self._keys.inbox(lease.run_id),
                "transcript": self._keys.transcript(lease.run_id),
            },
            args={"token": lease.token, "seq": seq, "step": step},
        )
        if answer[0] == "entries":
            return tuple(InboxEntry.model_validate_json(text) for text in answer[1])
        return str(answer[0])

    async def append(
        self, lease: Lease, *, seq: int, purpose: Literal["announce", "record"], events: Sequence[NewEvent]
    ) -> int | str:
        """Write events: the transcript's new length, or `stop` or `stale`."""
        flat = [text for event in events for text in (event.kind, json.dumps(event.data))]
        answer = await self._moves.run(
            scripts.APPEND,
            keys={
                "record": self._keys.session(lease.run_id),
                "transcript": self._keys.transcript(lease.run_id),
            },
            args={"token": lease.token, "seq": seq, "purpose": purpose},
            rest=flat,
        )
        return int(answer[1]) if answer[0] == "ok" else str(answer[0])

    async def settle(
        self, lease: Lease, *, owner: str, queue: str, on_behalf: Literal["driver", "sweeper"], ending: Ending
    ) -> str:
        """End a driven run: `settled`, `already`, `stale` or `unknown`."""
        answer = await self._moves.run(
            scripts.SETTLE,
            keys={
                **self._ending_keys(lease.run_id, owner=owner, queue=queue),
                "processes": self._keys.processes,
                "driven": self._keys.driven(lease.worker),
            },
            args={
                "id": lease.run_id,
                "token": lease.token,
                "worker": lease.worker,
                "on_behalf": on_behalf,
                **self._ending_args(owner, ending),
            },
        )
        return str(answer[0])

    async def kill(
        self,
        run_id: str,
        *,
        kill_id: str,
        owner: str,
        queue: str,
        reason: str,
        authority: str,
        told: Literal["kill", ""],
        ending: Ending,
    ) -> KillWord:
        """Kill a run, and say what came of it."""
        answer = await self._moves.run(
            scripts.KILL,
            keys=self._ending_keys(run_id, owner=owner, queue=queue),
            args={
                "id": run_id,
                "kill_id": kill_id,
                "reason": reason,
                "authority": authority,
                "told": told,
                "ring_prefix": self._keys.process_channel(""),
                **self._ending_args(owner, ending),
            },
        )
        return cast("KillWord", answer[0])

    async def release(self, lease: Lease, *, queue: str, message: str) -> str:
        """Hand a driven run back: `released`, `stop` (it was killed: settle it) or `stale`."""
        answer = await self._moves.run(
            scripts.RELEASE,
            keys={
                "record": self._keys.session(lease.run_id),
                "driven": self._keys.driven(lease.worker),
                "queued": self._keys.queued(queue),
                "queue": queue,
            },
            args={"id": lease.run_id, "token": lease.token, "message": message},
        )
        return str(answer[0])

    async def reclaim(self, lease: Lease, *, queue: str, message: str) -> str:
        """Queue a dead worker's run again: `requeued`, `stop` or `not_driven`. The lease is the dead worker's."""
        answer = await self._moves.run(
            scripts.RECLAIM,
            keys={
                "record": self._keys.session(lease.run_id),
                "processes": self._keys.processes,
                "driven": self._keys.driven(lease.worker),
                "queued": self._keys.queued(queue),
                "queue": queue,
            },
            args={"id": lease.run_id, "worker": lease.worker, "token": lease.token, "message": message},
        )
        return str(answer[0])

    async def republish(self, run_id: str, *, queue: str, since_ms: int, message: str) -> str:
        """Send the message of queued work again: `republished` or `moved_on`."""
        answer = await self._moves.run(
            scripts.REPUBLISH,
            keys={
                "record": self._keys.session(run_id),
                "queued": self._keys.queued(queue),
                "queue": queue,
            },
            args={"id": run_id, "since_ms": since_ms, "message": message},
        )
        return str(answer[0])

    async def collect(self, run_id: str, *, owner: str) -> RunRecord | Literal["unauthorized", "unknown"]:
        """Read a job for its owner; a terminal reading withdraws the notice."""
        answer = await self._moves.run(
            scripts.COLLECT,
            keys={"record": self._keys.session(run_id), "notices": self._keys.notices(owner)},
            args={"authority": owner},
        )
        if answer[0] == "job":
            return read_record(pairs(answer[1]))
        return cast('Literal["unauthorized", "unknown"]', answer[0])

    async def forget(self, run_id: str, *, owner: str, expiry: str) -> None:
        """Drop an expired job from its owner's index; one that was admitted again stays."""
        await self._moves.run(
            scripts.FORGET,
            keys={
                "record": self._keys.session(run_id),
                "expiring": self._keys.expiring,
                "jobs": self._keys.jobs(owner),
            },
            args={"id": run_id, "expiry": expiry},
        )

    async def get(self, run_id: str) -> RunRecord | None:
        """The record as it stands, or None when there is none or the id is a parent session's."""
        fields = cast("dict[str, str]", await self._moves.read(self._moves.client.hgetall(self._keys.session(run_id))))
        return read_record(fields) if fields.get("state") else None

    async def outcomes(self, run_ids: Sequence[str]) -> list[Outcome | None]:
        """The outcomes of several runs in one round trip; None where there is none yet, or none that can be read."""
        pipeline = self._moves.client.pipeline(transaction=False)
        for run_id in run_ids:
            pipeline.hmget(self._keys.session(run_id), ["version", "outcome"])
        answers = cast("list[list[str | None]]", await self._moves.read(pipeline.execute()))
        return [_outcome(*answer) for answer in answers]

    async def jobs(self, owner: str) -> list[JobSnapshot]:
        """The owner's jobs in the order they were registered, without their outputs.

        Left out are expired ones, and those whose record only a newer version reads.
        """
        ids = cast("list[str]", await self._moves.read(self._moves.client.zrange(self._keys.jobs(owner), 0, -1)))
        pipeline = self._moves.client.pipeline(transaction=False)
        for run_id in ids:
            pipeline.hmget(self._keys.session(run_id), LISTED)
        answers = cast("list[list[str | None]]", await self._moves.read(pipeline.execute()))
        listed = [
            {name: value for name, value in zip(LISTED, answer, strict=True) if value is not None} for answer in answers
        ]
        return [job for fields in listed if (job := _readable(fields)) is not None]

    async def transcript(self, run_id: str, *, after: int = 0) -> list[TranscriptEvent]:
        """The events from position `after` on."""
        entries = cast(
            "list[tuple[str, dict[str, str]]]",
            await self._moves.read(self._moves.client.xrange(self._keys.transcript(run_id), f"{after + 1}-0", "+")),
        )
        return [
            TranscriptEvent(
                seq=int(entry_id.partition("-")[0]) - 1,
                at_ms=int(float(fields["t"])),
                kind=fields["k"],
                data=json.loads(fields["d"]),
            )
            for entry_id, fields in entries
        ]

    async def queued(self, queue: str) -> list[tuple[str, int]]:
        """What waits in a queue, oldest first, with the Redis time (ms) since when."""
        waiting = cast(
            "list[tuple[str, float]]",
            await self._moves.read(self._moves.client.zrange(self._keys.queued(queue), 0, 999, withscores=True)),
        )
        return [(run_id, int(since)) for run_id, since in waiting]

    async def overtaken_before_ms(self, queue: str, *, now_ms: int) -> int:
        """The newest queue time that was claimed at least the slack ago: older work still queued lost its message."""
        mark = await self._moves.read(self._moves.client.hgetall(self._keys.overtaken(queue)))
        if not mark:
            return 0
        age = now_ms - int(float(mark["at"]))
        field = "high" if age >= 2 * self._slack_ms else "pending" if age >= self._slack_ms else "confirmed"
        return int(float(mark[field]))

    async def queue_length(self, queue: str) -> int:
        """How many messages lie in the Celery queue's list."""
        return int(await self._moves.read(cast("Any", self._moves.client.llen(queue))))

    def _owner_keys(self, owner: str) -> dict[str, str]:
        return {
            "owner": self._keys.session(owner),
            "jobs": self._keys.jobs(owner),
            "active": self._keys.active(owner),
            "unsettled": self._keys.unsettled(owner),
            "notices": self._keys.notices(owner),
            "cursors": self._keys.cursors(owner),
        }

    def _ending_keys(self, run_id: str, *, owner: str, queue: str) -> dict[str, str]:
        return {
            "record": self._keys.session(run_id),
            "inbox": self._keys.inbox(run_id),
            "transcript": self._keys.transcript(run_id),
            "result": celery_result_key(run_id),
            "queued": self._keys.queued(queue),
            "flagged": self._keys.flagged,
            **self._owner_keys(owner),
            "expiring": self._keys.expiring,
        }

    def _ending_args(self, owner: str, ending: Ending) -> dict[str, str | int]:
        return {
            **asdict(ending),
            "owner_channel": self._keys.session_channel(owner),
            "retention_ms": self._retention_ms,
            "max_notices": self._max_notices,
        }


def _outcome(version: str | None, outcome: str | None) -> Outcome | None:
    if outcome is None or int(version or 0) > RECORD_VERSION:
        return None
    return Outcome.model_validate_json(outcome)


def _readable(fields: Mapping[str, str]) -> JobSnapshot | None:
    if not fields.get("state"):
        return None
    try:
        return read_snapshot(fields)
    except UnsupportedVersion:
        # One record of a newer version must not hide all the others.
        logger.warning("record of a newer version left out", extra={"run_id": fields.get("id")})
        return None
