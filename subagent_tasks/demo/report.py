"""What the demo says: the parent's exchanges, a timeline of the runs, and whether all was as it should be.

`judge` is pure: from what was seen to named verdicts. Everything else prints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from subagent_tasks.demo.parent import PARALLEL, Exchange, Story
from subagent_tasks.doctor import Finding
from subagent_tasks.protocol.models import Notice
from subagent_tasks.protocol.records import RunRecord
from subagent_tasks.terminal import brief

MAX_BAR_COLUMNS = 40
OTHER_COLUMNS = 45
"""What the timeline takes beside label and bar."""
MAX_ARGUMENT_CHARACTERS = 90
MAX_LABEL_CHARACTERS = 32
MAX_RESULT_CHARACTERS = 600
PROMPT_RETURN_SECONDS = 2.0
"""A background call answers once the run is accepted: milliseconds, whatever the child takes."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything the verdicts go by."""

    files: int
    story: Story
    runs: Sequence[RunRecord]
    celery_states: Mapping[str, str]
    findings: Sequence[Finding]
    worker_pid: int
    worker_exit_code: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """One thing that should be so."""

    name: str
    passed: bool
    detail: str = ""


def judge(seen: Seen) -> list[Verdict]:
    """Whether everything was as it should be, each named."""
    story = seen.story
    answered = [one for one in story.summaries if not one.result.is_error and one.result.text.strip()]
    overlap = most_at_once([run for run in seen.runs if run.mode == "foreground"])
    elsewhere = [run for run in seen.runs if not is_process(run.driver, "worker", seen.worker_pid)]
    first, second = (*story.job_ids, "", "")[:2]
    tellers = [notice.sender_id for notice in story.notices]
    unsettled = [run.id for run in seen.runs if not run.is_settled]
    bad = [finding for finding in seen.findings if finding.level == "failed"]
    return [
        Verdict(
            "every file was answered by its own child", len(answered) == seen.files, f"{len(answered)} of {seen.files}"
        ),
        Verdict(f"{PARALLEL} children ran at a time", overlap == min(PARALLEL, seen.files), f"{overlap} at once"),
        Verdict(
            "every child ran in the worker's process, none in the parent's",
            not elsewhere,
            f"{len(seen.runs) - len(elsewhere)} of {len(seen.runs)} in process {seen.worker_pid}",
        ),
        Verdict(
            "background calls returned at once",
            bool(story.started) and all(one.seconds < PROMPT_RETURN_SECONDS for one in story.started),
            ", ".join(f"{one.seconds * 1000:.0f} ms" for one in story.started),
        ),
        Verdict(
            "the second job was running when it was killed",
            _line_of(story.listing, second, "running") and _says(story.killing, "requested cancellation"),
        ),
        Verdict("and ended as killed", _says(story.after_kill, "[status: killed]")),
        Verdict(
            "the first job's end was told by a notice, once",
            bool(first) and tellers.count(first) == 1,
            f"{len(tellers)} notice(s)",
        ),
        Verdict("a killed job tells its killer nothing new", second not in tellers),
        Verdict("job_output gave the first job's answer", _says(story.collected, "[status: completed]")),
        Verdict(
            "plain Celery agrees: AsyncResult says SUCCESS and REVOKED",
            [seen.celery_states.get(first), seen.celery_states.get(second)] == ["SUCCESS", "REVOKED"],
            ", ".join(seen.celery_states.values()),
        ),
        Verdict("nothing is left unsettled", not unsettled, f"{len(unsettled)} left"),
        Verdict(
            "the doctor found nothing wrong",
            bool(seen.findings) and not bad,
            "; ".join(finding.message for finding in bad),
        ),
        Verdict(
            "the worker left when it was asked to", seen.worker_exit_code == 0, f"exit code {seen.worker_exit_code}"
        ),
    ]


def most_at_once(runs: Sequence[RunRecord]) -> int:
    """How many of the runs were driven at the same moment."""
    spans = [(run.started_at, run.finished_at) for run in runs if run.started_at and run.finished_at]
    return max((sum(start <= moment < end for start, end in spans) for moment, _ in spans), default=0)


def is_process(process_id: str, role: str, pid: int) -> bool:
    """Whether a process id of ours names that role and operating system process."""
    return process_id.startswith(f"{role}-{pid}-")


def process_of(process_id: str) -> str:
    """`worker 4711` of `worker-4711-0a1b…`."""
    return " ".join(process_id.split("-")[:2]) if process_id else "?"


def tell(console: Console, what: Exchange | Notice) -> None:
    """One tool call with its result, or one notice, as the parent's model sees it."""
    if isinstance(what, Notice):
        console.print(Padding(f"[magenta]notice[/] {escape(what.text)}", (0, 0, 0, 2), expand=False))
        return
    arguments = ", ".join(f"{name}={_argument(value)}" for name, value in what.arguments.items())
    call = f"[cyan]{what.name}[/]({escape(arguments)}) [dim]{what.seconds:.1f} s[/]"
    console.print(Padding(call, (0, 0, 0, 2), expand=False))
    style = "red" if what.result.is_error else "green"
    text = what.result.text
    shown = text if len(text) <= MAX_RESULT_CHARACTERS else text[:MAX_RESULT_CHARACTERS] + "…"
    console.print(Padding(f"[{style}]{escape(shown)}[/]", (0, 0, 0, 6), expand=False))


def timeline(console: Console, seen: Seen) -> None:
    """Every run: where it ran, how long it waited and took, and when."""
    runs = sorted(seen.runs, key=lambda run: run.created_at)
    if not runs:
        return
    begin = min(run.created_at for run in runs)
    end = max(run.finished_at or run.created_at for run in runs)
    label_columns = max(len(brief(run.spec.label, MAX_LABEL_CHARACTERS)) for run in runs)
    columns = min(MAX_BAR_COLUMNS, max(10, console.width - OTHER_COLUMNS - label_columns))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column, right in (("child", False), ("process", False), ("ended", False), ("waited", True), ("ran", True)):
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    table.add_column(_scale((end - begin) / 1000, columns=columns), no_wrap=True)
    for run in runs:
        started, finished = run.started_at or run.created_at, run.finished_at or end
        table.add_row(
            escape(brief(run.spec.label, MAX_LABEL_CHARACTERS)),
            process_of(run.driver),
            run.outcome.status if run.outcome else run.state,
            f"{(started - run.created_at) / 1000:.2f} s",
            f"{(finished - started) / 1000:.1f} s",
            _bar(run, begin=begin, end=end, columns=columns),
        )
    console.print(table)


def print_verdicts(console: Console, verdicts: Sequence[Verdict]) -> None:
    for verdict in verdicts:
        mark = "[green]ok[/]    " if verdict.passed else "[red]FAILED[/]"
        detail = f" [dim]({escape(verdict.detail)})[/]" if verdict.detail else ""
        console.print(f"  {mark} {escape(verdict.name)}{detail}")


def _scale(seconds: float, *, columns: int) -> str:
    end = f"{seconds:.0f} s"
    return f"0{' ' * (columns - len(end) - 1)}{end}"


def _bar(run: RunRecord, *, begin: int, end: int, columns: int) -> str:
    scale = columns / max(end - begin, 1)
    left = int(((run.started_at or run.created_at) - begin) * scale)
    width = max(1, round(((run.finished_at or end) - (run.started_at or run.created_at)) * scale))
    colour = {"completed": "green", "killed": "yellow"}.get(run.outcome.status if run.outcome else "", "red")
    return f"{' ' * left}[{colour}]{'━' * width}[/]"


def _argument(value: object) -> str:
    return json.dumps(brief(value, MAX_ARGUMENT_CHARACTERS) if isinstance(value, str) else value, ensure_ascii=False)


def _says(exchange: Exchange | None, text: str) -> bool:
    return exchange is not None and not exchange.result.is_error and text in exchange.result.text


def _line_of(exchange: Exchange | None, job_id: str, word: str) -> bool:
    lines = exchange.result.text.splitlines() if exchange is not None else []
    return any(job_id and line.startswith(job_id) and f"] {word} " in line for line in lines)
