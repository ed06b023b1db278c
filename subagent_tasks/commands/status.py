"""`subagent-tasks status`: what runs, what waits and why, for an operator. Needs the server, not the application.

What there is to see is decided in `subagent_tasks.overview`; here it is set as lines, refreshed or written as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import click
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from broker_config import BrokerSettings
from subagent_tasks.commands.loading import load_environment
from subagent_tasks.errors import BrokerUnavailable
from subagent_tasks.overview import Overview, ProcessRow, QueueRow, RunRow, overview_of
from subagent_tasks.store.overview import OverviewStore, open_overview
from subagent_tasks.terminal import brief, make_console, spelled

REFRESH_SECONDS = 1.0
RECENT_SECONDS = 600.0
MAX_LABEL_CHARACTERS = 60
COLOURS = {
    "queued": "yellow",
    "running": "cyan",
    "stopping": "magenta",
    "completed": "green",
    "killed": "magenta",
    "failed": "red",
}


@click.command("status")
@click.option("--watch", is_flag=True, help="Refresh every second, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option(
    "--recent",
    "recent_seconds",
    default=RECENT_SECONDS,
    show_default=True,
    type=click.FloatRange(0),
    help="Show runs that ended within so many seconds, beside all that have not ended.",
)
def command(*, watch: bool, as_json: bool, recent_seconds: float) -> None:
    """Show workers, queues and runs, and say of each run why it waits.

    Runs hang below the session or the run that started them. Prompts and outputs are never shown: see
    subagent-tasks transcript ID.

    \b
    The JSON document; times are Redis milliseconds, absent fields have no value:
      namespace, nowMs, warnings[]
      processes[]: id, role (worker, host), pid, alive, lapsesAtMs, driven
      queues[]: name, waiting, oldestSinceMs, driven
      sessions[]: id, runs[]
      runs[]: id, label, status (queued, running, stopping, completed, killed,
        failed), provider, mode, queue, attempt, worker, createdAtMs,
        startedAtMs, finishedAtMs, seconds, note, runs[]
    """
    if watch and as_json:
        raise click.UsageError("--watch and --json exclude each other: repeat status --json instead")
    settings = load_environment()
    console = make_console()
    if watch and not console.is_terminal:
        raise click.UsageError("--watch needs a terminal: repeat status, or status --json, instead")
    if watch:
        # Ctrl-C is how one leaves.
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(keep_watching(settings, console=console, recent_seconds=recent_seconds))
        return
    overview = asyncio.run(look(settings, recent_seconds=recent_seconds))
    if as_json:
        click.echo(overview.to_json())
    else:
        # Whoever reads from a pipe wants whole lines.
        console.print(picture(overview), soft_wrap=not sys.stdout.isatty())


async def look(settings: BrokerSettings, *, recent_seconds: float = RECENT_SECONDS) -> Overview:
    """One look at the namespace. Raises `BrokerUnavailable`."""
    async with open_overview(settings) as store:
        return await _look(store, settings, recent_seconds=recent_seconds)


async def keep_watching(settings: BrokerSettings, *, console: Console, recent_seconds: float) -> None:
    """Refresh in place until cancelled. An outage is shown above what was seen last, and waited out."""
    async with open_overview(settings) as store:
        seen = picture(await _look(store, settings, recent_seconds=recent_seconds))
        with Live(seen, console=console, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(REFRESH_SECONDS)
                try:
                    seen = picture(await _look(store, settings, recent_seconds=recent_seconds))
                except BrokerUnavailable as error:
                    live.update(Text.assemble((f"What you see is old: {error}\n", "red"), seen), refresh=True)
                else:
                    live.update(seen, refresh=True)


async def _look(store: OverviewStore, settings: BrokerSettings, *, recent_seconds: float) -> Overview:
    facts = await store.read(recent_ms=int(recent_seconds * 1000))
    return overview_of(facts, namespace=settings.namespace, lease_seconds=settings.lease_seconds)


def picture(overview: Overview) -> Text:
    """The overview, set for people. What a label would make a terminal do is shown instead."""
    # A label with `:warning:` in it is no request for a picture.
    return Text.from_markup("\n".join(_lines(overview)), emoji=False)


def _lines(overview: Overview) -> list[str]:
    at = datetime.fromtimestamp(overview.now_ms / 1000, UTC)
    lines = [f"[bold]namespace {overview.namespace}[/], {at:%Y-%m-%d %H:%M:%S} UTC", ""]
    lines += [f"[bold red]![/] {escape(warning)}" for warning in overview.warnings]
    lines += [""] * bool(overview.warnings)
    lines += ["[bold]Processes[/]", *(_processes(overview.processes, now_ms=overview.now_ms) or ["  none"]), ""]
    lines += ["[bold]Queues[/]", *(_queues(overview.queues, now_ms=overview.now_ms) or ["  none"]), ""]
    if not overview.sessions:
        lines.append("No run is unsettled, and none ended lately.")
    for session in overview.sessions:
        lines.append(f"[bold]Session {_safe(session.id)}[/]")
        lines += _tree(session.runs, indent="")
    return lines


def _processes(rows: Sequence[ProcessRow], *, now_ms: int) -> list[str]:
    width = max((len(row.id) for row in rows), default=0)
    lines: list[str] = []
    for row in rows:
        life = "[green]alive[/]"
        if not row.alive:
            life = f"[red]dead[/] for {spelled((now_ms - row.lapses_at_ms) / 1000)}"
        lines.append(f"  {_safe(row.id).ljust(width)}  {life}, drives {_runs(row.driven)}")
    return lines


def _queues(rows: Sequence[QueueRow], *, now_ms: int) -> list[str]:
    width = max((len(row.name) for row in rows), default=0)
    lines: list[str] = []
    for row in rows:
        oldest = ""
        if row.oldest_since_ms is not None:
            oldest = f", the oldest for {spelled((now_ms - row.oldest_since_ms) / 1000)}"
        lines.append(f"  {_safe(row.name).ljust(width)}  {row.waiting} waiting{oldest}; {row.driven} driven")
    return lines


def _tree(rows: Sequence[RunRow], *, indent: str) -> Iterator[str]:
    for position, row in enumerate(rows, start=1):
        is_last = position == len(rows)
        below = indent + ("   " if is_last else "│  ")
        facts = [
            f"{indent}{'└─' if is_last else '├─'} [{COLOURS[row.status]}]{row.status:<9}[/]",
            f"{spelled(row.seconds):>11}",
            _safe(row.id),
            _safe(row.provider),
            escape(brief(row.label, MAX_LABEL_CHARACTERS)),
        ]
        facts += [f"attempt {row.attempt + 1}"] * bool(row.attempt)
        facts += [f"on {_safe(row.worker)}"] if row.worker else []
        yield "  ".join(facts)
        if row.note:
            yield f"{below}{'│' if row.runs else ' '}  [dim]{_safe(row.note)}[/]"
        yield from _tree(row.runs, indent=below)


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"


def _safe(text: str) -> str:
    return escape(brief(text))
