"""Celery's `revoke`, so that it kills our runs instead of writing over their results.

Every worker that sees the stock command stores REVOKED for an id it does not run, and keeps the id for hours so that
later messages with it are dropped (protocol §2). Here an id of ours becomes a kill: nothing is stored, nothing is
kept. Ids of others go to the stock command unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from celery.worker.control import Panel  # pyright: ignore[reportMissingTypeStubs]

logger = logging.getLogger(__name__)

Handler = Callable[..., Any]
Kill = Callable[[str, bool], bool]


def install_revoke(kill: Kill) -> None:
    """Replace the control commands `revoke` and `terminate` of this process. A second call replaces `kill` only.

    `kill(task_id, terminate)` answers whether the id is ours; if so it has asked for the kill. It is called in the
    worker's main thread, once per id and worker (the command is a broadcast), so it must be bounded and idempotent.
    If it raises, nobody knows whose the id is, and the stock command does not get it either.
    """
    uninstall_revoke()
    commands = _commands()
    revoke = _Revoke(commands["revoke"], kill)
    commands["revoke"] = revoke
    commands["terminate"] = _Terminate(commands["terminate"], revoke)


def uninstall_revoke() -> None:
    """Put the stock commands back, if they were replaced."""
    commands = _commands()
    for name in ("revoke", "terminate"):
        handler = commands[name]
        if isinstance(handler, _Revoke | _Terminate):
            commands[name] = handler.stock


class _Revoke:
    def __init__(self, stock: Handler, kill: Kill) -> None:
        self.stock = stock
        self._kill = kill

    def __call__(
        self,
        state: Any,
        task_id: str | Iterable[str] | None,
        terminate: bool = False,
        signal: str | None = None,
        **kwargs: Any,
    ) -> dict[str, str]:
        ours = 0
        foreign: list[str] = []
        failed: list[str] = []
        for each in dict.fromkeys([task_id] if isinstance(task_id, str) else task_id or ()):
            try:
                if self._kill(each, terminate):
                    ours += 1
                else:
                    foreign.append(each)
            except Exception as exc:
                logger.error("kill of %s failed: %s", each, type(exc).__name__)
                failed.append(each)
        answer: dict[str, str] = self.stock(state, foreign, terminate, signal, **kwargs) if foreign else {}
        if failed:
            return {"error": f"could not ask for the kill of {', '.join(failed)}; try again"}
        if ours and "error" not in answer:
            return {"ok": "; ".join([*answer.values(), f"kill requested for {ours} run(s)"])}
        return answer or {"ok": "nothing to revoke"}


class _Terminate:
    """The stock `terminate` calls the stock `revoke` by its module's name, past the registry."""

    def __init__(self, stock: Handler, revoke: _Revoke) -> None:
        self.stock = stock
        self._revoke = revoke

    def __call__(self, state: Any, signal: str, task_id: str | Iterable[str], **kwargs: Any) -> dict[str, str]:
        return self._revoke(state, task_id, terminate=True, signal=signal)


def _commands() -> dict[str, Handler]:
    """Celery's registry itself, which it keeps per process."""
    return Panel.data  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # Celery is untyped
