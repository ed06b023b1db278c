"""`subagent-tasks worker APP`: a Celery worker of the app, in this process."""

from __future__ import annotations

import logging
import os
import sys

import click

from broker_config import queue_name, safe_url
from subagent_tasks.app import SubagentApp
from subagent_tasks.commands.loading import load_app
from subagent_tasks.errors import ConfigurationError
from subagent_tasks.queue.launch import run_worker

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@click.command("worker")
@click.argument("app")
@click.option("--concurrency", default=1000, show_default=True, type=click.IntRange(1), help="Children at a time.")
@click.option("--queues", default="", help="Providers to serve, separated by commas. Default: all that APP declares.")
@click.option(
    "--loglevel",
    default="info",
    show_default=True,
    type=click.Choice(LOG_LEVELS, case_sensitive=False),
    help="What is logged, to stderr.",
)
def command(app: str, *, concurrency: int, queues: str, loglevel: str) -> None:
    """Start a worker that drives the children of APP.

    SIGTERM or Ctrl-C hands its children back to the queue, where other workers go on with them.
    """
    declared = load_app(app)
    chosen = chosen_queues(declared, queues)
    click.echo(
        f"worker {os.getpid()} of {app}: queues {', '.join(chosen)}; up to {concurrency} children; "
        f"broker {safe_url(declared.settings.broker_url)}",
        err=True,
    )
    log_level = logging.getLevelNamesMapping()[loglevel.upper()]
    sys.exit(run_worker(declared.celery, concurrency=concurrency, queues=chosen, log_level=log_level))


def chosen_queues(app: SubagentApp, names: str) -> list[str]:
    """The Celery queues that `names` mean: queues, or their short names without the namespace."""
    if not app.queues:
        raise ConfigurationError("the app declares no provider, so there is nothing to serve: call app.add_provider")
    asked = [name for name in (part.strip() for part in names.split(",")) if name]
    chosen: list[str] = []
    for name in asked:
        full = name if name in app.queues else _full_name(app, name)
        if full not in app.queues:
            raise ConfigurationError(f"no declared provider has the queue {name!r}; queues: {', '.join(app.queues)}")
        chosen.append(full)
    return list(dict.fromkeys(chosen)) or app.queues


def _full_name(app: SubagentApp, name: str) -> str:
    try:
        return queue_name(app.settings.namespace, name)
    except ValueError:
        return ""
