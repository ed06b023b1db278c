"""Who goes on after a loss, and what counts as lost."""

from __future__ import annotations

import pytest

from subagent_tasks.protocol.leases import after_worker_loss, beat_interval_seconds, is_lost_in_queue


def test_work_of_a_dead_worker_goes_on() -> None:
    """P6: attempts left and resumable."""
    assert after_worker_loss(attempt=0, max_attempts=3, may_resume=True, killed=False) == "resume"


def test_the_last_attempt_is_not_followed_by_another() -> None:
    """protocol §3: `max_attempts` takings in a row without progress end it."""
    verdicts = [after_worker_loss(attempt=n, max_attempts=3, may_resume=True, killed=False) for n in range(4)]
    assert verdicts == ["resume", "resume", "fail", "fail"]


def test_one_attempt_means_no_second() -> None:
    """BrokerSettings.max_attempts = 1."""
    assert after_worker_loss(attempt=0, max_attempts=1, may_resume=True, killed=False) == "fail"


def test_what_cannot_be_resumed_fails() -> None:
    """design §7: an external process is not resumable."""
    assert after_worker_loss(attempt=0, max_attempts=3, may_resume=False, killed=False) == "fail"


@pytest.mark.parametrize("attempt", [0, 2, 9])
@pytest.mark.parametrize("may_resume", [True, False])
def test_what_was_killed_ends_as_killed(attempt: int, may_resume: bool) -> None:
    """P5: a kill survives its worker."""
    assert after_worker_loss(attempt=attempt, max_attempts=3, may_resume=may_resume, killed=True) == "kill"


@pytest.mark.parametrize("lease_seconds", [0.5, 1.5, 6, 60])
def test_three_beats_fit_into_a_lease(lease_seconds: float) -> None:
    """protocol §4: two may be lost."""
    assert 3 * beat_interval_seconds(lease_seconds) == pytest.approx(lease_seconds)


def is_lost(*, since_ms: int = 1_000, now_ms: int = 10_000, overtaken_before_ms: int = 0, empty: bool = False) -> bool:
    return is_lost_in_queue(
        since_ms=since_ms,
        now_ms=now_ms,
        slack_ms=6_000,
        overtaken_before_ms=overtaken_before_ms,
        queue_is_empty=empty,
    )


def test_work_that_waits_behind_older_work_is_not_lost() -> None:
    """protocol §4: however long a queue is."""
    assert not is_lost(since_ms=1_000, now_ms=10**9)


def test_work_that_younger_work_overtook_is_lost() -> None:
    """protocol §4: queues are first in, first out."""
    assert is_lost(since_ms=1_000, overtaken_before_ms=1_001)


def test_work_is_not_overtaken_by_itself() -> None:
    """Queued in the same millisecond is not later."""
    assert not is_lost(since_ms=1_000, overtaken_before_ms=1_000)


def test_work_whose_queue_is_empty_is_lost() -> None:
    """protocol §4: nothing is left that could be its message."""
    assert is_lost(empty=True)


@pytest.mark.parametrize("evidence", [{"empty": True}, {"overtaken_before_ms": 9_999}])
def test_work_queued_within_the_slack_is_not_lost(evidence: dict[str, int]) -> None:
    """protocol §4: its message may be on its way to a worker that claims it in a moment."""
    assert not is_lost(since_ms=4_001, **evidence)  # pyright: ignore[reportArgumentType]  # parametrised names
