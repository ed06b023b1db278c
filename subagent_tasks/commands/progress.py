"""A transcript event as lines a person reads while a child works. Pure; it is for the terminal of whoever asked."""

from __future__ import annotations

import json
from typing import Any, cast

from subagent_tasks.protocol.models import TranscriptEvent
from subagent_tasks.terminal import brief


def event_lines(event: TranscriptEvent) -> list[str]:
    """What happened, one line each; empty for what says nothing to a person."""
    data = cast("dict[str, Any]", event.data)
    match event.kind:
        case "input":
            return ["· a worker has taken the prompt"]
        case "response":
            return [line for part in data["message"].get("parts", ()) for line in _part_lines(part)]
        case "tool_result":
            mark = "←" if data.get("outcome", "success") == "success" else "✗"
            return [f"{mark} {data.get('tool_name')}: {brief(_text(data.get('content')))}"]
        case "settled":
            return [f"· ended: {data.get('status')} ({data.get('stopReason')})"]
        case _:
            return []


def _part_lines(part: dict[str, Any]) -> list[str]:
    match part.get("part_kind"):
        case "text" if part.get("content"):
            return [f"» {brief(str(part['content']))}"]
        case "tool-call":
            return [f"→ {part.get('tool_name')}({brief(_text(part.get('args')))})"]
        case _:
            return []


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
