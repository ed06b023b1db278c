"""Runs in Redis: their records, inboxes and transcripts, each change one script.

Answers are the scripts' words; what they mean to a caller, a model or an operator is decided by the use cases.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from subagent_tasks.errors import UnreadableRecord, UnsupportedVersion
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
    refusing_broken,
)
from subagent_tasks.store.connection import Moves, pairs

logger = event_logger(__name__)

Refusal = Literal["conflict", "unknown_owner", "stop", "stale"]
RequeueWord = Literal["requeued", "unfinished", "completed", "no_prompt", "refused", "unknown", "unknown_owner"]
KillWord = Literal["killed", "requested", "already_finished", "not_lost", "unauthorized", "unknown"]


@dataclass(frozen=True, slots=True)
class Admission:
    """What `admit` answered: accepted, with the state the run is in by now, or why not."""

    word: Literal["accepted", "conflict", "refused", "unknown_owner", "stop", "stale"]
    state: str = ""
    cap: str = ""
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """What a settling move answered, and what follows: the owner is queued again, the run's descendants must end, and
    a process that took it over still holds it."""

    word: str
    wakes_owner: bool = False
    cascades: bool = False
    is_held: bool = False


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
        caller: str,
        token: int | None = None,
    ) -> Admission:
        """Accept a run, or answer why not; `message` is empty when the broker is another server.

        `caller` is the process that asks. `token` is the owner's, when that is a child whose driver asks.
        """
        max_depth = spec.request.max_depth
        stored = spec.model_copy(update={"request": spec.request.model_copy(update={"prompt": ""})})
        answer = await self._moves.run(
            scripts.ADMIT,
            keys={
                "record": self._keys.session(run_id),
                "inbox": self._keys.inbox(run_id),
                **self._owner_keys(owner, is_child=token is not None),
                "held": self._keys.held(caller),
                "cascade": self._keys.cascade,
                "queued": self._keys.queued(spec.queue),
                "queue": spec.queue,
            },
            args={
                "id": run_id,
                "owner_id": owner,
                "token": "" if token is None else token,
                "caller": caller,
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

    async def requeue(
        self, source: RunRecord, *, new_id: str, keep: Literal["all", "prompt"], message: str, max_active_jobs: int
    ) -> tuple[RequeueWord, str]:
        """Give a settled run's work to a new one: what came of it, and for `requeued` the run that has it."""
        queue = source.spec.queue
        # Its owner may be gone, and its caller with it: whoever has opened the tree is told how it ends.
        spec = source.spec.model_copy(update={"owner_queue": None})
        answer = await self._moves.run(
            scripts.REQUEUE,
            keys={
                "record": self._keys.session(new_id),
                "transcript": self._keys.transcript(new_id),
                "source": self._keys.session(source.id),
                "source_transcript": self._keys.transcript(source.id),
                **self._owner_keys(source.root, is_child=False),
                "queued": self._keys.queued(queue),
                "queue": queue,
            },
            args={
                "id": new_id,
                "source_id": source.id,
                "owner_id": source.root,
                "version": RECORD_VERSION,
                "digest": source.digest,
                "mode": "background",
                "caller": "",
                "max_active_jobs": max_active_jobs,
                "keep": keep,
                "message": message,
            },
            rest=("spec", spec.to_json(), "requeued_from", source.id),
        )
        return cast("RequeueWord", answer[0]), answer[1] if answer[0] == "requeued" else ""

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
                "cascade": self._keys.cascade,
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
                "cascade": self._keys.cascade,
            },
            args={"token": lease.token, "seq": seq, "step": step},
        )
        if answer[0] == "entries":
            with refusing_broken(f"the input of run {lease.run_id!r}"):
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
                "cascade": self._keys.cascade,
            },
            args={"token": lease.token, "seq": seq, "purpose": purpose},
            rest=flat,
        )
        return int(answer[1]) if answer[0] == "ok" else str(answer[0])

    async def suspend(
        self, lease: Lease, *, seq: int, awaited: Sequence[str], wake_at: int, alarm_ms: int
    ) -> Literal["suspended", "go_on", "stop", "stale"]:
        """Let go of a run until at most `wake_at` of the awaited runs are unsettled, no longer than `alarm_ms`."""
        answer = await self._moves.run(
            scripts.SUSPEND,
            keys={
                "record": self._keys.session(lease.run_id),
                "transcript": self._keys.transcript(lease.run_id),
                "driven": self._keys.driven(lease.worker),
                "own_unsettled": self._keys.unsettled(lease.run_id),
                "own_awaited": self._keys.awaited(lease.run_id),
                "alarms": self._keys.alarms,
            },
            args={"id": lease.run_id, "token": lease.token, "seq": seq, "wake_at": wake_at, "alarm": alarm_ms},
            rest=awaited,
        )
        return answer[0]

    async def wake(self, run_id: str, *, queue: str, alarm_ms: int, message: str) -> str:
        """Queue a suspended run whose alarm is due: `woken` or `moved_on`."""
        answer = await self._moves.run(
            scripts.WAKE,
            keys={
                "record": self._keys.session(run_id),
                "own_awaited": self._keys.awaited(run_id),
                "alarms": self._keys.alarms,
                "queued": self._keys.queued(queue),
                "queue": queue,
            },
            args={"id": run_id, "alarm": alarm_ms, "message": message},
        )
        return str(answer[0])

    async def settle(
        self,
        record: RunRecord,
        lease: Lease,
        *,
        on_behalf: Literal["driver", "sweeper"],
        ending: Ending,
        wake_message: str = "",
    ) -> Ended:
        """End a driven run: `settled`, `already`, `stale` or `unknown`."""
        answer = await self._moves.run(
            scripts.SETTLE,
            keys={
                **self._ending_keys(record),
                "driven": self._keys.driven(lease.worker),
            },
            args={
                "id": lease.run_id,
                "token": lease.token,
                "worker": lease.worker,
                "on_behalf": on_behalf,
                **self._ending_args(record, ending, wake_message),
            },
        )
        return _ended(answer)

    async def kill(
        self,
        record: RunRecord,
        *,
        kill_id: str,
        reason: str,
        authority: str,
        told: Literal["kill", ""],
        ending: Ending,
        wake_message: str = "",
        lost_caller: str = "",
        lease_ms: int = 0,
    ) -> Ended:
        """Kill a run, and say what came of it: a `KillWord`."""
        answer = await self._moves.run(
            scripts.KILL,
            keys=self._ending_keys(record),
            args={
                "id": record.id,
                "kill_id": kill_id,
                "reason": reason,
                "authority": authority,
                "told": told,
                "lost_caller": lost_caller,
                "lease_ms": lease_ms,
                "ring_prefix": self._keys.process_channel(""),
                **self._ending_args(record, ending, wake_message),
            },
        )
        return _ended(answer)

    async def cascaded(self, run_id: str) -> str:
        """Strike a run off the cascade, once all it had started has settled: `done` or `not_yet`."""
        answer = await self._moves.run(
            scripts.CASCADED,
            keys={"cascade": self._keys.cascade, "own_unsettled": self._keys.unsettled(run_id)},
            args={"id": run_id},
        )
        return str(answer[0])

    async def unsettled(self, owner: str) -> list[str]:
        """The owner's unsettled runs."""
        members = await self._moves.read(cast("Any", self._moves.client.smembers(self._keys.unsettled(owner))))
        return sorted(cast("set[str]", members))

    async def unhold(self, run_id: str, *, caller: str) -> str:
        """Forget that a process waited for a run that is over, or another process's by now: `forgotten` or `kept`."""
        answer = await self._moves.run(
            scripts.UNHOLD,
            keys={"record": self._keys.session(run_id), "held": self._keys.held(caller)},
            args={"id": run_id, "caller": caller},
        )
        return str(answer[0])

    async def held_by(self, process: str) -> list[str]:
        """The foreground runs that a host process waits for, or once did."""
        members = await self._moves.read(cast("Any", self._moves.client.smembers(self._keys.held(process))))
        return sorted(cast("set[str]", members))

    async def release(self, lease: Lease, *, queue: str, message: str, is_told: bool = False) -> str:
        """Hand a driven run back: `released`, `stop` (it was killed: settle it) or `stale`.

        `is_told`: its beginning was told to listeners, and is not to be told again.
        """
        answer = await self._moves.run(
            scripts.RELEASE,
            keys={
                "record": self._keys.session(lease.run_id),
                "driven": self._keys.driven(lease.worker),
                "queued": self._keys.queued(queue),
                "queue": queue,
            },
            args={
                "id": lease.run_id,
                "token": lease.token,
                "resting": "yes" if is_told else "",
                "message": message,
            },
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

    async def collect(
        self, run_id: str, *, owner: str, is_child: bool
    ) -> RunRecord | Literal["unauthorized", "unknown"]:
        """Read a job for its owner; a terminal reading withdraws the notice. `is_child`: the owner is one."""
        answer = await self._moves.run(
            scripts.COLLECT,
            keys={"record": self._keys.session(run_id), "notices": self._notices(owner, is_child=is_child)},
            args={"authority": owner},
        )
        if answer[0] == "job":
            return read_record(pairs(answer[1]))
        return cast('Literal["unauthorized", "unknown"]', answer[0])

    async def is_listed(self, run_id: str, *, owner: str) -> bool:
        """Whether the owner's index names the job; for one retention it does so beyond the record."""
        return await self._moves.read(self._moves.client.zscore(self._keys.jobs(owner), run_id)) is not None

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

        Left out are expired ones, and those whose record is broken or only read by a newer version.
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
        with refusing_broken(f"the transcript of run {run_id!r}"):
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

    async def queue_messages(self, queue: str, *, count: int) -> list[str]:
        """The messages in the Celery queue's list that are received next."""
        return await self._moves.read(cast("Any", self._moves.client.lrange(queue, -count, -1)))

    def _notices(self, owner: str, *, is_child: bool) -> str:
        return self._keys.inbox(owner) if is_child else self._keys.notices(owner)

    def _owner_keys(self, owner: str, *, is_child: bool) -> dict[str, str]:
        return {
            "owner": self._keys.session(owner),
            "jobs": self._keys.jobs(owner),
            "active": self._keys.active(owner),
            "unsettled": self._keys.unsettled(owner),
            "notices": self._notices(owner, is_child=is_child),
            "cursors": self._keys.cursors(owner),
        }

    def _ending_keys(self, record: RunRecord) -> dict[str, str]:
        run_id, owner, queue = record.id, record.owner, record.spec.queue
        # A parent session waits in no queue; the script does not touch these then.
        owner_queue = record.spec.owner_queue or queue
        return {
            "record": self._keys.session(run_id),
            "inbox": self._keys.inbox(run_id),
            "transcript": self._keys.transcript(run_id),
            "result": celery_result_key(run_id),
            "processes": self._keys.processes,
            "queued": self._keys.queued(queue),
            "flagged": self._keys.flagged,
            "own_jobs": self._keys.jobs(run_id),
            "own_unsettled": self._keys.unsettled(run_id),
            "own_awaited": self._keys.awaited(run_id),
            "alarms": self._keys.alarms,
            "cascade": self._keys.cascade,
            "held": self._keys.held(record.caller),
            **self._owner_keys(owner, is_child=record.is_owned_by_child),
            "awaited": self._keys.awaited(owner),
            "owner_queued": self._keys.queued(owner_queue),
            "owner_queue": owner_queue,
            "expiring": self._keys.expiring,
        }

    def _ending_args(self, record: RunRecord, ending: Ending, wake_message: str) -> dict[str, str | int]:
        return {
            **asdict(ending),
            "caller": record.caller,
            "owner_id": record.owner,
            "owner_channel": self._keys.session_channel(record.owner),
            "wake_message": wake_message,
            "retention_ms": self._retention_ms,
            "max_notices": self._max_notices,
        }


def _ended(answer: Sequence[str]) -> Ended:
    follows = answer[1].split() if answer[0] in ("settled", "killed", "requested") else ()
    return Ended(answer[0], wakes_owner="wake" in follows, cascades="cascade" in follows, is_held="unhold" in follows)


def _outcome(version: str | None, outcome: str | None) -> Outcome | None:
    if outcome is None:
        return None
    try:
        return None if int(version or 0) > RECORD_VERSION else Outcome.model_validate_json(outcome)
    except ValueError:
        # One that is broken must not keep the others from whoever waits for them.
        return None


def _readable(fields: Mapping[str, str]) -> JobSnapshot | None:
    if not fields.get("state"):
        return None
    try:
        return read_snapshot(fields)
    except (UnsupportedVersion, UnreadableRecord):
        # One record of a newer version, or a broken one, must not hide all the others.
        logger.warning("record that cannot be read left out", extra={"run_id": fields.get("id")})
        return None
