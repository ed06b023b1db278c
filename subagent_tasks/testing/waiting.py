"""Waiting in tests: on conditions, with words, never for a fixed time."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

T = TypeVar("T")

POLL_SECONDS = 0.01


async def wait_until(condition: Callable[[], T | Awaitable[T]], *, description: str, timeout_seconds: float = 5.0) -> T:
    """Wait until `condition()`, awaited if need be, is true, and return what it gave.

    Raises `AssertionError` naming the description and the last value.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await cast("Awaitable[T]", value)
        if value:
            return cast("T", value)
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_seconds:g} s: {description} (last value: {value!r})")
        await asyncio.sleep(POLL_SECONDS)
