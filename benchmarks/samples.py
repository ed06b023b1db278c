"""From many durations to the few numbers that are shown. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One number, and what the single rounds gave for it."""

    value: float
    rounds: tuple[float, ...] = ()


def median_of(rounds: Sequence[float]) -> Figure:
    """The median of rounds."""
    return Figure(statistics.median(rounds), tuple(rounds))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all do not exceed. Raises `ValueError` without values."""
    if not values:
        raise ValueError("a percentile of nothing: the measurement before it recorded no value")
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank), 1) - 1]


def p50(rounds: Sequence[Sequence[float]]) -> Figure:
    """The median of the rounds' medians."""
    return median_of([percentile(values, 50) for values in rounds])


def p99(rounds: Sequence[Sequence[float]]) -> Figure:
    """Of all rounds together: one round has too few values for it."""
    together = [value for values in rounds for value in values]
    return Figure(percentile(together, 99), tuple(percentile(values, 99) for values in rounds))


def rate_between(moments: Sequence[float], *, first_percent: float = 15, last_percent: float = 95) -> float:
    """Events per second between two shares of all events, so that neither the start nor the end counts."""
    first, last = percentile(moments, first_percent), percentile(moments, last_percent)
    return len(moments) * (last_percent - first_percent) / 100 / (last - first)
