"""What the scripts should do, said once more in plain Python: small, without Redis, and without any of their code.

It knows words and states, not times. One parent session owns two jobs and a foreground run; the first job is a child
that owns a foreground run and a job of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PARENT = "parent"
OWNER_OF = {"a": PARENT, "b": PARENT, "f": PARENT, "a-f": "a", "a-j": "a"}
"""Run -> its owner. Those with an f are foreground runs."""
MAX_JOBS = 1
MAX_DEPTH = 2


@dataclass
class Run:
    """One run's record, as far as the model goes."""

    id: str
    state: str = "queued"
    token: int = 0
    seq: int = 0
    attempt: int = 0
    worker: str = ""
    claim: str = ""
    is_killed: bool = False
    is_told: bool = False
    """Its owner's model killed it, or has read its ending."""
    status: str = ""
    settled_by: tuple[str, int] | None = None
    done: dict[str, int] = field(default_factory=dict[str, int])
    """Move -> the token it was last made with: made again, it answers the same."""
    lanes: list[str] = field(default_factory=lambda: ["next-turn"])
    awaited: set[str] = field(default_factory=set[str])
    wake_at: int = 0

    @property
    def owner(self) -> str:
        return OWNER_OF[self.id]

    @property
    def is_job(self) -> bool:
        return "f" not in self.id


@dataclass
class Model:
    """All of it; each move answers the word that its script should."""

    alive: set[str] = field(default_factory=set[str])
    runs: dict[str, Run] = field(default_factory=dict[str, Run])
    cascade: set[str] = field(default_factory=set[str])
    notices: list[str] = field(default_factory=list[str])
    driven: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """Worker and run. A claim that takes a run over leaves the old worker's entry to the sweepers."""

    def open_runs(self) -> list[str]:
        """What can still move on: unsettled runs, and those that could be admitted."""
        known = [run.id for run in self.runs.values() if run.state != "settled"]
        return known + [run_id for run_id in OWNER_OF if OWNER_OF[run_id] == PARENT and run_id not in self.runs]

    def unsettled(self, owner: str) -> set[str]:
        return {run.id for run in self.runs.values() if run.owner == owner and run.state != "settled"}

    def active(self, owner: str) -> set[str]:
        return {run_id for run_id in self.unsettled(owner) if self.runs[run_id].is_job}

    def queued(self) -> set[str]:
        return {run.id for run in self.runs.values() if run.state == "queued"}

    def is_ended_above(self, run_id: str) -> bool:
        owner = OWNER_OF[run_id]
        return owner != PARENT and (owner in self.cascade or self.is_ended_above(owner))

    def admit(self, run_id: str, *, owner_token: int | None) -> str:
        if run_id in self.runs:
            return "accepted"
        owner = OWNER_OF[run_id]
        if owner != PARENT:
            above = self.runs[owner]
            if above.state != "driven" or above.token != owner_token:
                return "stale"
            if above.is_killed or self.is_ended_above(owner):
                return "stop"
        if "f" not in run_id and len(self.active(owner)) >= MAX_JOBS:
            return "refused"
        self.runs[run_id] = Run(run_id)
        return "accepted"

    def claim(self, run_id: str, *, worker: str, claim: str) -> str:
        run = self.runs.get(run_id)
        if run is None:
            return "gone"
        if run.state == "driven" and (run.worker, run.claim) == (worker, claim):
            return "claimed"
        if worker not in self.alive:
            return "no_heartbeat"
        if run.state not in ("queued", "driven"):
            return run.state
        if run.state == "driven" and run.worker in self.alive:
            return "driven"
        if self.is_ended_above(run_id):
            return "ended_above"
        run.attempt += run.state == "driven"
        run.state, run.worker, run.claim, run.token = "driven", worker, claim, run.token + 1
        self.driven.add((worker, run_id))
        return "claimed"

    def take(self, run_id: str, *, token: int, seq: int, step: str) -> str:
        run = self.runs.get(run_id)
        if run is None or run.state != "driven" or run.token != token:
            return "stale"
        if run.seq > seq:
            return "entries"
        if run.seq < seq:
            return "stale"
        if run.is_killed or self.is_ended_above(run_id):
            return "stop"
        turn = ["next-turn"] if step == "first" and "next-turn" in run.lanes else []
        taken = [lane for lane in run.lanes if lane == "next-step"] + turn
        if taken:
            run.seq, run.attempt = run.seq + len(taken), 0
            run.lanes = [lane for lane in run.lanes if lane == "next-turn" and not turn]
        return "entries"

    def append(self, run_id: str, *, token: int, seq: int, purpose: str) -> str:
        run = self.runs.get(run_id)
        if run is None or run.state != "driven" or run.token != token:
            return "stale"
        if run.seq == seq + 1:
            return "ok"
        if purpose == "announce" and (run.is_killed or self.is_ended_above(run_id)):
            return "stop"
        if run.seq != seq:
            return "stale"
        run.seq += 1
        run.attempt = 0 if purpose == "record" else run.attempt
        return "ok"

    def suspend(self, run_id: str, *, token: int, seq: int, awaited: set[str]) -> str:
        run = self.runs.get(run_id)
        if run is not None and run.done.get("suspend") == token:
            return "suspended"
        if run is None or run.state != "driven" or run.token != token or run.seq != seq:
            return "stale"
        if run.is_killed:
            return "stop"
        if not (open_runs := awaited & self.unsettled(run_id)):
            return "go_on"
        self.driven.discard((run.worker, run_id))
        run.done |= {"suspend": token}
        run.done.pop("wake", None)
        run.state, run.worker, run.token, run.seq, run.attempt = "suspended", "", run.token + 1, run.seq + 1, 0
        run.awaited, run.wake_at = open_runs, 0
        return "suspended"

    def wake(self, run_id: str) -> str:
        run = self.runs.get(run_id)
        if run is not None and "wake" in run.done:
            return "woken"
        if run is None or run.state != "suspended":
            return "moved_on"
        run.done |= {"wake": 0}
        run.state, run.awaited = "queued", set()
        return "woken"

    def release(self, run_id: str, *, token: int) -> str:
        run = self.runs.get(run_id)
        if run is not None and run.done.get("release") == token:
            return "released"
        if run is None or run.state != "driven" or run.token != token:
            return "stale"
        if run.is_killed:
            return "stop"
        run.done |= {"release": token}
        self.driven.discard((run.worker, run_id))
        run.state, run.worker, run.token = "queued", "", run.token + 1
        return "released"

    def reclaim(self, run_id: str, *, token: int, worker: str) -> str:
        run = self.runs.get(run_id)
        if run is not None and run.done.get("reclaim") == token:
            return "requeued"
        if run is None or run.state != "driven" or run.worker != worker:
            self.driven.discard((worker, run_id))
            return "not_driven"
        if run.token != token or worker in self.alive:
            return "not_driven"
        if run.is_killed:
            return "stop"
        run.done |= {"reclaim": token}
        self.driven.discard((worker, run_id))
        run.state, run.worker, run.token, run.attempt = "queued", "", run.token + 1, run.attempt + 1
        return "requeued"

    def settle(self, run_id: str, *, token: int, worker: str, on_behalf: str) -> str:
        run = self.runs.get(run_id)
        if run is None:
            return "unknown"
        if run.state == "settled":
            return "settled" if run.settled_by == (on_behalf, token) else "already"
        if run.state != "driven" or (run.token, run.worker) != (token, worker):
            return "stale"
        if on_behalf == "sweeper" and worker in self.alive:
            return "stale"
        self.driven.discard((worker, run_id))
        run.settled_by = (on_behalf, token)
        self._finish(run, "completed")
        return "settled"

    def kill(self, run_id: str, *, by_model: bool) -> str:
        run = self.runs.get(run_id)
        if run is None:
            return "unknown"
        if run.state == "settled":
            if by_model:
                self._withdraw(run)
            return "already_finished"
        run.is_killed = True
        run.is_told = run.is_told or by_model
        if run.state in ("queued", "suspended"):
            self._finish(run, "killed")
            return "killed"
        self._cascade(run)
        return "requested"

    def collect(self, run_id: str) -> str:
        run = self.runs.get(run_id)
        if run is None:
            return "unknown"
        if run.state == "settled":
            self._withdraw(run)
        return "job"

    def cascaded(self, run_id: str) -> str:
        if self.unsettled(run_id):
            return "not_yet"
        self.cascade.discard(run_id)
        return "done"

    def _finish(self, run: Run, status: str) -> None:
        if run.seq == 0:
            run.seq = len(run.lanes)
        run.state, run.status, run.worker, run.seq, run.lanes, run.awaited = (
            "settled",
            status,
            "",
            run.seq + 1,
            [],
            set(),
        )
        owner = self.runs.get(run.owner)
        if owner is not None and owner.state == "settled" and not self.unsettled(owner.id):
            self.cascade.discard(owner.id)
        if run.is_job and not (run.is_told and status == "killed"):
            if owner is None:
                self.notices.append(run.id)
            elif owner.state != "settled":
                owner.lanes.append("next-step")
        if owner is not None:
            owner.awaited.discard(run.id)
            if owner.state == "suspended" and len(owner.awaited) <= owner.wake_at:
                owner.state, owner.awaited = "queued", set()
        self._cascade(run)

    def _cascade(self, run: Run) -> None:
        if self.unsettled(run.id):
            self.cascade.add(run.id)
        else:
            self.cascade.discard(run.id)

    def _withdraw(self, run: Run) -> None:
        if run.id in self.notices:
            self.notices.remove(run.id)
        run.is_told = True
