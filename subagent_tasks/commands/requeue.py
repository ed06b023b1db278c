"""`subagent-tasks requeue ID`: a second chance, by hand, for a run that was given up. Needs the server alone."""

from __future__ import annotations

import asyncio

import click

from broker_config import BrokerSettings
from subagent_tasks.commands.loading import load_environment
from subagent_tasks.process import Process
from subagent_tasks.protocol.ids import checked_id
from subagent_tasks.queue.app import command_publisher


@click.command("requeue")
@click.argument("run_id", metavar="ID")
def command(run_id: str) -> None:
    """Give the work of the run ID, which failed or was killed, to a new run.

    The new run is a background job of the session at the root of the tree, which is told how it ends. It goes on from
    the steps that were recorded, where its provider can; no tool call that may have run is repeated.
    """
    click.echo(asyncio.run(requeue(load_environment(), run_id)))


async def requeue(settings: BrokerSettings, run_id: str) -> str:
    """Requeue a run; what to tell the operator. Raises as `Delegation.requeue`, and `BrokerUnavailable`."""
    checked_id(run_id, name="ID")
    # Never started: it neither beats nor sweeps.
    process = Process(settings, role="command", publisher=command_publisher(settings), queues=())
    try:
        new_id = process.ids.new()
        requeued_as = await process.delegation.requeue(run_id, new_id=new_id)
    finally:
        await process.stop()
    before = "" if requeued_as == new_id else "before, "
    return f"requeued run {run_id} {before}as {requeued_as}"
