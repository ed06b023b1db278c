"""`subagent-tasks transcript ID`: what a run did, for people or as JSON. Needs the server, not the application."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

import click

from broker_config import BrokerSettings
from subagent_tasks.commands.loading import load_environment
from subagent_tasks.commands.transcript_view import Story
from subagent_tasks.errors import CallerError
from subagent_tasks.process import Process
from subagent_tasks.protocol.ids import checked_id
from subagent_tasks.protocol.models import TranscriptEvent
from subagent_tasks.protocol.records import RunRecord
from subagent_tasks.queue.publisher import ScriptPublisher
from subagent_tasks.store.overview import open_overview

INTERRUPTED = 128 + signal.SIGINT
FOLLOW_SECONDS = 0.3
"""How often a followed transcript is read again: appending rings no bell."""


@click.command("transcript")
@click.argument("run_id", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON event per line: seq, atMs, kind, data.")
@click.option("--follow", is_flag=True, help="Go on until the run has ended.")
@click.option("--full", is_flag=True, help="Shorten no text.")
def command(run_id: str, *, as_json: bool, follow: bool, full: bool) -> None:
    """Tell what the run ID did: who asked, each step with its time, and how it ended.

    Shows prompts and outputs. Exit code 130 when --follow was interrupted before the run had ended.
    """
    settings = load_environment()
    try:
        asyncio.run(_tell(settings, run_id, as_json=as_json, follow=follow, full=full))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


async def _tell(settings: BrokerSettings, run_id: str, *, as_json: bool, follow: bool, full: bool) -> None:
    async with aclosing(readings(settings, run_id, follow=follow)) as reading:
        story: Story | None = None
        record: RunRecord | None = None
        async for record, events in reading:
            if as_json:
                _say(event.to_json() for event in events)
                continue
            if story is None:
                story = Story(record, full=full)
                _say(story.opening())
            for event in events:
                _say(story.lines(event))
    if story is not None and record is not None:
        _say(story.ending(record))


async def readings(
    settings: BrokerSettings, run_id: str, *, follow: bool
) -> AsyncGenerator[tuple[RunRecord, list[TranscriptEvent]]]:
    """The record with the events since the last reading: once, or with `follow` until it is settled.

    Raises `CallerError` for an id that names no run, `UnsupportedVersion`, `BrokerUnavailable`.
    """
    checked_id(run_id, name="ID")
    # Never started: it neither beats nor sweeps.
    process = Process(settings, role="command", publisher=ScriptPublisher(), queues=())
    try:
        position = 0
        while True:
            # The record first: once it is settled, the events that follow are all there will be.
            record = await process.runs.get(run_id)
            if record is None:
                raise await _no_run(settings, run_id)
            events = await process.runs.transcript(run_id, after=position)
            position += len(events)
            yield record, events
            if not follow or record.is_settled:
                return
            await asyncio.sleep(FOLLOW_SECONDS)
    finally:
        await process.stop()


async def _no_run(settings: BrokerSettings, run_id: str) -> CallerError:
    async with open_overview(settings) as store:
        kind = await store.kind(run_id)
    if kind == "parent":
        return CallerError(
            f"{run_id} is a parent session: its conversation is kept by its host; its runs are listed by "
            "subagent-tasks status"
        )
    return CallerError(
        f"unknown run {run_id}: namespace {settings.namespace!r} has none with that id, or its record has expired "
        f"({settings.retention_seconds:g} s after its end)"
    )


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line)
