"""Which calls of one message may start now: one rule for hosts and children (behaviour §7). Pure.

A rolling pool in model order: at most `max_parallel` run at once, and the end of one lets the next start. An exclusive
call is a barrier: everything before it has ended when it starts, and nothing after it starts until it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from subagent_tasks.errors import CallerError

DEFAULT_MAX_PARALLEL = 10


class Progress(Enum):
    """Where one call stands."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


def checked_max_parallel(value: object) -> int:
    """A positive whole number, or `CallerError` with the contract's text."""
    if type(value) is not int or value < 1:
        raise CallerError(f"maxParallelToolCalls must be a positive integer, got {value!r}")
    return value


def may_start(progress: Sequence[Progress], exclusive: Sequence[bool], *, max_parallel: int) -> list[int]:
    """The positions of the calls to start now, in model order.

    `exclusive` is asked anew before each start: an earlier call may have changed the tools.
    """
    starting: list[int] = []
    running = sum(state is Progress.RUNNING for state in progress)
    is_first_open = True
    for position, (state, alone) in enumerate(zip(progress, exclusive, strict=True)):
        if state is Progress.ENDED:
            continue
        if alone:
            # A barrier: it starts once it is the first that has not ended, and lets nothing past it.
            return [*starting, position] if is_first_open and state is Progress.WAITING else starting
        if state is Progress.WAITING:
            if running + len(starting) >= max_parallel:
                return starting
            starting.append(position)
        is_first_open = False
    return starting
