"""A run as a story: who asked for what, each step with how long it took, and how it ended. Pure.

It is for whoever was not there. Long texts are shortened and say so; `full` shows them all. What the record alone knows
(who asked, the outcome) frames what the transcript tells.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

from subagent_tasks.protocol.lifecycle import State
from subagent_tasks.protocol.models import TranscriptEvent, Usage
from subagent_tasks.protocol.records import RunRecord
from subagent_tasks.terminal import brief, spelled

MAX_TEXT_CHARACTERS = 1500
"""Of a prompt or an answer: about what a screen holds."""
MAX_STEP_CHARACTERS = 400
"""Of a tool's arguments or result, or of a model's thoughts."""
MAX_LABEL_CHARACTERS = 200

OFFSET_WIDTH = 12
INDENT = " " * (OFFSET_WIDTH + 4)


class Story:
    """Tells one run. Give it the events in order, once each."""

    def __init__(self, record: RunRecord, *, full: bool = False) -> None:
        self._record = record
        self._full = full
        self._started_ms: dict[str, int] = {}
        self._asked_ms = record.created_at
        self._which: dict[str, str] = {}
        self._previous_ms = record.created_at
        self._last_words = ""

    def opening(self) -> list[str]:
        """Who asked whom, and how."""
        record, spec = self._record, self._record.spec
        of_session = record.owner == record.root
        asked_by = f"session {_safe(record.owner)}" if of_session else f"run {_safe(record.owner)}"
        root = "" if of_session else f", in the tree of session {_safe(record.root)}"
        tool = f", with the tool {_safe(spec.tool)}" if spec.tool else ""
        call = f", call {_safe(spec.call_id)}" if spec.call_id else ""
        return [
            f"run {_safe(record.id)}: {brief(spec.label, MAX_LABEL_CHARACTERS)}",
            f"  asked by  {asked_by}{tool}{call}{root}",
            f"  asked for {'a background job' if record.mode == 'background' else 'an answer at once (foreground)'} of "
            f"the provider {_safe(spec.provider)}; depth {record.depth}; at most {spelled(spec.run_limit_seconds)}",
            f"  accepted  {_date(record.created_at)}; below, the time since then",
            "",
        ]

    def lines(self, event: TranscriptEvent) -> list[str]:
        """What one event tells."""
        data = cast("dict[str, Any]", event.data)
        told = self._told(event, data)
        self._previous_ms = event.at_ms
        if not told:
            return []
        offset = spelled((event.at_ms - self._record.created_at) / 1000)
        return [f"{offset:>{OFFSET_WIDTH}}  {told[0]}", *told[1:]]

    def ending(self, record: RunRecord) -> list[str]:
        """How it ended, by the record as it is at the end; or where it stands."""
        return ["", *(self._outcome(record) if record.is_settled else _standing(record)), *_attempts(record)]

    def _told(self, event: TranscriptEvent, data: Mapping[str, Any]) -> list[str]:
        match event.kind:
            case "input":
                source, lane = data.get("source", "user"), data.get("lane", "next-turn")
                what = "takes its prompt" if event.seq == 0 else f"takes a message from {source} ({lane})"
                return [f"{what}:", *self._text(data.get("text"), MAX_TEXT_CHARACTERS)]
            case "request":
                return ["tells its model:", *self._parts(data.get("parts"))]
            case "response":
                return self._response(event, data.get("message") or {})
            case "tool_call":
                self._started_ms[str(data.get("tool_call_id"))] = event.at_ms
                return [f"runs the tool {self._tool(data)}"]
            case "tool_result":
                return self._result(event, data)
            case "suspended":
                awaited = ", ".join(_safe(run_id) for run_id in cast("Sequence[object]", data.get("awaited") or ()))
                return [f"waits for runs of its own, and holds no worker: {awaited}"]
            case "requeued":
                return [f"was requeued by hand: all above are the steps of run {_safe(data.get('from'))}"]
            case "settled":
                return []
            case _:
                return [f"{_safe(event.kind)}: a step this version cannot tell; --json shows it"]

    def _response(self, event: TranscriptEvent, message: Mapping[str, Any]) -> list[str]:
        usage = cast("Mapping[str, Any]", message.get("usage") or {})
        tokens = f"{usage.get('input_tokens', 0)} tokens in, {usage.get('output_tokens', 0)} out"
        cut = "; cut off at its token limit" if message.get("finish_reason") == "length" else ""
        took = spelled((event.at_ms - self._previous_ms) / 1000)
        self._asked_ms = event.at_ms
        told = [f"the model {_safe(message.get('model_name') or '?')} answers after {took} ({tokens}){cut}"]
        parts = cast("Sequence[Mapping[str, Any]]", message.get("parts") or ())
        self._which = _which_of_several(parts)
        self._last_words = "".join(str(part.get("content", "")) for part in parts if part.get("part_kind") == "text")
        return told + self._parts(parts)

    def _parts(self, parts: Any) -> list[str]:
        told: list[str] = []
        for part in cast("Sequence[Mapping[str, Any]]", parts or ()):
            match part.get("part_kind"):
                case "text":
                    told += self._text(part.get("content"), MAX_TEXT_CHARACTERS)
                case "thinking" if part.get("content"):
                    told += [f"{INDENT}thinks:", *self._text(part.get("content"), MAX_STEP_CHARACTERS)]
                case "tool-call":
                    which = self._which.get(str(part.get("tool_call_id")), "")
                    told += [f"{INDENT}calls {_safe(part.get('tool_name'))}{which} with"]
                    told += self._text(part.get("args") or {}, MAX_STEP_CHARACTERS)
                case kind:
                    told += [f"{INDENT}{_safe(kind)}:", *self._text(part.get("content"), MAX_STEP_CHARACTERS)]
        return told

    def _result(self, event: TranscriptEvent, data: Mapping[str, Any]) -> list[str]:
        name, started_ms = self._tool(data), self._started_ms.pop(str(data.get("tool_call_id")), None)
        outcome = data.get("outcome", "success")
        if started_ms is None and (outcome == "success" or str(data.get("content")).startswith("Error: ")):
            # Our own tools ask by their own moves whether they may start, so they are not announced.
            started_ms = self._asked_ms
        if data.get("effect") == "unknown":
            said = f"the tool {name} may have had an effect: what ran it stopped before its result was written down"
        elif started_ms is None:
            said = f"the tool {name} was not run"
        else:
            how = {"success": "returned", "failed": "failed"}.get(str(outcome), f"ended ({_safe(outcome)})")
            said = f"the tool {name} {how} after {spelled((event.at_ms - started_ms) / 1000)}"
        return [f"{said}:", *self._text(data.get("content"), MAX_STEP_CHARACTERS)]

    def _tool(self, data: Mapping[str, Any]) -> str:
        return f"{_safe(data.get('tool_name'))}{self._which.get(str(data.get('tool_call_id')), '')}"

    def _outcome(self, record: RunRecord) -> list[str]:
        outcome, finished_ms = record.outcome, record.finished_at or record.created_at
        total = spelled((finished_ms - record.created_at) / 1000)
        if outcome is None:
            return [f"ended after {total}; its outcome is not in the record"]
        reason = "" if outcome.stop_reason == outcome.status else f" ({_safe(outcome.stop_reason)})"
        lines = [f"{outcome.status}{reason} after {total}: {_spans(record, finished_ms=finished_ms)}"]
        if outcome.usage is not None:
            lines.append(f"  {_spent(outcome.usage)}")
        accounts = (
            ("it was asked to end", record.kill_reason),
            ("error", outcome.error),
            ("diagnostic", outcome.diagnostic),
            ("release failed", outcome.dispose_error),
        )
        for name, account in accounts:
            if account:
                lines += [f"  {name}:", *self._text(account, MAX_TEXT_CHARACTERS)]
        if outcome.text and outcome.text == self._last_words:
            lines.append("  that last answer is what came back")
        elif outcome.text:
            lines += ["  what came back:", *self._text(outcome.text, MAX_TEXT_CHARACTERS)]
        else:
            lines.append("  no text came back")
        others = sorted({str(block.get("type")) for block in outcome.output if block.get("type") != "text"})
        if others:
            lines.append(f"  beside it came back: {_safe(', '.join(others))}")
        if outcome.structured is not None:
            lines += ["  structured output:", *self._text(outcome.structured, MAX_TEXT_CHARACTERS)]
        return lines

    def _text(self, value: object, limit: int) -> list[str]:
        """A text below its step, shortened to `limit` characters unless all is asked for."""
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        shown = text if self._full else text[:limit]
        lines = [f"{INDENT}| {_printable(line)}" for line in shown.splitlines()]
        if left_out := len(text) - len(shown):
            lines.append(f"{INDENT}… {left_out} of {len(text)} characters left out: --full shows them")
        return lines


def _which_of_several(parts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What tells the calls of one tool in one message apart, by call id."""
    calls = [part for part in parts if part.get("part_kind") == "tool-call"]
    told: dict[str, str] = {}
    for call in calls:
        same = [str(other.get("tool_call_id")) for other in calls if other.get("tool_name") == call.get("tool_name")]
        if len(same) > 1:
            own_id = str(call.get("tool_call_id"))
            told[own_id] = f" ({same.index(own_id) + 1} of {len(same)})"
    return told


def _standing(record: RunRecord) -> list[str]:
    match record.state:
        case State.QUEUED:
            said = "queued: it waits for a worker"
        case State.SUSPENDED:
            said = "running: it waits for runs of its own"
        case _ if record.kill is not None:
            said = "stopping: its worker was asked to end it"
        case _:
            said = f"running: driven by {_safe(record.worker)}"
    return [f"{said}. --follow goes on with it; subagent-tasks status says why it waits"]


def _attempts(record: RunRecord) -> list[str]:
    lines: list[str] = []
    # Each claim raises the token, and so does each return to the queue.
    if record.token > 1:
        lines.append("  it was driven more than once: handed back or lost by a worker, or resumed after a wait")
    if record.attempt:
        lines.append(f"  workers it lost since its last step: {record.attempt}")
    return lines


def _spans(record: RunRecord, *, finished_ms: int) -> str:
    if record.started_at is None:
        return "no worker had taken it"
    waited = spelled((record.started_at - record.created_at) / 1000)
    return f"it waited {waited} for a worker and ran {spelled((finished_ms - record.started_at) / 1000)}"


def _spent(usage: Usage) -> str:
    return (
        f"model requests {usage.requests}, tool calls {usage.tool_calls}, tokens in {usage.input_tokens}, "
        f"tokens out {usage.output_tokens}"
    )


def _date(at_ms: int) -> str:
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _safe(value: object) -> str:
    return brief(str(value))


def _printable(line: str) -> str:
    """What a terminal would obey instead of showing is replaced."""
    line = line.expandtabs(4)
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line)
