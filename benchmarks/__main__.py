"""The command line: `python -m benchmarks [--quick]`. Runs the parts one after another and shows what they found."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.delays import measure_delays
from benchmarks.latency import measure_round_trips
from benchmarks.machine import load_average, machine_facts
from benchmarks.memory import measure_memory
from benchmarks.outstanding import measure_outstanding
from benchmarks.report import (
    Line,
    delay_lines,
    drain_lines,
    live_lines,
    memory_lines,
    outstanding_lines,
    print_report,
    round_trip_lines,
    traffic_lines,
    tree_lines,
    waiting_lines,
    write_json,
)
from benchmarks.stage import Stage, open_stage
from benchmarks.throughput import measure_drain, measure_live
from benchmarks.traffic import measure_traffic
from benchmarks.trees import measure_trees
from benchmarks.waiting import measure_waiting

TABLE_WIDTH = 134
PARTS = ("round-trips", "drain", "live", "delays", "traffic", "memory", "waiting", "outstanding", "trees")


@dataclass(frozen=True, slots=True)
class Options:
    """How much is measured. The defaults take about five minutes on two cores."""

    round_trip_rounds: int = 4
    round_trip_calls: int = 100
    drain_rounds: int = 3
    drain_count: int = 3000
    live_rounds: int = 3
    live_count: int = 2000
    live_in_flight: int = 200
    delay_jobs: int = 300
    kills: int = 300
    traffic_count: int = 50
    idle_seconds: float = 6.0
    waiting_count: int = 1000
    hold_seconds: float = 3.0
    outstanding_count: int = 5000
    tree_rounds: int = 2
    trees: int = 20


QUICK = Options(
    round_trip_rounds=2,
    round_trip_calls=50,
    drain_rounds=1,
    drain_count=1000,
    live_rounds=1,
    live_count=500,
    live_in_flight=100,
    delay_jobs=50,
    kills=50,
    traffic_count=20,
    idle_seconds=4.0,
    waiting_count=200,
    hold_seconds=1.0,
    outstanding_count=500,
    tree_rounds=1,
    trees=5,
)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON file. Ends with code 0 whatever the numbers are."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer calls and rounds: a minute or two, rough numbers")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part only; may be repeated")
    parser.add_argument("--output", type=Path, default=Path("bench-results.json"), help="where the JSON goes")
    given = parser.parse_args(words)
    console, options, parts = _console(), QUICK if given.quick else Options(), given.only or PARTS
    begun = time.monotonic()
    facts: dict[str, Any] = {**machine_facts(), "load_before": load_average()}
    with open_stage() as stage:
        lines, details = asyncio.run(_measure(stage, options, parts, console))
    facts["seconds"] = round(time.monotonic() - begun)
    print_report(lines, facts=facts, notes=_notes(lines, details, cores=facts["cores"]), console=console)
    write_json(given.output, lines, facts=facts, options=asdict(options), details=details)
    console.print(f"Details: {given.output}")


def _console() -> Console:
    console = Console()
    # A pipe has no width; the table's own is right there.
    return console if console.is_terminal else Console(width=TABLE_WIDTH)


async def _measure(
    stage: Stage, options: Options, parts: Sequence[str], console: Console
) -> tuple[list[Line], dict[str, Any]]:
    lines: list[Line] = []
    details: dict[str, Any] = {}
    for part in parts:
        console.print(f"measuring {part} …", style="dim")
        match part:
            case "round-trips":
                trips = await measure_round_trips(
                    stage, rounds=options.round_trip_rounds, calls=options.round_trip_calls
                )
                lines += round_trip_lines(trips)
            case "drain":
                rates = await measure_drain(stage, rounds=options.drain_rounds, count=options.drain_count)
                lines += drain_lines(rates)
            case "live":
                rates = await measure_live(
                    stage, rounds=options.live_rounds, count=options.live_count, in_flight=options.live_in_flight
                )
                lines += live_lines(rates, in_flight=options.live_in_flight)
            case "delays":
                delays = await measure_delays(stage, jobs=options.delay_jobs, kills=options.kills)
                lines += delay_lines(delays)
                details["stuck_kills"] = delays.stuck_kills
            case "traffic":
                traffic = await measure_traffic(stage, count=options.traffic_count, idle_seconds=options.idle_seconds)
                lines += traffic_lines(traffic)
                details["round_trips_by_name"] = {kind: found.round_trips for kind, found in traffic.kinds.items()}
            case "memory":
                lines += memory_lines(await measure_memory(stage))
            case "waiting":
                waits = await measure_waiting(stage, count=options.waiting_count, hold_seconds=options.hold_seconds)
                lines += waiting_lines(waits)
            case "trees":
                lines += tree_lines(await measure_trees(stage, rounds=options.tree_rounds, trees=options.trees))
            case _:
                outstanding = await measure_outstanding(stage, count=options.outstanding_count)
                lines += outstanding_lines(outstanding)
    return lines, details


def _notes(lines: Sequence[Line], details: dict[str, Any], *, cores: int) -> list[str]:
    """Where the round trips go, and where the time goes when the throughput is below raw Celery's."""
    notes = [
        f"Round trips, {kind}: " + ", ".join(f"{name} {number:g}" for name, number in names.items())
        for kind, names in details.get("round_trips_by_name", {}).items()
    ]
    found = {line.name: line for line in lines}
    drained = found.get("backlog drained")
    if drained is not None and drained.is_met is False:
        workers, server = found["CPU of the workers, per no-op"], found["CPU of the server, per no-op"]
        for side, of_workers, of_server in (
            ("ours", workers.ours, server.ours),
            ("raw", workers.baseline or workers.ours, server.baseline or server.ours),
        ):
            most = cores * 1000 / (of_workers.value + of_server.value)
            notes.append(
                f"Where the time goes, {side}: {of_workers.value:.2f} ms of CPU in the workers and "
                f"{of_server.value:.2f} ms in the server for each no-op; {cores} cores full of that are {most:.0f}/s"
            )
    return notes


if __name__ == "__main__":
    main()
