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

ENDING_SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
"""What ends a run with its command, and the word for it. The exit code is 128 and its number, as of a shell."""
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

    Needs a running worker. Says the run's id first, for `subagent-tasks kill`. Ctrl-C or SIGTERM kills the child. Exit
    code 1 when it failed, 130 when it was interrupted, 143 when it was terminated.
    """
    if session_id is None:
        session_id = f"command-{uuid.uuid4().hex[:12]}"
    elif not session_id.strip():
        raise click.BadParameter("the id is empty; leave the option out for a new session", param_hint="--session")
    result, ended_by = asyncio.run(delegate(load_app(app), prompt, tool=tool, session_id=session_id))
    if result.is_error:
        # A tool result already begins with `Error: `, as click's own errors do.
        click.echo(result.text, err=True)
        sys.exit(1 if ended_by is None else 128 + ended_by)
    click.echo(result.text)


async def delegate(
    app: SubagentApp, prompt: str, *, tool: str, session_id: str
) -> tuple[ToolResult, signal.Signals | None]:
    """The tool's result, and the signal that asked for its end. Raises `SubagentError` when the call cannot be made."""
    arguments: dict[str, object] = {"description": "from the command line", "prompt": prompt}
    async with app.host() as host:
        session = await host.open_session(session_id)
        if _takes_mode(session, tool):
            arguments["run_in_background"] = False
        call_id = uuid.uuid4().hex
        run_id = run_id_for_call(namespace=app.settings.namespace, session_id=session_id, call_id=call_id)
        stop = asyncio.Event()
        with _ending_signals(stop, run_id) as received:
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
        return result, next(iter(received), None)


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
def _ending_signals(stop: asyncio.Event, run_id: str) -> Generator[list[signal.Signals]]:
    """The first signal asks the child to end, and is put into the list; a second one ends this process at once."""
    loop = asyncio.get_running_loop()
    received: list[signal.Signals] = []

    def end(number: signal.Signals) -> None:
        received.append(number)
        restore()
        click.echo(f"{ENDING_SIGNALS[number]}: killing run {run_id}", err=True)
        stop.set()

    def restore() -> None:
        for number in ENDING_SIGNALS:
            loop.remove_signal_handler(number)

    for number in ENDING_SIGNALS:
        loop.add_signal_handler(number, end, number)
    try:
        yield received
    finally:
        restore()


async def _follow(session: Session, run_id: str) -> None:
    """Print the run's id once it is accepted, then what the child does, from its transcript."""
    waiting = asyncio.create_task(_say_unclaimed())
    try:
        await _admitted(session, run_id)
        click.echo(f"run {run_id} of session {session.id}", err=True)
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
