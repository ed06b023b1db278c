"""A run that was given up, and its second chance: what the new run has of the old one (design P6)."""

from __future__ import annotations

from store_kit import OWN_RUN, PARENT, RUN, WORKER, Store, celery_state

from subagent_tasks.protocol.interfaces import NewEvent
from subagent_tasks.protocol.records import RunRecord
from subagent_tasks.store.runs import Lease
from subagent_tasks.testing import assert_no_leaked_keys

NEW = "run-2"


async def failed_on_the_way(store: Store) -> None:
    """A run that took its prompt, announced a call, and was killed."""
    lease = await store.driven()
    await store.runs.take(lease, seq=0, step="first")
    await store.runs.append(lease, seq=1, purpose="announce", events=[NewEvent("tool_call", {"tool_call_id": "c"})])
    assert await store.kill() == "requested"
    assert await store.settle(lease, ending=await store.ending(killed="enough")) == "settled"


async def test_the_old_run_stays_as_it_ended(store: Store) -> None:
    """P3: one outcome for each id."""
    await failed_on_the_way(store)
    before = await store.runs.get(RUN)
    await store.requeue(NEW)
    assert (await store.runs.get(RUN), await celery_state(store)) == (before, "REVOKED")


async def test_what_was_recorded_is_kept(store: Store) -> None:
    """P7: a call without a result among it, so that it is not repeated."""
    await failed_on_the_way(store)
    await store.requeue(NEW)
    old, new = await store.runs.transcript(RUN), await store.runs.transcript(NEW)
    assert new[:2] == old[:2]
    assert [event.kind for event in new] == ["input", "tool_call", "requeued"]
    assert new[-1].data == {"from": RUN}


async def test_a_run_that_may_not_resume_keeps_its_prompt_alone(store: Store) -> None:
    await failed_on_the_way(store)
    await store.requeue(NEW, keep="prompt")
    assert [event.kind for event in await store.runs.transcript(NEW)] == ["input", "requeued"]


async def test_a_run_that_never_began_can_be_requeued(store: Store) -> None:
    """Its prompt moves from the inbox into the transcript when it settles."""
    await store.queued()
    await store.kill()
    await store.requeue(NEW)
    [prompt, _] = await store.runs.transcript(NEW)
    assert prompt.data["text"] == "do it"


async def test_the_new_run_is_driven_and_written_like_any_other(store: Store) -> None:
    """Its transcript goes on behind what it was given."""
    await failed_on_the_way(store)
    await store.requeue(NEW)
    record = await store.claim(NEW, claim_id="claim-2")
    assert isinstance(record, RunRecord)
    assert (record.seq, record.attempt, record.depth, record.mode) == (3, 0, 1, "background")
    lease = Lease(NEW, record.token, WORKER)
    assert await store.runs.append(lease, seq=3, purpose="record", events=[NewEvent("response", {})]) == 4
    assert await store.settle(lease) == "settled"
    assert [notice.sender_id for notice in await store.sessions.notices(PARENT, after="0-0")] == [RUN, NEW]
    await assert_no_leaked_keys(store.client, store.keys.namespace)


async def test_a_child_s_run_becomes_a_job_of_its_root_as_deep_as_it_was(store: Store) -> None:
    """P9: what it delegates in turn stays under the same cap; its owner, which has ended, is told nothing."""
    lease = await store.delegating()
    assert await store.settle(lease) == "settled"
    await store.kill(OWN_RUN, authority="")
    await store.requeue(NEW, source=OWN_RUN)
    record = await store.runs.get(NEW)
    assert record is not None
    assert (record.owner, record.depth, record.is_owned_by_child) == (PARENT, 2, False)
