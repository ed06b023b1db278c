"""Which calls of one message start when (behaviour §7)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subagent_tasks.errors import CallerError
from subagent_tasks.scheduling import Progress, checked_max_parallel, may_start

W, R, E = Progress.WAITING, Progress.RUNNING, Progress.ENDED


@pytest.mark.parametrize(
    ("progress", "exclusive", "max_parallel", "expected"),
    [
        ([W, W, W], [False] * 3, 10, [0, 1, 2]),
        ([W, W, W], [False] * 3, 1, [0]),
        ([R, W, W], [False] * 3, 2, [1]),
        ([E, W, W], [False] * 3, 1, [1]),
        ([R, W], [False, True], 10, []),
        ([E, W, W], [False, True, False], 10, [1]),
        ([E, R, W], [False, True, False], 10, []),
        ([E, E, W], [False, True, False], 10, [2]),
        ([W, W], [True, True], 10, [0]),
        ([], [], 10, []),
    ],
)
def test_what_may_start(
    progress: list[Progress], exclusive: list[bool], max_parallel: int, expected: list[int]
) -> None:
    """behaviour §7.2, §7.3: a rolling pool in model order, exclusive calls as barriers."""
    assert may_start(progress, exclusive, max_parallel=max_parallel) == expected


@given(st.lists(st.booleans(), max_size=8), st.integers(1, 4), st.data())
def test_any_order_of_endings_runs_every_call_once_within_the_bounds(
    exclusive: list[bool], max_parallel: int, data: st.DataObject
) -> None:
    """behaviour §7.2, §7.3, for all interleavings."""
    progress = [W] * len(exclusive)
    while any(state is not E for state in progress):
        for position in may_start(progress, exclusive, max_parallel=max_parallel):
            assert progress[position] is W
            progress[position] = R
        running = [position for position, state in enumerate(progress) if state is R]
        assert 0 < len(running) <= max_parallel
        for position in running:
            if exclusive[position]:
                assert running == [position]
                assert all(state is E for state in progress[:position])
                assert all(state is W for state in progress[position + 1 :])
        progress[data.draw(st.sampled_from(running))] = E


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2", None])
def test_a_bad_pool_size_is_refused(value: object) -> None:
    """behaviour §7.2"""
    with pytest.raises(CallerError, match="maxParallelToolCalls must be a positive integer"):
        checked_max_parallel(value)
