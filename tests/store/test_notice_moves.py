"""Notices: each ending told once, in order, to each reader at its own pace."""

from __future__ import annotations

from store_kit import MAX_NOTICES, PARENT, RUN, Store

from subagent_tasks.protocol.models import Notice
from subagent_tasks.protocol.records import RunRecord


async def settle(store: Store, *run_ids: str) -> list[Notice]:
    """Complete jobs one after the other; the parent's notices."""
    for run_id in run_ids:
        await store.settled(run_id)
    return await store.sessions.notices(PARENT, after="0-0")


async def test_notices_come_in_the_order_of_the_endings(store: Store) -> None:
    """P4: ordered."""
    assert [notice.sender_id for notice in await settle(store, "run-3", "run-1", "run-2")] == [
        "run-3",
        "run-1",
        "run-2",
    ]


async def test_a_reader_resumes_behind_what_it_read(store: Store) -> None:
    """P4: never twice to one reader."""
    notices = await settle(store, "run-1", "run-2", "run-3")
    rest = await store.sessions.notices(PARENT, after=notices[0].id)
    assert [notice.id for notice in rest] == [notices[1].id, notices[2].id]


async def test_a_reader_may_read_in_parts(store: Store) -> None:
    """protocol §5: bounded."""
    await settle(store, "run-1", "run-2", "run-3")
    assert [notice.sender_id for notice in await store.sessions.notices(PARENT, after="0-0", count=2)] == [
        "run-1",
        "run-2",
    ]


async def test_a_new_reader_starts_at_the_beginning(store: Store) -> None:
    """protocol §5."""
    assert await store.sessions.cursor(PARENT, "main") == "0-0"


async def test_acknowledging_is_cumulative(store: Store) -> None:
    """protocol §5: done with the notice and all before it."""
    notices = await settle(store, "run-1", "run-2", "run-3")
    await store.sessions.acknowledge(PARENT, "main", notices[1].id)
    cursor = await store.sessions.cursor(PARENT, "main")
    assert [notice.id for notice in await store.sessions.notices(PARENT, after=cursor)] == [notices[2].id]


async def test_a_cursor_never_moves_back(store: Store) -> None:
    """protocol §5: acknowledgements may arrive in any order."""
    for cursor in ("100-5", "100-4", "99-9", "100-10", "100-9", "0-0"):
        await store.sessions.acknowledge(PARENT, "main", cursor)
    assert await store.sessions.cursor(PARENT, "main") == "100-10"


async def test_each_reader_has_a_cursor_of_its_own(store: Store) -> None:
    """Field fault 18: per (session, reader)."""
    await store.sessions.acknowledge(PARENT, "main", "100-5")
    await store.sessions.acknowledge(PARENT, "audit", "7-0")
    assert await store.sessions.cursor(PARENT, "main") == "100-5"
    assert await store.sessions.cursor(PARENT, "audit") == "7-0"


async def test_a_cursor_lives_as_long_as_its_session(store: Store) -> None:
    """P10: also one that is written after the settlement, or after the session expired."""
    await store.settled()
    await store.sessions.acknowledge(PARENT, "main", "1-1")
    assert await store.has_lifetime(store.keys.cursors(PARENT))
    await store.client.delete(store.keys.session(PARENT), store.keys.cursors(PARENT))
    await store.sessions.acknowledge(PARENT, "main", "1-2")
    assert await store.has_lifetime(store.keys.cursors(PARENT))


async def test_a_cursor_of_a_busy_session_has_no_lifetime(store: Store) -> None:
    """P4: or the reader would be told everything again."""
    await store.queued()
    await store.sessions.acknowledge(PARENT, "main", "1-1")
    assert not await store.has_lifetime(store.keys.cursors(PARENT))


async def test_reading_a_settled_job_withdraws_its_notice(store: Store) -> None:
    """protocol §5: a terminal read is its report."""
    await settle(store, "run-1", "run-2")
    record = await store.runs.collect("run-1", owner=PARENT, is_child=False)
    assert isinstance(record, RunRecord)
    assert record.snapshot().status == "completed"
    assert [notice.sender_id for notice in await store.sessions.notices(PARENT, after="0-0")] == ["run-2"]


async def test_reading_a_running_job_reports_nothing(store: Store) -> None:
    """protocol §5: its ending is announced."""
    lease = await store.driven()
    record = await store.runs.collect(RUN, owner=PARENT, is_child=False)
    assert isinstance(record, RunRecord)
    assert record.snapshot().status == "running"
    await store.settle(lease)
    assert len(await store.sessions.notices(PARENT, after="0-0")) == 1


async def test_reading_a_job_again_when_it_is_settled_withdraws_its_notice(store: Store) -> None:
    """protocol §5: only the terminal read is the report."""
    lease = await store.driven()
    await store.runs.collect(RUN, owner=PARENT, is_child=False)
    await store.settle(lease)
    await store.runs.collect(RUN, owner=PARENT, is_child=False)
    assert await store.sessions.notices(PARENT, after="0-0") == []


async def test_a_stranger_reads_no_job(store: Store) -> None:
    """design §6: and withdraws no notice."""
    await settle(store, RUN)
    assert await store.runs.collect(RUN, owner="stranger", is_child=False) == "unauthorized"
    assert len(await store.sessions.notices(PARENT, after="0-0")) == 1


async def test_an_unknown_job_is_unknown(store: Store) -> None:
    """Field fault 24: not `pending`."""
    assert await store.runs.collect(RUN, owner=PARENT, is_child=False) == "unknown"


async def test_a_parent_sessions_id_is_no_job(store: Store) -> None:
    """Field fault 24."""
    await store.sessions.open(PARENT)
    assert await store.runs.collect(PARENT, owner=PARENT, is_child=False) == "unknown"
    assert await store.runs.get(PARENT) is None


async def test_more_notices_than_are_kept_become_one(store: Store) -> None:
    """protocol §5: bounded; a reader is told how many made room, and which tool lists what they told of."""
    kept = MAX_NOTICES + 2
    first = (await settle(store, *(f"run-{number}" for number in range(kept))))[0]
    assert (first.kind, first.text) == (
        "notices-dropped",
        "2 older notices of this session made room for newer ones; job_list lists the jobs they told of.",
    )
    rest = await store.sessions.notices(PARENT, after=first.id)
    assert [notice.sender_id for notice in rest] == [f"run-{number}" for number in range(2, kept)]


async def test_a_reader_that_is_done_with_the_dropped_ones_is_not_told_again(store: Store) -> None:
    """P4: never twice to one reader."""
    first = (await settle(store, *(f"run-{number}" for number in range(MAX_NOTICES + 1))))[0]
    await store.sessions.acknowledge(PARENT, "main", first.id)
    rest = await store.sessions.notices(PARENT, after=await store.sessions.cursor(PARENT, "main"))
    assert len(rest) == MAX_NOTICES
    assert {notice.kind for notice in rest} == {"job-completed"}
