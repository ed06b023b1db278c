"""The command line `subagent-tasks`: which commands there are. What each does is in `subagent_tasks.commands`.

A command's module is imported when the command is called: the help answers at once, and `kill` never loads an agent
loop. What a user, an operator or a model's tool did wrong ends in one line on stderr and exit code 1; wrong usage in 2.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

import click

from subagent_tasks.errors import SubagentError

COMMANDS = {
    "demo": "See it work: a server, a worker, a real model, on this machine.",
    "worker": "Start a worker that drives the children of APP.",
    "run": "Delegate one prompt to a child of APP and print its answer.",
    "status": "Show workers, queues and runs, and why each run waits.",
    "transcript": "Tell what a run did, step by step.",
    "kill": "Ask a run to end, whoever started it.",
    "requeue": "Give the work of a run that failed to a new one.",
    "doctor": "Check broker, settings and workers; say how to mend them.",
}
"""Name -> the line in the overview. The command is `subagent_tasks.commands.<name>:command`."""


class Commands(click.Group):
    """Loads a command when it is called; turns our errors into click's."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return cast("click.Command", importlib.import_module(f"subagent_tasks.commands.{cmd_name}").command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # click's own would load every command to ask for its first line.
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SubagentError as error:
            raise click.ClickException(str(error)) from error


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="subagent-tasks")
def cli() -> None:
    """Run an agent's child agents on Celery workers.

    APP is the declaration, written module:attribute, such as agents:app; the current directory is searched first.
    Settings are read from SUBAGENT_TASKS_* variables.
    """


def main() -> None:
    """The entry point."""
    cli(prog_name="subagent-tasks")
