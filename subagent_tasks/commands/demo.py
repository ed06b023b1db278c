"""`subagent-tasks demo`: see `subagent_tasks.demo`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType

import click

from subagent_tasks.demo.show import run_demo
from subagent_tasks.terminal import make_console

INTERRUPTED = 128 + signal.SIGINT
MAX_FILES = 6


@click.command("demo")
@click.option(
    "--path",
    type=click.Path(path_type=Path),
    default=None,
    help="A folder with text files. Default: *.md here, and docs.",
)
@click.option("--model", default=None, help="Another model, such as openai:gpt-5-mini. Default: a small one, run here.")
@click.option("--files", default=MAX_FILES, show_default=True, type=click.IntRange(1), help="How many files at most.")
def command(path: Path | None, *, model: str | None, files: int) -> None:
    """See it work: a server, a worker and a real model, on this machine.

    A scripted parent delegates one child per text file, three at a time, then two background jobs: one is collected,
    one is killed. Takes about a minute. Exit code 1 when anything was not as it should be.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        passed = run_demo(path=path, model=model, max_files=files, console=make_console())
    except KeyboardInterrupt:
        click.echo("\ninterrupted: every process that was started has ended", err=True)
        sys.exit(INTERRUPTED)
    sys.exit(0 if passed else 1)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
