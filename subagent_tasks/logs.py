"""Log lines an operator can act on: a short constant event, then its fields.

The fields stand in the line, because few formats print `extra`, and in `extra`, for those that do. Never put a prompt,
an output or an exception's text into one (P14).
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any, cast


class EventLogger(logging.LoggerAdapter[logging.Logger]):
    """`logger.warning("run requeued", extra={"run_id": …})` prints `run requeued run_id=…`."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        fields = cast("dict[str, object]", kwargs.get("extra") or {})
        shown = " ".join(f"{name}={value}" for name, value in fields.items())
        return (f"{msg} {shown}" if shown else msg), kwargs


def event_logger(name: str) -> EventLogger:
    return EventLogger(logging.getLogger(name))
