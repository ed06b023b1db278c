"""`subagent-tasks kill ID`: an operator's kill of any run of the namespace. Needs the server, not the application."""

from __future__ import annotations

import asyncio

import click

from broker_config import BrokerSettings
from subagent_tasks.commands.loading import load_environment
from subagent_tasks.errors import CallerError
from subagent_tasks.process import Process
from subagent_tasks.protocol.ids import checked_id
from subagent_tasks.protocol.outcomes import status_line
from subagent_tasks.queue.app import command_publisher

OPERATOR_REASON = "killed from the command line"


@click.command("kill")
@click.argument("run_id", metavar="ID")
@click.option("--reason", default=OPERATOR_REASON, show_default=True, help="Why, for its owner and its record.")
def command(run_id: str, *, reason: str) -> None:
    """Ask the run ID to end, whoever started it.

    What waits in the queue ends at once; what runs is ended by its worker. Its owner is told either way.
    """
    click.echo(asyncio.run(kill(load_environment(), run_id, reason=reason)))


async def kill(settings: BrokerSettings, run_id: str, *, reason: str) -> str:
    """Kill any run; what to tell the operator. Raises `CallerError` for an unknown id, `BrokerUnavailable`."""
    checked_id(run_id, name="ID")
    # Never started: it neither beats nor sweeps. What it sends is the message of an owner that goes on.
    process = Process(settings, role="command", publisher=command_publisher(settings), queues=())
    try:
        word = await process.delegation.kill(run_id, authority="", reason=reason)
        record = await process.runs.get(run_id)
    finally:
        await process.stop()
    if word == "unknown" or record is None:
        raise CallerError(
            f"unknown run {run_id}: namespace {settings.namespace!r} has none with that id, or its record has expired"
        )
    match word:
        case "already_finished":
            return f"run {run_id} had already finished {status_line(record.snapshot())}"
        case "killed":
            return f"killed run {run_id}: nobody was driving it"
        case _:
            return f"requested the end of run {run_id}: its worker is told"
