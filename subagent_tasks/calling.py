"""Carrying out the calls of one message: side by side where they may be, results in model order (behaviour §7).

Which call may start when is decided in `scheduling`; here they are started, awaited and, after an abort, drained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from subagent_tasks.scheduling import Progress, may_start

T = TypeVar("T")


async def carry_out(
    calls: Sequence[Callable[[], Coroutine[Any, Any, T]]],
    *,
    is_exclusive: Callable[[int], bool],
    max_parallel: int,
    signal: asyncio.Event | None = None,
) -> list[T | None]:
    """The calls' results, in their order; None for a call that an abort kept from starting.

    Once `signal` is set no call starts any more; those under way come to their end. The same holds when a call raises:
    the others drain, and the first error is raised. Cancelling this cancels the calls under way, and waits for them.
    """
    progress = [Progress.WAITING] * len(calls)
    tasks: dict[asyncio.Task[T], int] = {}
    results: list[T | None] = [None] * len(calls)
    failure: BaseException | None = None
    try:
        while True:
            is_over = failure is not None or (signal is not None and signal.is_set())
            exclusive = [is_exclusive(position) for position in range(len(calls))]
            for position in [] if is_over else may_start(progress, exclusive, max_parallel=max_parallel):
                progress[position] = Progress.RUNNING
                tasks[asyncio.create_task(calls[position]())] = position
            if not tasks:
                break
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                position = tasks.pop(task)
                progress[position] = Progress.ENDED
                error = asyncio.CancelledError() if task.cancelled() else task.exception()
                if error is None:
                    results[position] = task.result()
                else:
                    failure = failure or error
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    if failure is not None:
        raise failure
    return results
