"""One-shot delegation: start a run, read it, list an owner's jobs, kill.

What is refused is refused before anything starts, in the admitting script. Texts only a model reads are in `tools`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Literal

from broker_config import BrokerSettings
from subagent_tasks.drive import persist
from subagent_tasks.errors import BrokerUnavailable, CallerError, Conflict, DriveStopped, LimitReached
from subagent_tasks.protocol.models import InboxEntry, JobSnapshot, Mode
from subagent_tasks.protocol.ports import Publisher
from subagent_tasks.protocol.records import RunRecord, RunSpec
from subagent_tasks.settling import Settler
from subagent_tasks.store.runs import KillWord, RunStore

CLOSE_SECONDS = 1.0
"""How long a process that stops waits for Redis to take the kills of what its callers gave up."""


class Delegation:
    """The use cases of one-shot runs, for hosts and command lines alike."""

    def __init__(
        self, *, runs: RunStore, settler: Settler, publisher: Publisher, settings: BrokerSettings, process_id: str
    ) -> None:
        self._runs = runs
        self._settler = settler
        self._publisher = publisher
        self._settings = settings
        self._process_id = process_id
        self._withdrawals: set[asyncio.Task[None]] = set()

    async def start(self, run_id: str, *, owner: str, mode: Mode, spec: RunSpec, token: int | None = None) -> bool:
        """Accept a run; durable once this returns (P1). Returns whether it was accepted before and has moved on.

        `token` is the owner's fencing token when the owner is a child. Raises `LimitReached` at a cap, `Conflict` when
        the id names another request, `CallerError` when the owner's session does not exist, `DriveStopped` when the
        owner is a child that may start nothing any more.
        """
        admission = await self._runs.admit(
            run_id,
            owner=owner,
            mode=mode,
            spec=spec,
            entry=InboxEntry(message_id=run_id, text=spec.request.prompt),
            message=self._publisher.message(run_id, queue=spec.queue, task_id=run_id),
            max_active_jobs=self._settings.max_active_jobs,
            caller=self._process_id,
            token=token,
        )
        match admission.word:
            case "accepted":
                is_waiting = admission.state == "queued"
                if is_waiting:
                    await self._publisher.publish(run_id, queue=spec.queue, task_id=run_id)
                return not is_waiting
            case "conflict":
                raise Conflict(
                    f"call_id {spec.call_id!r} was used before with other arguments (run {run_id}): "
                    "the earlier run is untouched; use a new call_id for a new call"
                )
            case "unknown_owner":
                raise CallerError(
                    f"session {owner!r} is unknown or has expired: open it with host.open_session({owner!r}) first",
                    code="UNKNOWN_SESSION",
                )
            case "stop":
                raise DriveStopped("kill")
            case "stale":
                raise DriveStopped("stale")
            case "refused":
                raise LimitReached(_refusal(admission.cap, admission.details))

    async def kill(self, run_id: str, *, authority: str, reason: str | None, by_owner_model: bool = False) -> KillWord:
        """Ask a run to end, and all below it; as `Settler.kill`."""
        return await self._settler.kill(run_id, authority=authority, reason=reason, by_owner_model=by_owner_model)

    async def requeue(self, run_id: str, *, new_id: str) -> str:
        """Give the work of a run that failed or was killed to a new run, a job of its tree's root: the new run's id.

        Asked twice for one run, it answers with the same. A run that may resume goes on from what was recorded, calls
        whose effect is unknown included; another starts again from its prompt. Raises `CallerError` for a run that is
        unknown, unfinished or completed, `LimitReached` when the root owns too many jobs.
        """
        record = await self._runs.get(run_id)
        word, requeued_as = "unknown", ""
        if record is not None:
            queue = record.spec.queue
            word, requeued_as = await self._runs.requeue(
                record,
                new_id=new_id,
                keep="all" if record.spec.may_resume else "prompt",
                message=self._publisher.message(new_id, queue=queue, task_id=new_id),
                max_active_jobs=self._settings.max_active_jobs,
            )
            if requeued_as == new_id:
                await self._publisher.publish(new_id, queue=queue, task_id=new_id)
        match word:
            case "requeued":
                return requeued_as
            case "refused":
                raise LimitReached(_refusal("active_jobs", (str(self._settings.max_active_jobs),)))
            case _:
                raise CallerError(f"run {run_id} cannot be requeued: {_NOT_REQUEUED[word]}")

    def withdraw(
        self,
        run_id: str,
        *,
        owner: str,
        starting: asyncio.Future[bool],
        unless: Callable[[], bool] | None = None,
    ) -> asyncio.Task[None]:
        """Kill a foreground run whose caller no longer waits; goes on by itself while Redis does not answer.

        `starting` is the run's admission: asked for before it is decided, the kill could come first. With `unless`, the
        caller may come back with the same call id: it gets two leases for that, and if `unless` holds then, nothing is
        killed.
        """

        async def ask() -> None:
            await asyncio.wait({starting})
            error = None if starting.cancelled() else starting.exception()
            if error is not None and not isinstance(error, BrokerUnavailable):
                return
            if unless is not None:
                await asyncio.sleep(2 * self._settings.lease_seconds)
                if unless():
                    return
            reason = "the caller no longer waits"
            with contextlib.suppress(BrokerUnavailable):
                await persist(
                    lambda: self.kill(run_id, authority=owner, reason=reason),
                    patience_seconds=2 * self._settings.lease_seconds,
                )

        withdrawal = asyncio.ensure_future(ask())
        self._withdrawals.add(withdrawal)
        withdrawal.add_done_callback(self._withdrawals.discard)
        return withdrawal

    async def close(self) -> None:
        """Stop what goes on by itself; a kill that is being asked for gets a moment to arrive."""
        if self._withdrawals:
            await asyncio.wait(self._withdrawals, timeout=CLOSE_SECONDS)
        for withdrawal in self._withdrawals:
            withdrawal.cancel()
        await asyncio.gather(*self._withdrawals, return_exceptions=True)

    async def collect(self, run_id: str, *, owner: str) -> RunRecord | Literal["unauthorized", "unknown", "expired"]:
        """Read a job for its owner; reading a settled one is its report, so no notice follows."""
        # Read first: what this process cannot read must be neither marked as reported nor its notice withdrawn.
        record = await self._runs.get(run_id)
        if record is None:
            return "expired" if await self._runs.is_listed(run_id, owner=owner) else "unknown"
        return await self._runs.collect(run_id, owner=owner, is_child=record.is_owned_by_child)

    async def jobs(self, owner: str) -> list[JobSnapshot]:
        """The owner's jobs, in the order they were registered."""
        return await self._runs.jobs(owner)

    async def record(self, run_id: str) -> RunRecord | None:
        """A run's record, whoever owns it; waits out a short outage."""
        return await persist(lambda: self._runs.get(run_id), patience_seconds=self._settings.lease_seconds)


_NOT_REQUEUED = {
    "unknown": "there is none with that id, or its record has expired",
    "unfinished": "it has not ended; kill it first, or wait",
    "completed": "it reached its end; what it gave is in its transcript. Delegate the prompt again for another answer",
    "no_prompt": "its prompt is not in its transcript; delegate it again",
    "unknown_owner": "the session at the root of its tree has expired, so nobody would be told; delegate it again",
}


def _refusal(cap: str, details: tuple[str, ...]) -> str:
    if cap == "depth":
        attempted, limit = details
        return f"subagent depth {attempted} exceeds maxDepth {limit}"
    return (
        f"background job limit reached for this owner (limit: {details[0]}); use job_kill to stop an unneeded job, "
        "wait for it to finish, then retry"
    )
