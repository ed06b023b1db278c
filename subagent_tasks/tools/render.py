"""From an outcome or a job to what the model reads: the texts and canonical values of the delegation and job tools.

Pure. Decides wording only, exactly as the contract has it (behaviour §2.4, §2.8, §2.9, §3.2, §3.5 to §3.7). Whether a
call may happen is decided elsewhere; results carry no call id, the session that made the call adds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import JsonValue

from subagent_tasks.errors import ChildFailed, SubagentError, Unauthorized, UnknownJob
from subagent_tasks.protocol.models import JobSnapshot, Outcome, ToolResult
from subagent_tasks.protocol.outcomes import canonical_value, completion_text, failure_message, one_line, status_line

OUTPUT_MARKER = "\n[output truncated]"
NOTICE_MARKER = "\n[notice truncated]"
NOTICE_ACTION = "\nDone; job_output."


def foreground_result(run_id: str, outcome: Outcome) -> ToolResult:
    """A success is the text blocks alone, even when there is none; anything else is an error (behaviour §2.4, §2.9)."""
    message = failure_message(outcome)
    if message is None:
        return ToolResult(text=outcome.text, value=canonical_value(run_id, outcome))
    # A stringified error of ours begins with the very prefix a tool result gets.
    text = message if message.startswith("Error: ") else f"Error: {message}"
    return ToolResult(text=text, is_error=True, code=ChildFailed.code)


def background_started(job_id: str) -> ToolResult:
    return ToolResult(text=f"started background subagent job {job_id}", value={"kind": "background", "jobId": job_id})


def timed_out(run_id: str, outcome: Outcome, *, timeout_seconds: float) -> ToolResult:
    """A foreground call whose caller's time was over; the child was asked to end (P8)."""
    if outcome.status == "completed":
        return foreground_result(run_id, outcome)
    diagnostic = f"the call timed out after {timeout_seconds:g} s"
    result = foreground_result(run_id, outcome.model_copy(update={"stop_reason": "aborted", "diagnostic": diagnostic}))
    return result.model_copy(update={"code": "TIMEOUT"})


def continuable_started(subagent_id: str) -> ToolResult:
    return ToolResult(text=f"started subagent {subagent_id}", value={"kind": "continuable", "subagentId": subagent_id})


def error_result(error: SubagentError) -> ToolResult:
    """A refused call (behaviour §2.7)."""
    return ToolResult(text=f"Error: {error}", is_error=True, code=error.code)


def aborted_before_dispatch() -> ToolResult:
    """The signal was set before the call began; nothing was started (behaviour §2.7 step 1)."""
    text = "Error: tool call aborted before dispatch"
    return ToolResult(text=text, is_error=True, code="ABORTED_BEFORE_DISPATCH")


def job_output_result(job: JobSnapshot, outcome: Outcome | None) -> ToolResult:
    """Text and status of a job; the same at every read after it settled (behaviour §3.5).

    `outcome` is None while the job lives. A failed or killed job shows what it had produced (design §6).
    """
    text = "" if outcome is None else outcome.text
    shown = text or "(no new output)"
    newline = "" if shown.endswith("\n") else "\n"
    return ToolResult(text=f"{shown}{newline}{status_line(job)}", value={"text": text, "job": _public(job)})


def job_list_result(jobs: Sequence[JobSnapshot]) -> ToolResult:
    """One line per job, in the order given (behaviour §3.5: registration order)."""
    lines = [f"{job.id} [{job.kind}] {job.status} — {one_line(job.label)}" for job in jobs]
    return ToolResult(text="\n".join(lines) or "(no background jobs)", value=[_public(job) for job in jobs])


def job_kill_result(job: JobSnapshot, *, already_finished: bool) -> ToolResult:
    """`job` as it stands after the request (behaviour §3.5)."""
    if already_finished:
        text, outcome = f"job {job.id} had already finished {status_line(job)}", "already-finished"
    else:
        text, outcome = f"requested cancellation of job {job.id}", "cancellation-requested"
    return ToolResult(text=text, value={"outcome": outcome, "job": _public(job)})


def unknown_job(job_id: str, *, really: Literal["subagent", "foreground", "expired"] | None = None) -> UnknownJob:
    """No such job; `really` says what the id names instead, so that the hint can send the model to the right tool."""
    match really:
        case None:
            hint = ""
        case "subagent":
            hint = ": this is the id of a subagent, not of a job; use send_message or list_agents with it"
        case "expired":
            hint = ": this job has ended, and its record has expired; it cannot be read any more"
        case "foreground":
            hint = ": this is the id of a foreground run; its result was the result of the call that started it"
    return UnknownJob(f"unknown job {job_id}{hint}")


def foreign_job(job_id: str) -> Unauthorized:
    return Unauthorized(f"job {job_id} belongs to another session")


def bounded_result(text: str, limit_bytes: int) -> str:
    """At most `limit_bytes` of UTF-8: the tail, where the status line is, and a marker if it fits (behaviour §3.6)."""
    text = _clean(text)
    if _size(text) <= limit_bytes:
        return text
    room = limit_bytes - _size(OUTPUT_MARKER)
    return _tail(text, room) + OUTPUT_MARKER if room > 0 else _tail(text, limit_bytes)


def bounded_completion_text(job: JobSnapshot, limit_bytes: int) -> str:
    """At most `limit_bytes` of UTF-8: the id and what to do stay longest (behaviour §3.6)."""
    text, head = _clean(completion_text(job)), _clean(f"background job {job.id}")
    marked = f"{head}{NOTICE_MARKER}{NOTICE_ACTION}"
    for candidate in (text, marked):
        if _size(candidate) <= limit_bytes:
            return candidate
    return _tail(f"{head}{NOTICE_ACTION}", limit_bytes)


def _public(job: JobSnapshot) -> JsonValue:
    return job.model_dump(mode="json", exclude_none=True)


def _clean(text: str) -> str:
    """Half of a surrogate pair becomes `?`: no UTF-8 encodes it."""
    return text.encode("utf-8", "replace").decode()


def _size(text: str) -> int:
    return len(text.encode())


def _tail(text: str, limit_bytes: int) -> str:
    """The last bytes, from a character boundary on."""
    if limit_bytes <= 0:
        return ""
    return text.encode()[-limit_bytes:].decode("utf-8", "ignore")
