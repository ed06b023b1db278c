"""The store as the use cases see it, over one server, with every answer of a script kept, and all keys as one dump.

Shorthands bring a run where a test needs it; what they assert on the way is tested in the files about those moves.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, cast

import redis.asyncio

from broker_config import BrokerSettings
from subagent_tasks.protocol.endings import Ending, EndingWriter
from subagent_tasks.protocol.keys import Keys, celery_result_key
from subagent_tasks.protocol.models import ChildRequest, ChildResult, InboxEntry, Mode, text_block
from subagent_tasks.protocol.outcomes import outcome_of
from subagent_tasks.protocol.records import RunRecord, RunSpec
from subagent_tasks.protocol.scripts import Script
from subagent_tasks.store.connection import Moves, connect
from subagent_tasks.store.processes import ProcessStore
from subagent_tasks.store.runs import Admission, Lease, RunStore
from subagent_tasks.store.sessions import SessionStore
from subagent_tasks.testing.faults import age_lease, end_outage

NAMESPACE = "store"
PARENT, RUN, WORKER, OTHER_WORKER, HOST = "parent", "run-1", "worker-1", "worker-2", "host-1"
OWN_RUN, OTHER_HOST = "own-run-1", "host-2"
QUEUE = f"{NAMESPACE}.subagents.spawn"
MAX_NOTICES = 5
LEASE_MS = 6_000
RETENTION_MS = 3_600_000


class RecordingMoves(Moves):
    """Keeps the last script and its raw answer."""

    last: tuple[str, list[Any]] = ("", [])

    async def run(
        self,
        script: Script,
        *,
        keys: Mapping[str, str],
        args: Mapping[str, str | int],
        rest: Sequence[str | int] = (),
    ) -> list[Any]:
        answer = await super().run(script, keys=keys, args=args, rest=rest)
        self.last = (script.name, answer)
        return answer


class Store:
    """All stores of one namespace, and shorthands for the moves that bring a run where a test needs it."""

    def __init__(self, url: str) -> None:
        settings = BrokerSettings(broker_url=url, namespace=NAMESPACE)
        self.keys = Keys(NAMESPACE)
        self.client: redis.asyncio.Redis = connect(settings)
        self.moves = RecordingMoves(self.client, settings)
        self.runs = RunStore(
            self.moves, self.keys, retention_ms=RETENTION_MS, slack_ms=LEASE_MS, max_notices=MAX_NOTICES
        )
        self.sessions = SessionStore(self.moves, self.keys, retention_ms=RETENTION_MS)
        self.processes = ProcessStore(self.moves, self.keys, lease_ms=LEASE_MS)

    async def close(self) -> None:
        await self.client.aclose()

    async def admit(
        self,
        run_id: str = RUN,
        *,
        owner: str = PARENT,
        mode: Mode = "background",
        prompt: str = "do it",
        max_depth: int | None = None,
        max_active_jobs: int = 10,
        caller: str = HOST,
        token: int | None = None,
    ) -> Admission:
        return await self.runs.admit(
            run_id,
            owner=owner,
            mode=mode,
            spec=spec(prompt=prompt, max_depth=max_depth, owner_queue=None if token is None else QUEUE),
            entry=InboxEntry(message_id=run_id, text=prompt),
            message=f"message of {run_id}",
            max_active_jobs=max_active_jobs,
            caller=caller,
            token=token,
        )

    async def claim(self, run_id: str = RUN, *, worker: str = WORKER, claim_id: str = "claim-1") -> RunRecord | str:
        return await self.runs.claim(run_id, queue=QUEUE, worker=worker, claim_id=claim_id)

    async def settle(
        self, lease: Lease, *, ending: Ending | None = None, on_behalf: Literal["driver", "sweeper"] = "driver"
    ) -> str:
        record = await self.runs.get(lease.run_id) or a_record(lease.run_id)
        ending = ending or await self.ending(lease.run_id, settle_id=f"{on_behalf}:{lease.token}")
        ended = await self.runs.settle(
            record, lease, on_behalf=on_behalf, ending=ending, wake_message="message after waking"
        )
        return ended.word

    async def kill(
        self,
        run_id: str = RUN,
        *,
        kill_id: str = "kill-1",
        authority: str = PARENT,
        told: Literal["kill", ""] = "",
        reason: str = "no longer needed",
        lost_caller: str = "",
    ) -> str:
        record = await self.runs.get(run_id) or a_record(run_id)
        ending = await self.ending(run_id, settle_id=f"kill:{kill_id}", killed=reason)
        ended = await self.runs.kill(
            record,
            kill_id=kill_id,
            reason=reason,
            authority=authority,
            told=told,
            ending=ending,
            wake_message="message after waking",
            lost_caller=lost_caller,
            lease_ms=LEASE_MS,
        )
        return ended.word

    async def requeue(
        self, new_id: str, *, source: str = RUN, keep: Literal["all", "prompt"] = "all", max_active_jobs: int = 10
    ) -> tuple[str, str]:
        record = await self.runs.get(source) or a_record(source)
        return await self.runs.requeue(
            record, new_id=new_id, keep=keep, message=f"message of {new_id}", max_active_jobs=max_active_jobs
        )

    async def release(self, lease: Lease) -> str:
        return await self.runs.release(lease, queue=QUEUE, message="message after a release")

    async def reclaim(self, lease: Lease) -> str:
        return await self.runs.reclaim(lease, queue=QUEUE, message="message after a loss")

    async def ending(
        self, run_id: str = RUN, *, settle_id: str = "driver:1", text: str = "done", killed: str | None = None
    ) -> Ending:
        """What a settlement writes; of a run that does not exist, that of a stand-in."""
        record = await self.runs.get(run_id) or a_record(run_id)
        result = None if killed else ChildResult(stop_reason="completed", output=(text_block(text),))
        outcome = outcome_of(result, kill_reason=killed)
        writer = EndingWriter(lambda: "2030-01-01T00:00:00+00:00", max_inline_bytes=65_536)
        return writer.write(record, outcome, settle_id=settle_id)

    async def queued(self, run_id: str = RUN, *, mode: Mode = "background") -> None:
        """An open parent session with one accepted run."""
        await self.sessions.open(PARENT)
        assert (await self.admit(run_id, mode=mode)).word == "accepted"

    async def driven(self, run_id: str = RUN, *, mode: Mode = "background", worker: str = WORKER) -> Lease:
        """A run that a living worker drives."""
        await self.queued(run_id, mode=mode)
        await self.processes.beat(worker)
        record = await self.claim(run_id, worker=worker)
        assert isinstance(record, RunRecord), record
        return Lease(run_id, record.token, worker)

    async def delegating(self, own_run: str = OWN_RUN, *, mode: Mode = "foreground") -> Lease:
        """A driven run that has started a run of its own."""
        lease = await self.driven()
        assert (await self.admit(own_run, owner=RUN, mode=mode, token=lease.token)).word == "accepted"
        return lease

    async def suspend(self, lease: Lease, *awaited: str, wake_at: int = 0, alarm_ms: int = 10**15) -> str:
        return await self.runs.suspend(lease, seq=0, awaited=awaited or (OWN_RUN,), wake_at=wake_at, alarm_ms=alarm_ms)

    async def suspended(self, *, alarm_ms: int = 10**15) -> Lease:
        """A run that waits for a run of its own. The lease is the one it gave up."""
        lease = await self.delegating()
        assert await self.suspend(lease, alarm_ms=alarm_ms) == "suspended"
        return lease

    async def own_run_driven(self) -> Lease:
        """A suspended run's own run, driven."""
        await self.suspended()
        record = await self.claim(OWN_RUN)
        assert isinstance(record, RunRecord), record
        return Lease(OWN_RUN, record.token, WORKER)

    async def orphaned(self, run_id: str = RUN, *, mode: Mode = "background") -> Lease:
        """A run whose worker fell silent."""
        lease = await self.driven(run_id, mode=mode)
        await self.age(lease.worker)
        return lease

    async def settled(self, run_id: str = RUN, *, mode: Mode = "background") -> Lease:
        """A run that its driver completed."""
        lease = await self.driven(run_id, mode=mode)
        assert await self.settle(lease) == "settled"
        return lease

    async def may_sweep(self) -> None:
        """A living host, and no outage lately."""
        await self.processes.beat(HOST)
        await end_outage(self.client, self.keys)

    async def age(self, process: str) -> None:
        await age_lease(self.client, self.keys, process)

    async def field(self, name: str, run_id: str = RUN) -> str | None:
        """One field of a session's record."""
        return cast("str | None", await cast("Any", self.client.hget(self.keys.session(run_id), name)))

    async def set_field(self, name: str, value: str | int, run_id: str = RUN) -> None:
        await cast("Any", self.client.hset(self.keys.session(run_id), name, value))

    async def messages(self) -> list[str]:
        """What lies in the Celery queue, next first."""
        return list(reversed(cast("list[str]", await cast("Any", self.client.lrange(QUEUE, 0, -1)))))

    async def has_lifetime(self, key: str) -> bool:
        """Whether an existing key will expire."""
        lifetime_ms = await self.client.pttl(key)
        assert lifetime_ms != -2, f"{key} does not exist"
        return lifetime_ms > 0

    async def dump(self) -> dict[str, tuple[str, bool, Any]]:
        """Every key: type, whether it has a lifetime, and its value with moments masked."""
        found: dict[str, tuple[str, bool, Any]] = {}
        for key in sorted(cast("list[str]", await self.client.keys("*"))):
            kind = cast("str", await self.client.type(key))
            found[key] = (kind, await self.client.ttl(key) != -1, masked(await self._value(kind, key)))
        return found

    async def _value(self, kind: str, key: str) -> Any:
        client = cast("Any", self.client)
        match kind:
            case "string":
                return await client.get(key)
            case "hash":
                return await client.hgetall(key)
            case "set":
                return sorted(await client.smembers(key))
            case "zset":
                # By member: scores of one moment tie, and their order is chance.
                return sorted(await client.zrange(key, 0, -1, withscores=True))
            case "list":
                return await client.lrange(key, 0, -1)
            case "stream":
                return await client.xrange(key, "-", "+")
            case _:
                raise AssertionError(f"{key} is a {kind}: no structure of ours")


@asynccontextmanager
async def listening(store: Store, *channels: str) -> AsyncGenerator[list[tuple[str, str]]]:
    """What is published on the channels within the block, all of it once the block is left."""
    heard: list[tuple[str, str]] = []
    pubsub = store.client.pubsub()
    await pubsub.subscribe(*channels, "end")
    for _ in range(len(channels) + 1):
        assert await pubsub.get_message(timeout=5)
    yield heard
    await store.client.publish("end", "end")
    while (message := cast("Any", await pubsub.get_message(timeout=5))) and message["channel"] != "end":
        heard.append((message["channel"], message["data"]))
    await cast("Any", pubsub).aclose()


async def celery_state(store: Store) -> str:
    """What plain Celery says of the run."""
    return str(json.loads(cast("str", await store.client.get(celery_result_key(RUN))))["status"])


def spec(*, prompt: str = "do it", max_depth: int | None = None, owner_queue: str | None = None) -> RunSpec:
    request = ChildRequest(label="a task", prompt=prompt, max_depth=max_depth)
    return RunSpec(
        provider="spawn", queue=QUEUE, label="a task", request=request, run_limit_seconds=60, owner_queue=owner_queue
    )


def a_record(run_id: str = RUN) -> RunRecord:
    """A queued job's record, for what needs one that is not there."""
    return RunRecord(
        id=run_id,
        owner=PARENT,
        root=PARENT,
        depth=1,
        mode="background",
        state=cast("Any", "queued"),
        token=0,
        seq=0,
        attempt=0,
        spec=spec(),
        created_at=0,
    )


def masked(value: Any) -> Any:
    """The value with Redis times, and stream ids made of them, replaced: two runs of one test differ in no more."""
    if isinstance(value, Mapping):
        return {str(key): masked(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [masked(item) for item in cast("Sequence[Any]", value)]
    if isinstance(value, int | float):
        return "<time>" if value > 1e12 else value
    if isinstance(value, str):
        return "<time>" if re.fullmatch(r"\d{13,16}(\.\d+)?(-\d+)?", value) else value
    return value
