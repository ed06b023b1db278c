"""`subagent-tasks doctor [APP]`: prints what `subagent_tasks.doctor` found; exit code 1 when something fails."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import click
from rich.markup import escape
from rich.table import Table

from subagent_tasks.commands.loading import load_app, load_environment
from subagent_tasks.doctor import Finding, examine, mend
from subagent_tasks.errors import SubagentError
from subagent_tasks.terminal import make_console

MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "failed": "[red]failed[/]"}


@click.command("doctor")
@click.argument("app", required=False)
@click.option("--fix", is_flag=True, help="See to work that is left lying, as a living worker or host would.")
def command(app: str | None, *, fix: bool) -> None:
    """Check that the broker, the settings, the workers and the work that waits keep the promises.

    With APP, each of its providers' queues must have a worker. Changes nothing without --fix. Exit code 1 when a check
    fails.
    """
    findings = diagnose(app)
    if fix and any(finding.is_mendable for finding in findings):
        asyncio.run(mend(load_environment() if app is None else load_app(app).settings))
        findings = diagnose(app)
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        table.add_row(MARKS[finding.level], finding.check, escape(finding.message))
        if finding.fix:
            table.add_row("", "", f"[bold]fix:[/] {escape(finding.fix)}")
    failed = sum(finding.level == "failed" for finding in findings)
    table.add_row()
    console = make_console()
    console.print(table)
    console.print(f"{failed} of {len(findings)} checks failed" if failed else f"none of {len(findings)} checks failed")
    sys.exit(1 if failed else 0)


def diagnose(reference: str | None) -> Sequence[Finding]:
    """The findings; an app or settings that cannot be loaded are the only one there is."""
    try:
        app = load_app(reference) if reference is not None else None
    except SubagentError as error:
        return [Finding("app", "failed", str(error), "correct the declaration or its environment")]
    try:
        settings = app.settings if app is not None else load_environment()
    except SubagentError as error:
        return [Finding("settings", "failed", str(error), "correct the SUBAGENT_TASKS_* variables")]
    return asyncio.run(examine(settings, app))
