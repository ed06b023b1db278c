"""Admitting: all or nothing, under every cap, once."""

from __future__ import annotations

import asyncio

import pytest
from store_kit import PARENT, QUEUE, RUN, Store

from subagent_tasks.errors import CallerError, UnsupportedVersion
from subagent_tasks.protocol.models import Mode
from subagent_tasks.protocol.records import RunRecord


async def test_an_accepted_run_is_recorded_and_queued_in_one_step(store: Store) -> None:
    """P1: once the id is out, everything is there."""
    await store.queued()
    record = await store.runs.get(RUN)
    assert record is not None
    assert (record.state, record.owner, record.root, record.depth) == ("queued", PARENT, PARENT, 1)
    assert await store.messages() == [f"message of {RUN}"]
    assert [run_id for run_id, _ in await store.runs.queued(QUEUE)] == [RUN]
    assert [job.id for job in await store.runs.jobs(PARENT)] == [RUN]


async def test_the_prompt_lies_in_the_inbox_and_not_in_the_record(store: Store) -> None:
    """protocol §1: admit writes the inbox; P14: a record is read by lists and logs."""
    await store.sessions.open(PARENT)
    await store.admit(prompt="the secret prompt")
    record = await store.runs.get(RUN)
    assert record is not None
    assert record.spec.request.prompt == ""
    assert "the secret prompt" in str(await store.client.xrange(store.keys.inbox(RUN)))


async def test_another_broker_gets_no_message_from_the_script(store: Store) -> None:
    """protocol §1: with another broker it is published right after the move."""
    await store.sessions.open(PARENT)
    lease = await store.driven()
    await store.client.delete(QUEUE)
    assert await store.runs.release(lease, queue=QUEUE, message="") == "released"
    assert await store.messages() == []
    assert [run_id for run_id, _ in await store.runs.queued(QUEUE)] == [RUN]


async def test_a_repeated_call_finds_its_run_wherever_it_is_by_now(store: Store) -> None:
    """protocol §3: the same id re-attaches, and is told how far the run has come."""
    await store.settled()
    admission = await store.admit()
    assert (admission.word, admission.state) == ("accepted", "settled")


async def test_a_repeated_call_queues_nothing(store: Store) -> None:
    """protocol §1: one `send` left two entries."""
    await store.queued()
    await store.admit()
    assert await store.messages() == [f"message of {RUN}"]
    assert await store.client.xlen(store.keys.inbox(RUN)) == 1


async def test_an_id_used_for_another_request_is_a_conflict(store: Store) -> None:
    """protocol §3: the earlier run is untouched."""
    await store.queued()
    before = await store.dump()
    assert (await store.admit(prompt="something else")).word == "conflict"
    assert await store.dump() == before


async def test_an_id_used_in_the_other_mode_is_a_conflict(store: Store) -> None:
    """A job is not the answer to a foreground call."""
    await store.queued(mode="background")
    assert (await store.admit(mode="foreground")).word == "conflict"


async def test_a_run_is_not_written_over_a_parent_session(store: Store) -> None:
    """P13: an id that names a parent session can name no run."""
    await store.sessions.open(PARENT)
    assert (await store.admit(PARENT)).word == "conflict"
    assert await store.field("kind", PARENT) == "parent"


@pytest.mark.parametrize("mode", ["foreground", "background"])
async def test_an_unknown_owner_can_start_nothing(store: Store, mode: Mode) -> None:
    """P13: refused before anything starts."""
    assert (await store.admit(mode=mode)).word == "unknown_owner"
    assert await store.dump() == {}


async def test_a_job_over_the_limit_is_refused_and_leaves_nothing(store: Store) -> None:
    """P9: counted inside the admitting script."""
    await store.queued("run-1")
    before = await store.dump()
    admission = await store.admit("run-2", max_active_jobs=1)
    assert (admission.word, admission.cap, admission.details) == ("refused", "active_jobs", ("1",))
    assert await store.dump() == before


async def test_the_limit_holds_when_many_ask_at_once(store: Store) -> None:
    """P9, field fault 25: never above the cap."""
    await store.sessions.open(PARENT)
    answers = await asyncio.gather(*(store.admit(f"run-{n}", max_active_jobs=3) for n in range(20)))
    assert [answer.word for answer in answers].count("accepted") == 3
    assert len(await store.runs.jobs(PARENT)) == 3


async def test_a_settled_job_makes_room(store: Store) -> None:
    """P3: capacity is released in the settling step."""
    await store.settled("run-1")
    assert (await store.admit("run-2", max_active_jobs=1)).word == "accepted"


async def test_a_killed_job_makes_room(store: Store) -> None:
    """P3, P5: as for settling."""
    await store.queued("run-1")
    assert await store.kill("run-1") == "killed"
    assert (await store.admit("run-2", max_active_jobs=1)).word == "accepted"


async def test_a_repeated_job_is_accepted_at_the_limit(store: Store) -> None:
    """A retry of what was accepted takes no place of its own."""
    await store.queued("run-1")
    assert (await store.admit("run-1", max_active_jobs=1)).word == "accepted"


async def test_foreground_runs_are_not_counted_as_jobs(store: Store) -> None:
    """protocol §7: `max_active_jobs` is for jobs."""
    await store.queued("run-1", mode="foreground")
    assert (await store.admit("run-2", max_active_jobs=1)).word == "accepted"


async def test_foreground_runs_are_accepted_at_the_limit_of_jobs(store: Store) -> None:
    """protocol §7: `max_active_jobs` is for jobs."""
    await store.queued("run-1")
    assert (await store.admit("run-2", mode="foreground", max_active_jobs=1)).word == "accepted"


async def test_another_owner_has_a_limit_of_its_own(store: Store) -> None:
    """protocol §7: per owner."""
    await store.queued("run-1")
    await store.sessions.open("other-parent")
    assert (await store.admit("run-2", owner="other-parent", max_active_jobs=1)).word == "accepted"


@pytest.mark.parametrize("mode", ["foreground", "background"])
async def test_a_run_below_the_depth_limit_is_accepted_and_no_deeper(store: Store, mode: Mode) -> None:
    """P9: depth is the owner's plus one."""
    await store.sessions.open(PARENT)
    refused = await store.admit("run-0", mode=mode, max_depth=0)
    assert (refused.word, refused.cap, refused.details) == ("refused", "depth", ("1", "0"))
    assert (await store.admit("run-1", mode=mode, max_depth=1)).word == "accepted"


async def test_depth_counts_from_the_owners_record(store: Store) -> None:
    """P9: what a caller claims of its own depth is not asked."""
    lease = await store.driven("run-1")
    assert (await store.admit("run-2", owner="run-1", max_depth=1, token=lease.token)).details == ("2", "1")
    assert (await store.admit("run-3", owner="run-1", max_depth=2, token=lease.token)).word == "accepted"
    record = await store.runs.get("run-3")
    assert isinstance(record, RunRecord)
    assert (record.depth, record.root) == (2, PARENT)


async def test_jobs_are_listed_in_the_order_they_were_registered(store: Store) -> None:
    """behaviour §3.4: also those of one millisecond."""
    await store.sessions.open(PARENT)
    ids = [f"run-{n}" for n in (3, 1, 2, 9, 5)]
    for run_id in ids:
        await store.admit(run_id)
    assert [job.id for job in await store.runs.jobs(PARENT)] == ids


async def test_a_childs_id_cannot_be_opened_as_a_session(store: Store) -> None:
    """design §4: a host opens parent sessions."""
    await store.queued()
    with pytest.raises(CallerError, match="is a child's"):
        await store.sessions.open(RUN)


async def test_a_session_of_a_newer_version_is_refused_with_both_versions(store: Store) -> None:
    """P13: nothing is changed by an older process."""
    await store.sessions.open(PARENT)
    await store.set_field("version", 7, PARENT)
    with pytest.raises(UnsupportedVersion, match=r"version 7.*up to 1"):
        await store.sessions.open(PARENT)
