"""`subagent-tasks run APP PROMPT`: one foreground delegation, its progress on stderr, its answer on stdout."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import uuid
from collections.abc import Generator

import click

from subagent_tasks.app import SubagentApp
from subagent_tasks.commands.loading import load_app
from subagent_tasks.commands.progress import event_lines
from subagent_tasks.errors import CallerError, ConfigurationError, SubagentError
from subagent_tasks.host import Session
from subagent_tasks.protocol.ids import run_id_for_call
from subagent_tasks.protocol.models import ToolResult

INTERRUPTED = 128 + signal.SIGINT
UNCLAIMED_SECONDS = 5.0
"""How long a run may wait in its queue before the user is told that a worker may be missing."""
ADMISSION_POLL_SECONDS = 0.05


@click.command("run")
@click.argument("app")
@click.argument("prompt")
@click.option("--tool", default="subagent", show_default=True, help="The delegation tool to call.")
@click.option("--session", "session_id", default=None, help="The session to call it from. Default: a new one.")
def command(app: str, prompt: str, *, tool: str, session_id: str | None) -> None:
    """Delegate PROMPT to a child of APP and print its answer.

    Needs a running worker. Ctrl-C kills the child. Exit code 1 when it failed, 130 when it was interrupted.
    """
    result, interrupted = asyncio.run(
        delegate(load_app(app), prompt, tool=tool, session_id=session_id or f"command-{uuid.uuid4().hex[:12]}")
    )
    if interrupted and result.is_error:
        click.echo(result.text, err=True)
        sys.exit(INTERRUPTED)
    if result.is_error:
        # A tool result already begins with `Error: `, as click's own errors do.
        click.echo(result.text, err=True)
        sys.exit(1)
    click.echo(result.text)


async def delegate(app: SubagentApp, prompt: str, *, tool: str, session_id: str) -> tuple[ToolResult, bool]:
    """The tool's result, and whether the user interrupted. Raises `SubagentError` when the call cannot be made."""
    arguments: dict[str, object] = {"description": "from the command line", "prompt": prompt}
    async with app.host() as host:
        session = await host.open_session(session_id)
        if _takes_mode(session, tool):
            arguments["run_in_background"] = False
        call_id = uuid.uuid4().hex
        run_id = run_id_for_call(namespace=app.settings.namespace, session_id=session_id, call_id=call_id)
        stop = asyncio.Event()
        with _interrupts(stop, run_id):
            following = asyncio.create_task(_follow(session, run_id))
            try:
                result = await session.call(tool, arguments, call_id=call_id, signal=stop)
                # The last events may have been written after the transcript was last read.
                with contextlib.suppress(TimeoutError, SubagentError):
                    async with asyncio.timeout(1):
                        await following
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
        return result, stop.is_set()


def _takes_mode(session: Session, tool: str) -> bool:
    """Whether the tool can be told to run in the foreground. Raises `ConfigurationError` when it does not delegate."""
    delegating = {
        definition.name: definition.parameters.get("properties")
        for definition in session.tools
        if "prompt" in str(definition.parameters.get("required"))
    }
    if tool not in delegating:
        known = ", ".join(delegating) or "(none: call app.add_delegation_tool)"
        raise ConfigurationError(f"the app has no delegation tool {tool!r}; its delegation tools: {known}")
    return "run_in_background" in str(delegating[tool])


@contextlib.contextmanager
def _interrupts(stop: asyncio.Event, run_id: str) -> Generator[None]:
    """The first Ctrl-C asks the child to end; a second one ends this process at once."""
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        click.echo(f"interrupted: killing run {run_id}", err=True)
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def _follow(session: Session, run_id: str) -> None:
    """Print what the child does, from its transcript."""
    waiting = asyncio.create_task(_say_unclaimed())
    try:
        await _admitted(session, run_id)
        async for event in session.transcript(run_id, follow=True):
            waiting.cancel()
            for line in event_lines(event):
                click.echo(line, err=True)
    finally:
        waiting.cancel()


async def _admitted(session: Session, run_id: str) -> None:
    """Wait until the run is there: it is followed before it is accepted, so that nothing is missed."""
    while True:
        try:
            async for _ in session.transcript(run_id):
                break
        except CallerError as error:
            if error.code != "UNKNOWN_CHILD":
                raise
            await asyncio.sleep(ADMISSION_POLL_SECONDS)
        else:
            return


async def _say_unclaimed() -> None:
    await asyncio.sleep(UNCLAIMED_SECONDS)
    click.echo(
        "still queued: no worker has taken it yet; is one running? See subagent-tasks worker, subagent-tasks doctor",
        err=True,
    )
