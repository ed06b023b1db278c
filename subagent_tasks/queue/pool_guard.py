"""Which pool a worker runs on: ours, or none.

Without `-P` Celery takes the setting `worker_pool`; an explicit `-P` of another pool is refused in one line, before
that pool exists. Children on another pool would block it, or never run.
"""

from __future__ import annotations

from typing import Any, cast

import click
from celery import Celery, bootsteps, concurrency
from click.core import ParameterSource

from subagent_tasks.queue.pool import POOL_PATH, AsyncioPool, refuse


def use_asyncio_pool(app: Celery) -> None:
    """Make `celery -A … worker` run this pool, and refuse to start on any other.

    Without `-P`, Celery takes `worker_pool`; an explicit `-P` of another pool is refused with one line and exit code 1.
    """
    untyped = cast("Any", app)
    untyped.conf.worker_pool = POOL_PATH
    untyped.steps["worker"].add(PoolGuard)


class PoolGuard(bootsteps.Step):
    """Refuses a worker of this app on another pool, before that pool is created."""

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)  # pyright: ignore[reportUnknownMemberType]  # Celery is untyped
        chosen = _implementation(parent.pool_cls)
        if not issubclass(chosen, AsyncioPool):
            refuse(_wrong_pool(f"{chosen.__module__}:{chosen.__qualname__}"))
        if _prefork_was_asked_for():
            refuse(_wrong_pool("prefork"))


def _wrong_pool(name: str) -> str:
    return (
        f"This app runs children on an event loop and needs its own worker pool, not {name}. "
        "Start the worker without -P / --pool."
    )


def _prefork_was_asked_for() -> bool:
    """Whether `-P prefork` was typed. Celery cannot tell it from its default, and puts `worker_pool` in its place."""
    context = click.get_current_context(silent=True)
    if context is None or context.get_parameter_source("pool") is not ParameterSource.COMMANDLINE:
        return False
    custom = concurrency.ALIASES.get("custom")  # `-P custom`, with CELERY_CUSTOM_WORKER_POOL naming a pool of ours
    return not (custom and issubclass(_implementation(custom), AsyncioPool))


def _implementation(name: object) -> type:
    return cast("type", concurrency.get_implementation(name))  # pyright: ignore[reportUnknownMemberType]  # untyped
