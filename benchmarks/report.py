"""What was measured, as lines with their targets: one table for people, one JSON file for machines."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.delays import Delays
from benchmarks.latency import RoundTrips
from benchmarks.memory import Memory
from benchmarks.outstanding import Outstanding
from benchmarks.samples import Figure, median_of, p50, p99, percentile
from benchmarks.throughput import Cost, Rates
from benchmarks.traffic import Traffic
from benchmarks.trees import DEPTH, FAN_OUT, Trees
from benchmarks.waiting import Waits


@dataclass(frozen=True, slots=True)
class Line:
    """One line: ours, beside what the group compares with where that has such a thing: raw Celery, unless it says so.

    `is_met` is None without a target.
    """

    group: str
    name: str
    unit: str
    ours: Figure
    baseline: Figure | None = None
    target: str = ""
    is_met: bool | None = None

    @property
    def ratio(self) -> float | None:
        """Ours to the baseline's, of the shown values."""
        return self.ours.value / self.baseline.value if self.baseline is not None and self.baseline.value else None


def round_trip_lines(found: RoundTrips) -> list[Line]:
    group = "round trip, one at a time"
    foreground, raw = p50(found.foreground_ms), p50(found.raw_ms)
    return [
        Line(
            group,
            "foreground p50",
            "ms",
            foreground,
            raw,
            target="≤ 2 × raw",
            is_met=foreground.value <= 2 * raw.value,
        ),
        Line(group, "foreground p99", "ms", p99(found.foreground_ms), p99(found.raw_ms)),
        Line(group, "one-shot job p50", "ms", p50(found.job_ms), raw),
        Line(group, "one-shot job p99", "ms", p99(found.job_ms), p99(found.raw_ms)),
        Line(group, "start call p50", "ms", p50(found.start_ms), p50(found.raw_start_ms)),
    ]


def drain_lines(found: Rates) -> list[Line]:
    group = "throughput, two worker processes"
    ours, raw = median_of(found.ours), median_of(found.raw)
    return [
        Line(group, "backlog drained", "/s", ours, raw, target="≥ raw", is_met=ours.value >= raw.value),
        Line(group, "CPU of the workers, per no-op", "ms", _worker_cost(found.our_cpu), _worker_cost(found.raw_cpu)),
        Line(group, "CPU of the server, per no-op", "ms", _server_cost(found.our_cpu), _server_cost(found.raw_cpu)),
    ]


def live_lines(found: Rates, *, in_flight: int) -> list[Line]:
    name = f"live, {in_flight} foreground calls in flight"
    return [Line("throughput, two worker processes", name, "/s", median_of(found.ours), median_of(found.raw))]


def delay_lines(found: Delays) -> list[Line]:
    lines: list[Line] = []
    for name, values, limit_ms in (
        ("start to claim", found.start_to_claim_ms, 50),
        ("settle to notice", found.settle_to_notice_ms, 50),
        ("kill to stopped", found.kill_to_stopped_ms, 1000),
    ):
        tail = Figure(percentile(values, 99))
        lines.append(Line("delays", f"{name} p50", "ms", Figure(percentile(values, 50))))
        lines.append(
            Line(
                "delays",
                f"{name} p99",
                "ms",
                tail,
                target=f"< {limit_ms} ms" if limit_ms < 1000 else "< 1 s",
                is_met=tail.value < limit_ms,
            )
        )
    stuck = len(found.stuck_kills)
    name = f"kills stuck, of {len(found.kill_to_stopped_ms) + stuck}"
    return [*lines, Line("delays", name, "", Figure(stuck), target="0", is_met=stuck == 0)]


def traffic_lines(found: Traffic) -> list[Line]:
    group = "Redis, per delegation"
    raw = found.kinds["raw"]
    lines = [
        Line(
            group,
            "start call, round trips",
            "",
            Figure(found.start_call_sends),
            target="1",
            is_met=found.start_call_sends == 1,
        ),
        Line(group, "foreground call, round trips of the host", "", Figure(found.foreground_call_sends)),
    ]
    for kind, name in (("foreground", "foreground"), ("job", "one-shot job")):
        ours = found.kinds[kind]
        lines.append(Line(group, f"{name}: round trips of all", "", Figure(ours.total), Figure(raw.total)))
        lines.append(Line(group, f"{name}: commands inside scripts", "", Figure(ours.inside_scripts)))
    return lines


def memory_lines(found: Memory) -> list[Line]:
    group = "memory, idle"
    return [
        Line(group, "one worker (raw: prefork -c 2)", "MiB", Figure(found.our_worker), Figure(found.raw_worker)),
        Line(group, "one host", "MiB", Figure(found.our_host), Figure(found.raw_host)),
    ]


def waiting_lines(found: Waits) -> list[Line]:
    group = f"{found.count} children waiting, beside a bare loop"
    ours, bare = found.ours, found.bare
    return [
        Line(
            group,
            "waited at once",
            "",
            Figure(ours.waited),
            Figure(bare.waited),
            target=str(found.count),
            is_met=ours.waited == found.count,
        ),
        Line(
            group,
            "answered",
            "",
            Figure(found.answered),
            target=str(found.count),
            is_met=found.answered == found.count,
        ),
        Line(
            group,
            "begun more than once",
            "",
            Figure(found.begun_again),
            target="0",
            is_met=found.begun_again == 0,
        ),
        Line(
            group,
            "memory per child, over the idle process",
            "MiB",
            Figure(ours.mib_per_child),
            Figure(bare.mib_per_child),
            target="< 0.3 MiB",
            is_met=ours.mib_per_child < 0.3,
        ),
        Line(
            group,
            "CPU per child",
            "ms",
            Figure(ours.cpu_ms_per_child),
            Figure(bare.cpu_ms_per_child),
            target="≤ 2 × bare",
            is_met=ours.cpu_ms_per_child <= 2 * bare.cpu_ms_per_child,
        ),
        Line(
            group,
            "wall time, first start to last answer",
            "s",
            Figure(ours.wall_seconds),
            Figure(bare.wall_seconds),
            target="≤ bare + 20 s",
            is_met=ours.wall_seconds <= bare.wall_seconds + 20,
        ),
        Line(
            group,
            "CPU while all wait, of one core",
            "%",
            Figure(ours.waiting_cpu_percent),
            Figure(bare.waiting_cpu_percent),
        ),
    ]


def outstanding_lines(found: Outstanding) -> list[Line]:
    group = f"{found.count} results awaited by one host"
    return [
        Line(
            group,
            "connections that listen",
            "",
            Figure(found.listening),
            target="1",
            is_met=found.listening == 1,
        ),
        Line(group, "connections to Redis, all", "", Figure(found.connections)),
        Line(
            group,
            "results that came",
            "",
            Figure(found.resolved),
            target=str(found.count),
            is_met=found.resolved == found.count,
        ),
        Line(group, "settle to known p50", "ms", Figure(percentile(found.settle_to_known_ms, 50))),
        Line(group, "settle to known p99", "ms", Figure(percentile(found.settle_to_known_ms, 99))),
        Line(group, "last settled to last known", "ms", Figure(found.last_settle_to_last_known_ms)),
        Line(group, "wall time, a worker's start included", "s", Figure(found.wall_seconds)),
    ]


def tree_lines(found: Trees) -> list[Line]:
    group = f"trees {DEPTH} deep, {FAN_OUT} wide, beside flat ones"
    return [
        Line(group, "trees", "/s", found.trees_per_second),
        Line(group, "children", "/s", found.runs_per_second, found.flat_per_second),
        Line(group, "CPU of the worker, per child", "ms", found.cpu_ms, found.flat_cpu_ms),
    ]


def print_report(lines: Sequence[Line], *, facts: dict[str, Any], notes: Sequence[str], console: Console) -> None:
    """The table, a section per group, and below it what needs a sentence."""
    table = Table(title="subagent-tasks beside raw Celery, or what a group names; one run", title_justify="left")
    table.add_column("", no_wrap=True)
    for header in ("ours", "baseline", "ratio", "rounds, ours", "rounds, baseline"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("target", no_wrap=True)
    table.add_column("", no_wrap=True)
    group = ""
    for line in lines:
        if line.group != group:
            group = line.group
            table.add_section()
            table.add_row(f"[bold]{group}[/bold]")
        table.add_row(
            f"  {line.name}",
            _shown(line.ours.value, line.unit),
            _shown(line.baseline.value, line.unit) if line.baseline else "",
            f"{line.ratio:.2f}" if line.ratio is not None and not math.isnan(line.ratio) else "",
            _spread(line.ours),
            _spread(line.baseline) if line.baseline else "",
            line.target,
            {None: "", True: "[green]pass[/green]", False: "[red]FAIL[/red]"}[line.is_met],
        )
    console.print(table)
    for note in notes:
        console.print(note)
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))


def write_json(
    path: Path, lines: Sequence[Line], *, facts: dict[str, Any], options: dict[str, Any], details: dict[str, Any]
) -> None:
    """Everything that the table shows, each round, and the commands by name. No number that is missing is written."""
    report = {
        "machine": facts,
        "options": options,
        "lines": [{**asdict(line), "ratio": line.ratio} for line in lines],
        "details": details,
    }
    path.write_text(json.dumps(_without_nan(report), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _worker_cost(costs: Sequence[Cost]) -> Figure:
    return median_of([cost.worker_cpu_ms for cost in costs])


def _server_cost(costs: Sequence[Cost]) -> Figure:
    return median_of([cost.server_cpu_ms for cost in costs])


def _shown(value: float, unit: str) -> str:
    if math.isnan(value):
        return "–"
    digits = 0 if value == int(value) or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}".strip()


def _spread(figure: Figure) -> str:
    if len(figure.rounds) < 2:
        return ""
    return f"{_shown(min(figure.rounds), '')} – {_shown(max(figure.rounds), '')}"


def _without_nan(value: Any) -> Any:
    match value:
        case float() if math.isnan(value):
            return None
        case dict():
            return {name: _without_nan(inner) for name, inner in value.items()}  # pyright: ignore[reportUnknownVariableType]  # JSON
        case list() | tuple():
            return [_without_nan(inner) for inner in value]  # pyright: ignore[reportUnknownVariableType]  # JSON
        case _:
            return value
