"""Ending children that cannot be asked to end: kills, and owners that leave (behaviour §3.5, §3.8).

One running app for the module, with a provider whose every cancel throws.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from subagent_tasks import ChildRequest, ChildResult, Session
from subagent_tasks.protocol.interfaces import Drive, Run
from subagent_tasks.testing import Kit, fake_app
from tests.behaviour.bench import first_notices, job_id_of, job_of, status_of, until
from tests.behaviour.provider import Child, ScriptedProvider

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True, slots=True)
class UnreachableRun:
    """A run like the one it wraps, but asking it to end fails."""

    run: Run

    async def result(self) -> ChildResult:
        return await self.run.result()

    async def cancel(self, reason: str) -> None:
        await self.run.cancel(reason)
        raise OSError("nobody answers")

    async def dispose(self) -> None:
        await self.run.dispose()


class UnreachableProvider(ScriptedProvider):
    """Asking one of its children to end throws."""

    async def start(self, request: ChildRequest, drive: Drive) -> Run:
        return UnreachableRun(await super().start(request, drive))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kit() -> AsyncIterator[Kit]:
    async with fake_app(providers=[UnreachableProvider()], provider="scripted") as kit:
        yield kit


@pytest.fixture
def provider(kit: Kit) -> UnreachableProvider:
    provider = kit.app.providers["scripted"]
    assert isinstance(provider, UnreachableProvider)
    return provider


async def running_job(session: Session, child: Child) -> str:
    job_id = job_id_of(await session.call("subagent", child.in_background()))
    await until(lambda: child.is_running, "the child runs")
    return job_id


async def ending(session: Session, job_id: str) -> str:
    """The job's status, once it has ended."""
    return status_of(await session.call("job_output", {"job_id": job_id, "wait": True, "timeout_ms": 5000}))


async def test_a_kill_stands_though_the_childs_cancel_throws(kit: Kit, provider: UnreachableProvider) -> None:
    """behaviour §10.58: the kill is written down before anybody is asked to carry it out, so the call succeeds."""
    child = provider.child(holds_result=True, ignores_cancel=True)
    job_id = await running_job(kit.session, child)
    asked = await kit.session.call("job_kill", {"job_id": job_id})
    assert (asked.is_error, status_of(asked)) == (False, "stopping")
    assert await ending(kit.session, job_id) == "killed"
    assert child.log[-1] == "dispose"


async def test_a_kill_of_a_finished_job_reaches_no_child(kit: Kit, provider: UnreachableProvider) -> None:
    """behaviour §10.58: `already-finished`, and the outcome stays."""
    child = provider.child()
    job_id = job_id_of(await kit.session.call("subagent", child.in_background()))
    assert await ending(kit.session, job_id) == "completed"
    asked = await kit.session.call("job_kill", {"job_id": job_id})
    assert asked.value == {"outcome": "already-finished", "job": job_of(asked)}
    assert status_of(asked) == "completed"
    assert child.cancel_reasons == []


async def test_closing_with_cancel_does_not_hang_on_a_cancel_that_throws(
    kit: Kit, provider: UnreachableProvider
) -> None:
    """behaviour §10.64: the child's task is ended instead; the other jobs are ended all the same."""
    session = await kit.host.open_session("leaves with two jobs")
    children = [provider.child(holds_result=True, ignores_cancel=True) for _ in range(2)]
    jobs = [await running_job(session, child) for child in children]
    await session.close(cancel_jobs=True)
    again = await kit.host.open_session(session.id)
    assert [await ending(again, job_id) for job_id in jobs] == ["killed", "killed"]
    assert [child.log[-1] for child in children] == ["dispose", "dispose"]


async def test_the_first_outcome_wins_over_the_closing(kit: Kit, provider: UnreachableProvider) -> None:
    """behaviour §10.64: a job that ended before the closing keeps its outcome and its notice."""
    session = await kit.host.open_session("leaves with a finished job")
    job_id = job_id_of(await session.call("subagent", provider.child().in_background()))
    (notice,) = await first_notices(session, 1)
    assert "[status: completed]" in notice.text
    await session.close(cancel_jobs=True)
    again = await kit.host.open_session(session.id)
    assert [each.text for each in await first_notices(again, 1)] == [notice.text]
    assert await ending(again, job_id) == "completed"
