"""Every Redis key and channel, its type and its lifetime. Nothing else builds a key.

All share the hash tag `{<namespace>}`. The two exceptions belong to Celery: the queue's list and the result.

    kind        type    lives
    session     hash    while the session is live, then for the retention
    transcript  stream  like its session
    inbox       stream  while it holds an entry (an empty stream costs as much as a full one)
    notices     stream  like its session; an entry at most for the retention
    cursors     hash    like its session: reader -> last acknowledged notice
    jobs        zset    like its session: the owner's jobs, by time of registration in microseconds
    active      set     while the owner has unsettled jobs: what the cap counts
    unsettled   set     while the owner has unsettled runs of any kind
    awaited     set     while a child is suspended: the runs of its own it waits for
    alarms      zset    while anything is suspended: run -> when it goes on at the latest (ms)
    cascade     set     while a run that ended, or was killed, owns unsettled runs: they must end with it
    held        set     while the host process waits for foreground runs
    processes   zset    process id -> the Redis time (ms) its heartbeat lapses
    driven      set     while the process drives anything
    queued      zset    while anything waits in the queue: run -> queued since (ms)
    overtaken   hash    while the queue is used: the high-water marks of what was claimed
    flagged     set     while a driven run has an unanswered kill
    expiring    zset    settled job -> when its owner's index forgets it (ms), one retention after its record
    clock       hash    the last beat of anybody, and until when sweepers must wait
    sweeper     string  the guard: one sweeper at a time
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one namespace."""

    namespace: str

    def session(self, session_id: str) -> str:
        return f"{{{self.namespace}}}:session:{session_id}"

    def transcript(self, session_id: str) -> str:
        return f"{{{self.namespace}}}:transcript:{session_id}"

    def inbox(self, session_id: str) -> str:
        return f"{{{self.namespace}}}:inbox:{session_id}"

    def notices(self, session_id: str) -> str:
        return f"{{{self.namespace}}}:notices:{session_id}"

    def cursors(self, session_id: str) -> str:
        return f"{{{self.namespace}}}:cursors:{session_id}"

    def jobs(self, owner_id: str) -> str:
        return f"{{{self.namespace}}}:jobs:{owner_id}"

    def active(self, owner_id: str) -> str:
        return f"{{{self.namespace}}}:active:{owner_id}"

    def unsettled(self, owner_id: str) -> str:
        return f"{{{self.namespace}}}:unsettled:{owner_id}"

    def awaited(self, session_id: str) -> str:
        return f"{{{self.namespace}}}:awaited:{session_id}"

    def held(self, process_id: str) -> str:
        return f"{{{self.namespace}}}:held:{process_id}"

    def driven(self, process_id: str) -> str:
        return f"{{{self.namespace}}}:driven:{process_id}"

    def queued(self, queue: str) -> str:
        return f"{{{self.namespace}}}:queued:{queue}"

    def overtaken(self, queue: str) -> str:
        return f"{{{self.namespace}}}:overtaken:{queue}"

    @property
    def processes(self) -> str:
        return f"{{{self.namespace}}}:processes"

    @property
    def flagged(self) -> str:
        return f"{{{self.namespace}}}:flagged"

    @property
    def alarms(self) -> str:
        return f"{{{self.namespace}}}:alarms"

    @property
    def cascade(self) -> str:
        return f"{{{self.namespace}}}:cascade"

    @property
    def expiring(self) -> str:
        return f"{{{self.namespace}}}:expiring"

    @property
    def clock(self) -> str:
        return f"{{{self.namespace}}}:clock"

    @property
    def sweeper(self) -> str:
        return f"{{{self.namespace}}}:sweeper"

    # Channels are not keys; they share the prefix so that one ACL pattern covers them.

    def session_channel(self, session_id: str) -> str:
        """Endings and notices of a session's own runs."""
        return f"{{{self.namespace}}}:to-session:{session_id}"

    def process_channel(self, process_id: str) -> str:
        """Rings for a worker: ids of runs it drives that have something to read."""
        return f"{{{self.namespace}}}:to-process:{process_id}"

    def is_ours(self, key: str) -> bool:
        return key.startswith(f"{{{self.namespace}}}:")


def celery_result_key(run_id: str) -> str:
    """Where a plain Celery client looks for the result of `run_id`, and the channel it waits on."""
    return f"celery-task-meta-{run_id}"
