"""Several processes over one server, on one event loop: each beats, sweeps, works and dies when a test says so.

Everything under test is real: executor, agent loop, the tools of children, sweeper, scripts. Only Celery is missing: a
test hands each message to a worker. Its `Line` holds a process up, or ends it, between any two of its moves.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import redis.asyncio
from driving_kit import OWNER, Told
from line import WAIT_SECONDS, Line

from broker_config import BrokerSettings
from subagent_tasks.app import SubagentApp
from subagent_tasks.delegation import Delegation
from subagent_tasks.execution import Executor
from subagent_tasks.host import Session
from subagent_tasks.process import fresh_ids
from subagent_tasks.protocol.keys import Keys
from subagent_tasks.protocol.lifecycle import State
from subagent_tasks.protocol.models import ChildRequest, Outcome, ToolResult, TranscriptEvent
from subagent_tasks.protocol.records import RunRecord, RunSpec, read_record
from subagent_tasks.providers import SpawnProvider
from subagent_tasks.queue.publisher import ScriptPublisher
from subagent_tasks.settling import Settler
from subagent_tasks.store.connection import connect
from subagent_tasks.store.doorbell import Doorbell
from subagent_tasks.store.processes import ProcessStore
from subagent_tasks.store.runs import RunStore
from subagent_tasks.store.sessions import SessionStore
from subagent_tasks.sweeper import Sweeper, Swept
from subagent_tasks.testing import assert_no_leaked_keys, assert_settled, wait_until
from subagent_tasks.testing.faults import age_lease, end_outage
from subagent_tasks.toolbox import Toolbox, ToolLike
from subagent_tasks.tools.calls import ToolServices
from subagent_tasks.tools.child_tools import ChildToolMaker
from subagent_tasks.tools.config import JobToolsConfig
from subagent_tasks.waiting import Waiting

LEASE_SECONDS = 60.0
"""Nobody beats in these tests but by hand, so that a lease never lapses by itself. Leases are aged, not waited for."""


class Member:
    """One process, as far as Redis can tell."""

    is_running = True

    def __init__(self, fleet: Fleet, process_id: str, *, url: str | None = None) -> None:
        self.id = process_id
        self.fleet = fleet
        self.settings = fleet.settings.model_copy(update={"broker_url": url}) if url else fleet.settings
        self.keys, self.ids, publisher = fleet.keys, fresh_ids(), NamingPublisher()
        client = connect(self.settings)
        self.line = Line(client, self.settings)
        lease_ms, retention_ms = int(self.settings.lease_seconds * 1000), int(self.settings.retention_seconds * 1000)
        self.runs = RunStore(self.line, self.keys, retention_ms=retention_ms, slack_ms=lease_ms, max_notices=100)
        self.sessions = SessionStore(self.line, self.keys, retention_ms=retention_ms)
        self.processes = ProcessStore(self.line, self.keys, lease_ms=lease_ms)
        self.settler = Settler(runs=self.runs, publisher=publisher, settings=self.settings, ids=self.ids)
        self.delegation = Delegation(
            runs=self.runs, settler=self.settler, publisher=publisher, settings=self.settings, process_id=self.id
        )
        self.doorbell = Doorbell(self.settings)
        self.waiting = Waiting(runs=self.runs, doorbell=self.doorbell, keys=self.keys, recheck_seconds=0.5)
        self.sweeper = Sweeper(
            runs=self.runs,
            processes=self.processes,
            settler=self.settler,
            publisher=publisher,
            settings=self.settings,
            process_id=self.id,
            ids=self.ids,
            queues=[fleet.queue],
        )
        self.executor = Executor(
            runs=self.runs,
            providers=fleet.app.providers,
            tools_of=ChildToolMaker(fleet.toolbox, fleet.own_tools, self.services).tools_of,
            settler=self.settler,
            publisher=publisher,
            settings=self.settings,
            process_id=self.id,
            ids=self.ids,
            listener=fleet.told,
        )
        self._client = client
        self._tasks: list[asyncio.Task[Any]] = []

    @property
    def services(self) -> ToolServices:
        return ToolServices(
            delegation=self.delegation, waiting=self.waiting, settings=self.settings, new_id=self.ids.new
        )

    async def start(self) -> None:
        await self.beat()
        await self.doorbell.listen(
            self.keys.process_channel(self.id), lambda run_id: self.executor.ring(run_id) if run_id else None
        )
        self._spawn(self.waiting.run())

    async def beat(self) -> None:
        """One heartbeat, told to the executor."""
        answer = await self.processes.beat(self.id)
        self.executor.on_beat(flagged=answer.flagged, driven=answer.driven)

    async def session(self) -> Session:
        """The parent session, open in this process."""
        await self.sessions.open(OWNER)
        await self.waiting.attach(OWNER)
        return Session(
            OWNER,
            reader="main",
            process=cast("Any", self),
            tools=self.fleet.own_tools,
            providers={},
            job_tools=JobToolsConfig(),
        )

    async def call(self, prompt: str, *, call_id: str, **arguments: Any) -> asyncio.Task[ToolResult]:
        """Let the parent session delegate from this process."""
        session = await self.session()
        arguments = {"description": "a task", "prompt": prompt, **arguments}
        return self._spawn(session.call("subagent", arguments, call_id=call_id))

    def take(self, run_id: str) -> asyncio.Task[None]:
        """Handle one Celery message of the run."""
        return self._spawn(self.executor.activate(run_id, self.fleet.queue))

    async def sweep(self) -> Swept:
        """One sweep by this process, which lives, right now."""
        await self.processes.beat(self.id)
        await end_outage(self.fleet.client, self.keys)
        await self.fleet.client.delete(self.keys.sweeper)
        swept = await asyncio.wait_for(self.sweeper.sweep_once(), WAIT_SECONDS)
        assert swept.ran
        return swept

    async def die(self) -> None:
        """kill -9, and nobody has noticed yet: what it was about to do never happens."""
        self.line.cut()
        await self._end()

    async def stop(self) -> None:
        """Leave in order, as `Process.stop` does."""
        await self.waiting.close()
        await self.delegation.close()
        await self.processes.retire(self.id, on_behalf="self")
        await self.die()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait_for(asyncio.gather(*self._tasks, return_exceptions=True), WAIT_SECONDS)
        self._tasks.clear()
        await self.doorbell.close()
        await self._client.aclose()

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.append(task)
        return task


class NamingPublisher(ScriptPublisher):
    """A message is the id of its run, so that a test can read the queue."""

    def message(self, run_id: str, *, queue: str, task_id: str) -> str:
        return run_id


class Fleet:
    """The processes of one namespace, and what all of them did together."""

    def __init__(self, url: str, provider: SpawnProvider, tools: Sequence[ToolLike], settings: dict[str, Any]) -> None:
        given: dict[str, Any] = {
            "lease_seconds": LEASE_SECONDS,
            "namespace": f"test-{uuid.uuid4().hex[:12]}",
            **settings,
        }
        self.settings = BrokerSettings(broker_url=url, **given)
        self.keys = Keys(self.settings.namespace)
        self.client = redis.asyncio.Redis.from_url(self.settings.redis_py_url, decode_responses=True)
        self.told = Told()
        self.app = SubagentApp(self.settings)
        self.app.add_provider(provider)
        self.app.add_delegation_tool(provider="spawn", max_depth=5)
        self.app.add_job_tools()
        self.own_tools, self.queue = self.app.tools(), self.app.queues[0]
        self.toolbox = Toolbox()
        for tool in tools:
            self.toolbox.add(tool, taken=frozenset())
        self.members: dict[str, Member] = {}

    async def member(self, process_id: str, *, url: str | None = None) -> Member:
        """A new process of the fleet."""
        member = self.members[process_id] = Member(self, process_id, url=url)
        await member.start()
        return member

    async def accept(self, by: Member, run_id: str, *, prompt: str) -> None:
        """Admit a job of the parent session."""
        spec = RunSpec(
            provider="spawn",
            queue=self.queue,
            label="a task",
            request=ChildRequest(label="a task", prompt=prompt, max_depth=5),
            run_limit_seconds=600,
        )
        await by.delegation.start(run_id, owner=OWNER, mode="background", spec=spec)

    async def bury(self, dead: Member, *, by: Member) -> Swept:
        """Find a dead process."""
        await age_lease(self.client, self.keys, dead.id)
        return await by.sweep()

    async def silence(self, member: Member, *, leases: float) -> None:
        """Let a process's last beat be so many leases ago; a beat counts for one of them."""
        seconds, microseconds = await self.client.time()
        lapsed_ms = (leases - 1) * self.settings.lease_seconds * 1000
        at_ms = seconds * 1000 + microseconds // 1000 - int(lapsed_ms)
        await self.client.zadd(self.keys.processes, {member.id: at_ms})

    async def messages(self) -> list[str]:
        """The runs whose messages lie in the queue, next first."""
        return list(reversed(cast("list[str]", await cast("Any", self.client.lrange(self.queue, 0, -1)))))

    async def hand(self, run_id: str, worker: Member) -> asyncio.Task[None]:
        """Take the run's message out of the queue and give it to a worker; the task ends with the drive."""
        assert await cast("Any", self.client.lrem(self.queue, -1, run_id)), f"{run_id} is not among the messages"
        return worker.take(run_id)

    async def drive(self, run_id: str, worker: Member) -> None:
        """As `hand`, to the drive's end."""
        await asyncio.wait_for(await self.hand(run_id, worker), WAIT_SECONDS)

    async def work(self, worker: Member) -> None:
        """Hand the worker one message after the other, as they come, each to its end, while it works."""
        while (messages := await self.messages()) and not worker.line.has_stopped:
            await self.drive(messages[0], worker)

    async def lose_message(self, run_id: str) -> None:
        """The run's message is lost, and was long enough ago to be missed."""
        assert await cast("Any", self.client.lrem(self.queue, -1, run_id)), f"{run_id} is not among the messages"
        await self.miss(run_id)

    async def miss(self, *run_ids: str) -> None:
        """Let queued runs have waited for longer than anybody holds a message."""
        for run_id in run_ids:
            await self.client.zadd(self.keys.queued(self.queue), {run_id: 1_000}, xx=True)

    async def record(self, run_id: str) -> RunRecord:
        fields = cast("dict[str, str]", await cast("Any", self.client.hgetall(self.keys.session(run_id))))
        assert fields, f"{run_id} is unknown"
        return read_record(fields)

    async def state(self, run_id: str) -> State:
        return (await self.record(run_id)).state

    async def reaches(self, run_id: str, state: State) -> None:
        async def there() -> bool:
            return await self.state(run_id) is state

        await wait_until(there, description=f"{run_id} is {state}")

    async def outcome(self, run_id: str) -> Outcome:
        record = await self.record(run_id)
        assert record.outcome is not None, f"{run_id} is {record.state}"
        return record.outcome

    async def own_runs(self, run_id: str) -> list[str]:
        """The unsettled runs that a run has started."""
        return sorted(cast("set[str]", await cast("Any", self.client.smembers(self.keys.unsettled(run_id)))))

    async def own_run(self, run_id: str) -> str:
        (own_run,) = await self.own_runs(run_id)
        return own_run

    async def transcript(self, run_id: str) -> list[TranscriptEvent]:
        reader = next(member for member in self.members.values() if not member.line.has_stopped)
        return await reader.runs.transcript(run_id)

    async def results(self, run_id: str) -> list[str]:
        """What the run's model was told of its calls, in the order it was written down."""
        events = await self.transcript(run_id)
        return [str(event.data["content"]) for event in events if event.kind == "tool_result"]

    async def runs(self) -> set[str]:
        """All runs there ever were."""
        prefix = self.keys.session("")
        keys = cast("list[str]", await self.client.keys(f"{prefix}*"))
        return {key.removeprefix(prefix) for key in keys} - {OWNER}

    async def kept(self) -> dict[str, Any]:
        """All that is kept of runs and sessions: every key but those that tell which processes live."""
        client = cast("Any", self.client)
        read: dict[str, Callable[[str], Any]] = {
            "string": client.get,
            "hash": client.hgetall,
            "set": client.smembers,
            "list": lambda key: client.lrange(key, 0, -1),
            "zset": lambda key: client.zrange(key, 0, -1, withscores=True),
            "stream": client.xrange,
        }
        of_processes = (self.keys.processes, self.keys.clock, self.keys.sweeper)
        return {
            key: await read[await client.type(key)](key)
            for key in sorted(await client.keys("*"))
            if key not in of_processes
        }

    async def see_off(self) -> None:
        """Let a living process find all the dead ones: what they left behind is theirs until then."""
        living = [member for member in self.members.values() if not member.line.is_cut]
        for process_id, member in self.members.items():
            if member.line.is_cut and await self.client.zscore(self.keys.processes, process_id) is not None:
                await self.bury(member, by=living[0])


@asynccontextmanager
async def fleet_on(
    url: str, provider: SpawnProvider, *, tools: Sequence[ToolLike] = (), **settings: Any
) -> AsyncGenerator[Fleet]:
    """A fleet whose members a test makes. At the end nothing is unsettled and no key leaks."""
    fleet = Fleet(url, provider, tools, settings)
    await fleet.client.flushdb()
    try:
        yield fleet
        await fleet.see_off()
        await assert_settled(fleet.client, fleet.settings.namespace)
        await assert_no_leaked_keys(fleet.client, fleet.settings.namespace)
    finally:
        for member in fleet.members.values():
            await member.die()
        await fleet.client.flushdb()
        await fleet.client.aclose()
