"""`python tests/chaos --seconds 60 --seed 1`: mixed delegations while everything fails, and at the end every promise.

Three worker processes, two hosts, one server. Exit code 1 if anything does not hold; the logs are kept then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import checks
import redis.asyncio
import redis.exceptions
from celery.result import AsyncResult
from havoc import Havoc, Toll
from load import Ledger, Load
from rich.console import Console
from rich.table import Table

from broker_config import EmbeddedServer
from subagent_tasks.protocol.keys import Keys
from subagent_tasks.protocol.leases import CALLER_LOST, WORKER_LOST
from subagent_tasks.protocol.models import TranscriptEvent
from subagent_tasks.protocol.records import RunRecord, read_record
from subagent_tasks.testing import FaultyServer, assert_no_leaked_keys, assert_settled, wait_until

LEASE_SECONDS = 1.5
MAX_ACTIVE_JOBS = 4
SESSIONS, LANES = 3, 2
"""Of each host, and of each session."""
END_SECONDS = 90.0
"""How long all that is under way may take to end once nothing fails any more."""


@dataclass
class Verdict:
    """What a run came to."""

    ledger: Ledger
    toll: Toll
    facts: checks.Facts
    broken: dict[str, list[str]]
    most_active: int
    replies_lost: int
    seconds: float


async def run(*, seconds: float, seed: int, directory: Path, stack: ExitStack) -> Verdict:
    """Everything, from the first process to the last check."""
    began = time.monotonic()
    server = stack.enter_context(EmbeddedServer())
    links = [stack.enter_context(FaultyServer(server.url)) for _ in range(3)]
    namespace = f"chaos-{os.getpid()}"
    environment = {
        "SUBAGENT_TASKS_NAMESPACE": namespace,
        "SUBAGENT_TASKS_LEASE_SECONDS": str(LEASE_SECONDS),
        "SUBAGENT_TASKS_MAX_ACTIVE_JOBS": str(MAX_ACTIVE_JOBS),
        # Below the freezes of the server: hosts are to meet calls of which nobody knows whether they were accepted.
        "SUBAGENT_TASKS_REDIS_TIMEOUT_SECONDS": "1",
        "CHAOS_NOTES": str(directory / "notes"),
    }
    keys, ledger = Keys(namespace), Ledger()
    havoc = Havoc(
        seed=seed,
        server=server,
        links=links,
        worker_environment={**environment, "SUBAGENT_TASKS_BROKER_URL": links[0].url},
        keys=keys,
        lease_seconds=LEASE_SECONDS,
        stack=stack,
        logs=directory,
    )
    await havoc.start_workers()
    loads = [
        Load(app_behind(link, environment), ledger, name=f"host-{number}-", sessions=SESSIONS, lanes=LANES)
        for number, link in enumerate(links[1:])
    ]
    all_told = asyncio.Event()
    client = redis.asyncio.Redis.from_url(server.url, decode_responses=True)
    sampler = Sampler(client, keys, ledger)
    async with asyncio.TaskGroup() as hosts:
        for load in loads:
            hosts.create_task(load.run(until_told=all_told))
        sampling = asyncio.create_task(sampler.run())
        await havoc.rage(seconds)
        for load in loads:
            load.stop()
        for load in loads:
            await load.done.wait()
        broken = {"left over": await ended(client, namespace)}
        facts = await facts_of(client, keys, directory / "notes", sessions=ledger.sessions)
        with contextlib.suppress(AssertionError):
            await wait_until(lambda: not any(checks.untold(ledger, facts)), description="all told", timeout_seconds=10)
        all_told.set()
        sampling.cancel()
    codes = await asyncio.to_thread(havoc.stop_workers)
    broken |= {
        "lost": list(checks.lost(ledger, facts)) + havoc.toll.never_taken,
        "untold": list(checks.untold(ledger, facts)),
        "told wrongly or twice": [
            *checks.told_wrongly(ledger, facts),
            *checks.told_wrongly_to_children(facts),
        ],
        "ended without a reason": list(checks.ended_without_a_reason(ledger, facts)),
        "doubled": list(checks.doubled(facts)),
        "skipped": list(checks.skipped(facts)),
        "caps exceeded": [*checks.too_deep(facts), *sampler.exceeded],
        "workers that did not end well": [f"exit code {code}" for code in codes if code],
    }
    await client.aclose()
    lost_replies = sum(link.replies_lost for link in links)
    return Verdict(ledger, havoc.toll, facts, broken, sampler.most, lost_replies, time.monotonic() - began)


def app_behind(link: FaultyServer, environment: dict[str, str]) -> Any:
    """The declaration as a host of that link imports it: one app each, as in processes of their own."""
    sys.modules.pop("chaos_agents", None)
    os.environ.update(environment, SUBAGENT_TASKS_BROKER_URL=link.url)
    import chaos_agents  # noqa: PLC0415 - it reads the environment when it is imported

    return chaos_agents.app


class Sampler:
    """Counts, in one step each, how many unsettled jobs every session owns."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys, ledger: Ledger) -> None:
        self._client = client
        self._keys = keys
        self._ledger = ledger
        self.most = 0
        self.exceeded: list[str] = []

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            for session_id in self._ledger.sessions:
                try:
                    count = int(
                        await cast(
                            "Any", self._client.eval(_UNSETTLED, 2, self._keys.jobs(session_id), self._keys.session(""))
                        )
                    )
                except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
                    continue
                self.most = max(self.most, count)
                if count > MAX_ACTIVE_JOBS:
                    self.exceeded.append(f"{session_id} owned {count} unsettled jobs")


_UNSETTLED = """
local count = 0
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], -50, -1)) do
  local state = redis.call('HGET', KEYS[2] .. id, 'state')
  if state and state ~= 'settled' then count = count + 1 end
end
return count
"""


async def ended(client: redis.asyncio.Redis, namespace: str) -> list[str]:
    """Wait until nothing is unsettled and no key is left that should not be; what still is, if it takes too long."""
    deadline = time.monotonic() + END_SECONDS
    while True:
        try:
            await assert_settled(client, namespace)
            await assert_no_leaked_keys(client, namespace)
        except (AssertionError, redis.exceptions.ConnectionError) as error:
            if time.monotonic() > deadline:
                return [str(error)]
            await asyncio.sleep(0.5)
        else:
            return []


async def facts_of(client: redis.asyncio.Redis, keys: Keys, notes: Path, *, sessions: Sequence[str]) -> checks.Facts:
    """Read everything there is."""
    reader: Any = client
    records: dict[str, Any] = {}
    transcripts: dict[str, list[TranscriptEvent]] = {}
    async for key in reader.scan_iter(match=f"{keys.session('')}*", count=1000):
        fields = await reader.hgetall(key)
        if not fields.get("state"):
            continue
        record = records[fields["id"]] = read_record(fields)
        transcripts[record.id] = [
            TranscriptEvent(seq=number, kind=entry["k"], data=json.loads(entry["d"]))
            for number, (_, entry) in enumerate(await reader.xrange(keys.transcript(record.id)))
        ]
    kept = [
        json.loads(entry["n"])["senderId"]
        for session_id in sessions
        for _, entry in await reader.xrange(keys.notices(session_id))
    ]
    celery = await asyncio.to_thread(celery_states, records)
    lines = await asyncio.to_thread(notes.read_text)
    return checks.Facts(records, celery, transcripts, Counter(lines.splitlines()), Counter(kept))


def celery_states(run_ids: Iterable[str]) -> dict[str, str]:
    """As plain Celery tells them."""
    celery = sys.modules["chaos_agents"].celery
    return {run_id: AsyncResult(run_id, app=celery).state for run_id in run_ids}


def show(verdict: Verdict, *, seconds: float, seed: int) -> None:
    """The table, and whatever does not hold."""
    console = Console(width=110, highlight=False)
    table = Table(title=f"chaos, {seconds:g} s, seed {seed}", title_justify="left", show_header=False)
    ledger, toll, records = verdict.ledger, verdict.toll, verdict.facts.records
    table.add_row("delegated by hosts", f"{sum(entry.accepted for entry in ledger.entries)}")
    table.add_row("refused at the cap", f"{sum(entry.refused is not None for entry in ledger.entries)}")
    table.add_row("runs, children's own included", f"{len(records)}")
    for kind, outcomes in kinds_of(records.values()).items():
        table.add_row(f"  {kind}", ", ".join(f"{count} {status}" for status, count in sorted(outcomes.items())))
    details = Counter(record.outcome.detail for record in records.values() if record.outcome)
    for detail in (WORKER_LOST, CALLER_LOST):
        table.add_row(f"  ended because of a {detail}", f"{details[detail]}")
    table.add_row("tool calls carried out", f"{verdict.facts.notes.total()}")
    table.add_row("  of unknown effect", f"{unknown_effects(verdict.facts)}")
    table.add_row("calls repeated by hosts", f"{ledger.repeated}")
    table.add_row("most unsettled jobs of a session", f"{verdict.most_active} of {MAX_ACTIVE_JOBS}")
    for name, count in sorted(toll.counts.items()):
        table.add_row(name, f"{count}")
    table.add_row("replies lost", f"{verdict.replies_lost}")
    table.add_row("kill to running again", spread([took for _, took in toll.takeovers]))
    table.add_row("  while the server was well", spread(toll.takeovers_when_well(lease_seconds=LEASE_SECONDS)))
    for name, broken in verdict.broken.items():
        table.add_row(name, f"{len(broken)}")
    table.add_row("took", f"{verdict.seconds:.0f} s")
    console.print(table)
    for name, broken in verdict.broken.items():
        for line in broken[:20]:
            console.print(f"{name}: {line}", soft_wrap=True)


def kinds_of(records: Iterable[RunRecord]) -> dict[str, Counter[str]]:
    """How the runs ended, by mode and depth."""
    kinds: dict[str, Counter[str]] = {}
    for record in sorted(records, key=lambda record: (record.depth, record.mode)):
        kind = f"{record.mode}, depth {record.depth}"
        kinds.setdefault(kind, Counter())[record.outcome.status if record.outcome else record.state] += 1
    return kinds


def unknown_effects(facts: checks.Facts) -> int:
    return sum(event.data.get("effect") == "unknown" for events in facts.transcripts.values() for event in events)


def spread(seconds: Sequence[float]) -> str:
    if len(seconds) < 2:
        return f"{len(seconds)} runs"
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return f"{len(seconds)} runs: p50 {cuts[49]:.2f} s, p99 {cuts[98]:.2f} s (lease {LEASE_SECONDS} s)"


def main() -> None:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="chaos-"))
    logging.basicConfig(filename=directory / "hosts.log", level=logging.INFO)
    with ExitStack() as stack:
        verdict = asyncio.run(run(seconds=options.seconds, seed=options.seed, directory=directory, stack=stack))
    show(verdict, seconds=options.seconds, seed=options.seed)
    if any(verdict.broken.values()):
        print(f"logs: {directory}")
        sys.exit(1)
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
