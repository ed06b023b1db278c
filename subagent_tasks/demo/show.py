"""Runs the demo: starts everything, lets the parent play, gathers what was seen, ends everything, judges.

Only the parent follows a script. Server, worker, queue, model and files are what they would be.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from broker_config import ENV_PREFIX, EmbeddedServer, EmbeddedServerError, SettingsError, load_settings
from subagent_tasks.app import SubagentApp
from subagent_tasks.demo import processes, report
from subagent_tasks.demo.agents import LOCAL_MODEL, make_app
from subagent_tasks.demo.files import SourceFile, find_files
from subagent_tasks.demo.local_model import WEIGHTS, find_weights
from subagent_tasks.demo.parent import PARALLEL, Parent, Story
from subagent_tasks.doctor import Finding, examine
from subagent_tasks.errors import ConfigurationError, OperatorError
from subagent_tasks.host import Host
from subagent_tasks.models.routes import Route
from subagent_tasks.protocol.ids import run_id_for_call
from subagent_tasks.protocol.lifecycle import State
from subagent_tasks.protocol.records import RunRecord

NAMESPACE = "demo"
SESSION = "demo-parent"
APP = "subagent_tasks.demo.agents:app"
START_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Played:
    """What the asynchronous part of the demo found."""

    story: Story
    runs: Sequence[RunRecord]
    celery_states: dict[str, str]
    findings: Sequence[Finding]


def run_demo(*, path: Path | None, model: str | None, max_files: int, console: Console) -> bool:
    """The whole demo; whether everything was as it should be.

    Raises `ConfigurationError` for a folder or model that will not do and `OperatorError` when something does not
    start. Whatever happens, Ctrl-C included, every started process has ended when this returns.
    """
    began = time.monotonic()
    files, available = find_files(path, here=Path.cwd(), limit=max_files)
    weights = find_weights() if model is None else None
    route = LOCAL_MODEL if model is None else Route.parse(model).name
    console.print("[bold]A parent agent delegates to children that run in another process.[/]")
    console.print("The parent follows a script; its children ask a real model about real files.\n")
    console.print("[bold]Starting[/]")
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="subagent-tasks-demo-")))
        try:
            server = stack.enter_context(EmbeddedServer())
        except EmbeddedServerError as error:
            raise OperatorError(str(error)) from error
        console.print(f"  server   process {server.pid}, {server.url}, append-only file on")
        environment = {
            f"{ENV_PREFIX}BROKER_URL": server.url,
            f"{ENV_PREFIX}REDIS_URL": server.url,
            f"{ENV_PREFIX}NAMESPACE": NAMESPACE,
        }
        if weights is not None:
            serving = stack.enter_context(processes.local_model(weights, directory=scratch))
            url = processes.model_url(serving)
            environment |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "not-needed"}
            console.print(f"  model    process {serving.pid}, {WEIGHTS} at {url}")
            console.print("           (135 million parameters: here to be real, not to be clever)")
        else:
            console.print(f"  model    {route}, with the key of your environment")
        app = _app(server.url, model=route)
        worker = stack.enter_context(processes.worker(APP, directory=scratch, environment=environment))
        console.print(f"  worker   process {worker.pid}, subagent-tasks worker {APP}")
        shown = f"{len(files)} of {available} files" if len(files) < available else f"{len(files)} files"
        console.print(f"  parent   this process, {shown}")
        played = asyncio.run(_play(app, files, worker=worker, console=console))
        code = worker.terminate()
    seen = report.Seen(
        files=len(files),
        story=played.story,
        runs=played.runs,
        celery_states=played.celery_states,
        findings=played.findings,
        worker_pid=worker.pid,
        worker_exit_code=code,
    )
    console.print("\n[bold]Timeline[/]")
    report.timeline(console, seen)
    verdicts = report.judge(seen)
    console.print("\n[bold]Checks[/]")
    report.print_verdicts(console, verdicts)
    failed = sum(not verdict.passed for verdict in verdicts)
    verdict = f"[red]{failed} of {len(verdicts)} checks failed[/]" if failed else f"All {len(verdicts)} checks passed"
    console.print(f"\n{verdict} in {time.monotonic() - began:.0f} s; every process that was started has ended.")
    return not failed


def _app(url: str, *, model: str) -> SubagentApp:
    try:
        return make_app(load_settings(broker_url=url, redis_url=url, namespace=NAMESPACE), model=model)
    except SettingsError as error:
        raise ConfigurationError(str(error)) from error


async def _play(app: SubagentApp, files: Sequence[SourceFile], *, worker: processes.Child, console: Console) -> Played:
    async with app.host() as host:
        session = await host.open_session(SESSION)
        await _until_ready(host, worker)
        # It asks the workers and waits for all to answer: beside the work, not before it.
        examining = asyncio.create_task(examine(app.settings, app))
        parent = Parent(
            session,
            tell=lambda what: report.tell(console, what),
            state_of=lambda run_id: _state_of(host, run_id),
        )
        try:
            console.print(f"\n[bold]In the foreground: one child per file, {PARALLEL} at a time[/]")
            await parent.summarise(files)
            console.print("\n[bold]In the background: one job is collected, one is killed[/]")
            await parent.background(files)
            return Played(
                story=parent.story,
                runs=await _records(app, host, parent.story),
                celery_states=await asyncio.to_thread(_celery_states, app, parent.story.job_ids),
                findings=await examining,
            )
        except OperatorError as error:
            worker.raise_if_ended()
            raise OperatorError(f"{error}. The worker's log ends:\n{worker.log_tail()}") from error
        finally:
            examining.cancel()
            await asyncio.gather(examining, return_exceptions=True)


async def _until_ready(host: Host, worker: processes.Child) -> None:
    try:
        async with asyncio.timeout(processes.WORKER_START_SECONDS):
            while not any(
                report.is_process(name, "worker", worker.pid) for name in await host.process.processes.alive()
            ):
                worker.raise_if_ended()
                await asyncio.sleep(START_POLL_SECONDS)
    except TimeoutError as error:
        raise OperatorError(f"the worker did not come up. Its log ends:\n{worker.log_tail()}") from error


async def _state_of(host: Host, run_id: str) -> State | None:
    record = await host.process.delegation.record(run_id)
    return record.state if record is not None else None


async def _records(app: SubagentApp, host: Host, story: Story) -> list[RunRecord]:
    foreground = [
        run_id_for_call(namespace=app.settings.namespace, session_id=SESSION, call_id=exchange.call_id)
        for exchange in story.summaries
    ]
    records = [await host.process.delegation.record(run_id) for run_id in [*foreground, *story.job_ids]]
    return [record for record in records if record is not None]


def _celery_states(app: SubagentApp, job_ids: Sequence[str]) -> dict[str, str]:
    with contextlib.closing(cast("Any", app.celery)) as celery:
        return {job_id: str(celery.AsyncResult(job_id).state) for job_id in job_ids}
