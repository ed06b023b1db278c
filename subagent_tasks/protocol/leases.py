"""Who may drive, and what becomes of work whose driver fell silent: the lease rules, decided here, acted on elsewhere.

A worker proves life with one heartbeat for all it drives, judged by Redis time. Each run carries a fencing token,
raised by every claim and every take-away, and every script that writes compares it: a process that slept through its
lease can finish the one effect it had announced and commit nothing. Attempts count takings from a dead worker only, and
return to 0 with each committed step, so work that makes progress is never given up and work that kills its workers is.
"""

from __future__ import annotations

from typing import Literal

Verdict = Literal["resume", "kill", "fail"]

WORKER_LOST = "worker lost"
CALLER_LOST = "caller lost"


def after_worker_loss(*, attempt: int, max_attempts: int, may_resume: bool, killed: bool) -> Verdict:
    """What to do with a run whose driver is dead. `attempt` is the number of takings before this one."""
    if killed:
        return "kill"
    if not may_resume or attempt + 1 >= max_attempts:
        return "fail"
    return "resume"


def beat_interval_seconds(lease_seconds: float) -> float:
    """Three beats fit into one lease: two may be lost."""
    return lease_seconds / 3


def is_lost_in_queue(
    *, since_ms: int, now_ms: int, slack_ms: int, overtaken_before_ms: int, queue_is_empty: bool
) -> bool:
    """Whether queued work lost its message rather than merely waits (protocol §4).

    Queues are first in, first out: the message is gone if work queued later was claimed at least `slack_ms` ago
    (`overtaken_before_ms` is the newest such queue time), or if nothing is left in the queue at all.
    """
    if now_ms - since_ms < slack_ms:
        return False
    return since_ms < overtaken_before_ms or queue_is_empty
