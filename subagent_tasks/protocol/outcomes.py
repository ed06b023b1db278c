"""What an ending means: from a provider's result to the outcome a record keeps, and the texts every reader gets of it.

Pure. Wording is the contract's (behaviour §2.8, §2.9, §3.2, §3.7); drivers, sweepers, kills and the tools use the same.
An error inside an outcome is *stringified*: its kind, a colon, its message.
"""

from __future__ import annotations

import json
import re
from typing import Literal, cast

from pydantic import JsonValue

from subagent_tasks.errors import SubagentError
from subagent_tasks.protocol.leases import CALLER_LOST
from subagent_tasks.protocol.models import ChildResult, JobSnapshot, Outcome, bounded_diagnostic, text_block

DEFAULT_KILL_REASON = "background subagent task killed"
"""Why a run was killed, when nobody said (behaviour §3.1)."""

OWNER_DISPOSED = "owner disposed"
"""Why a run was killed whose owner ended (behaviour §3.8)."""

MAX_SUMMARY_CHARACTERS = 120

HEADLINES = {
    "aborted": "subagent run was cancelled",
    "error": "subagent run failed",
    "max-tokens": "subagent run hit its token limit before finishing",
    "refusal": "subagent declined the task",
}


def outcome_of(
    result: ChildResult | None,
    *,
    error: str | None = None,
    dispose_error: str | None = None,
    kill_reason: str | None = None,
    started: bool = False,
) -> Outcome:
    """How a run ended, for its record (behaviour §3.2).

    `error` is the stringified fault when there is no result, `dispose_error` that of the release (or of the clean-up of
    a start that failed). `kill_reason` says that the run was killed: whatever did not complete then counts as aborted
    (behaviour §5.7), a start that was rejected too. Not so a fault after the run had `started`, nor a failed release:
    something is broken, and the operator must see it. Text that was produced is kept in every case (design §6).
    """
    killed = kill_reason is not None
    if error is None and result is None and not killed:
        error = "Error: the provider ended without a result"
    if error is not None and killed and not started:
        error = None
    error = None if error is None else bounded_diagnostic(error)
    dispose_error = None if dispose_error is None else bounded_diagnostic(dispose_error)
    stop_reason = _stop_reason(result, error=error, killed=killed)
    diagnostic = result.diagnostic if result is not None and stop_reason != "completed" else None

    status: Literal["completed", "killed", "failed"] = "failed"
    detail = error
    if error is None and stop_reason == "completed":
        status = "completed"
    elif error is None and stop_reason == "aborted":
        status = "killed"
        detail = CALLER_LOST if kill_reason == CALLER_LOST else None
    elif error is None:
        detail = stop_reason if diagnostic is None else f"{stop_reason}; diagnostic: {diagnostic}"
    if dispose_error is not None:
        status = "failed"
        detail = "; ".join(part for part in (detail, f"dispose failed: {dispose_error}") if part)
    return Outcome(
        status=status,
        stop_reason=stop_reason,
        output=result.output if result is not None else (),
        diagnostic=diagnostic,
        structured=result.structured if result is not None else None,
        usage=result.usage if result is not None else None,
        error=error,
        dispose_error=dispose_error,
        detail=detail,
    )


def stringified(error: BaseException) -> str:
    """An exception as outcomes keep it: `Error: …` for our own, else its type and message; at most 4096 bytes.

    The members of an aggregate follow its message as `[a; b]` (behaviour §1.8).
    """
    kind = "Error" if isinstance(error, SubagentError) else type(error).__name__
    message = str(error)
    if isinstance(error, BaseExceptionGroup):
        members = cast("BaseExceptionGroup[BaseException]", error).exceptions
        message = f"{error.message} [{'; '.join(stringified(member) for member in members)}]"
    return bounded_diagnostic(f"{kind}: {message}" if message else kind)


def limited(outcome: Outcome, *, max_output_bytes: int) -> Outcome:
    """The outcome, or, when what the child hands back is larger than allowed, a failure that keeps the text that fits.

    Text counts as it is, every other block and the structured output as JSON.
    """
    text = outcome.text.encode("utf-8", "replace")
    others: list[JsonValue] = [block for block in outcome.output if block.get("type") != "text"]
    size = len(text) + sum(len(json.dumps(other)) for other in (*others, outcome.structured) if other is not None)
    if size <= max_output_bytes:
        return outcome
    kept = text[:max_output_bytes].decode("utf-8", "ignore")
    diagnostic = (
        f"output of {size} bytes exceeds the limit of {max_output_bytes} bytes (SUBAGENT_TASKS_MAX_OUTPUT_BYTES)"
    )
    return outcome.model_copy(
        update={
            "status": "failed",
            "stop_reason": "error",
            "output": (text_block(kept),),
            "structured": None,
            "diagnostic": diagnostic,
            "detail": f"error; diagnostic: {diagnostic}",
        }
    )


def canonical_value(run_id: str, outcome: Outcome) -> dict[str, JsonValue]:
    """The canonical foreground value (behaviour §2.4): what the call returns and what Celery's result holds."""
    return {"kind": "foreground", "runId": run_id, "output": list[JsonValue](outcome.output)}


def failure_message(outcome: Outcome) -> str | None:
    """Why a foreground call failed (behaviour §2.8, §2.9), without the `Error: ` of a tool result; None on success."""
    result_failed = outcome.error is not None or outcome.stop_reason != "completed"
    if not result_failed:
        return outcome.dispose_error
    message = _account(outcome)
    if outcome.dispose_error is None:
        return message
    return f"subagent run failed: {_as_error(message, outcome)}; dispose failed: {outcome.dispose_error}"


def status_line(job: JobSnapshot) -> str:
    return f"[status: {job.status}, {job.detail}]" if job.detail else f"[status: {job.status}]"


def completion_text(job: JobSnapshot) -> str:
    """What the owner reads when a job ended; never the output itself (behaviour §3.7)."""
    label = one_line(job.label)
    return (
        f"background job {job.id} ({job.kind}: {label}) finished {status_line(job)}. Read its output with job_output."
    )


def abandoned_text(job: JobSnapshot) -> str:
    """What the owner reads when a foreground run ended because the process that waited for it was gone."""
    return (
        f"foreground run {job.id} ({job.kind}: {one_line(job.label)}) finished {status_line(job)}: the process that "
        "waited for it is gone, and nobody repeated the call in time."
    )


def completion_summary(job: JobSnapshot) -> str:
    return bounded_summary(f"{job.kind} {job.label} {status_line(job)}")


def bounded_summary(text: str) -> str:
    """One line of at most 120 characters (behaviour §1.8)."""
    line = one_line(text)
    return line if len(line) <= MAX_SUMMARY_CHARACTERS else line[: MAX_SUMMARY_CHARACTERS - 1] + "…"


def _stop_reason(result: ChildResult | None, *, error: str | None, killed: bool) -> str:
    if error is not None:
        return "error"
    if result is None or (killed and result.stop_reason != "completed"):
        return "aborted"
    return result.stop_reason


def _account(outcome: Outcome) -> str:
    """Headline, diagnostic, partial text: always in this order (behaviour §2.9)."""
    abnormal = f"subagent run ended abnormally ({outcome.stop_reason})"
    lines = [outcome.error or HEADLINES.get(outcome.stop_reason, abnormal)]
    if outcome.diagnostic:
        lines.append(f"Diagnostic: {outcome.diagnostic}")
    if outcome.text:
        lines += ["Partial output before the run ended:", outcome.text]
    return "\n".join(lines)


def _as_error(message: str, outcome: Outcome) -> str:
    return message if outcome.error is not None else f"Error: {message}"


def one_line(text: str) -> str:
    """A label with line breaks could pass for further lines of a listing or notice."""
    return re.sub(r"[\r\n\v\f\x1c-\x1e\x85\u2028\u2029]+", " ", text)
