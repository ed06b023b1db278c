"""What stands in Redis need not be ours: each reader answers anything with a value or an error of ours (P13)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from store_kit import PARENT, RUN, Store

from subagent_tasks.errors import SubagentError, UnreadableRecord

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10)
json_values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner))
# What UTF-8 cannot encode never gets to the server.
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=30) | json_values.map(json.dumps)
DEEP = "[" * 100_000

Attack = Callable[[Store, str], Awaitable[object]]


async def read_a_record(store: Store, text: str) -> object:
    await store.settled()
    await store.set_field("outcome", text)
    return await store.runs.get(RUN)


async def read_a_listing(store: Store, text: str) -> object:
    await store.settled()
    await store.queued("run-2")
    await store.set_field("spec", text)
    try:
        jobs = await store.runs.jobs(PARENT)
    except UnreadableRecord as error:
        raise AssertionError("one record hides all the others") from error
    assert "run-2" in [job.id for job in jobs], "one record hides all the others"
    return jobs


async def read_outcomes(store: Store, text: str) -> object:
    await store.settled("run-2")
    await store.settled()
    await store.set_field("outcome", text)
    outcomes = await store.runs.outcomes([RUN, "run-2"])
    assert outcomes[1] is not None, "one outcome hides all the others"
    return outcomes


async def read_a_transcript(store: Store, text: str) -> object:
    await store.client.xadd(store.keys.transcript(RUN), {"k": "response", "d": text, "t": text}, id="1-0")
    return await store.runs.transcript(RUN)


async def take_input(store: Store, text: str) -> object:
    lease = await store.driven()
    await store.client.xadd(store.keys.inbox(RUN), {"lane": "next-step", "d": text})
    return await store.runs.take(lease, seq=0, step="later")


async def read_notices(store: Store, text: str) -> object:
    await store.client.xadd(store.keys.notices(PARENT), {"n": text})
    await store.settled()
    notices = await store.sessions.notices(PARENT, after="0-0")
    assert notices[-1].sender_id == RUN, "one notice hides all behind it"
    return notices


@settings(max_examples=25)
@given(text=texts)
@example(text=DEEP)
@example(text="{}")
@example(text="")
def check(text: str, url: str, attack: Attack) -> None:
    asyncio.run(survive(url, attack, text))


async def survive(url: str, attack: Attack, text: str) -> None:
    store = Store(url)
    refused: SubagentError | None = None
    try:
        await store.client.flushdb()
        await attack(store, text)
    except SubagentError as error:
        refused = error
    finally:
        await store.close()
    assert refused is None or isinstance(refused, UnreadableRecord)
    assert len(str(refused)) < 300


@pytest.mark.parametrize(
    "attack", [read_a_record, read_a_listing, read_outcomes, read_a_transcript, take_input, read_notices]
)
def test_whatever_stands_there_is_read_or_refused(server: str, attack: Attack) -> None:
    """P13: never another error, and the others are read."""
    check(url=server, attack=attack)


async def test_a_notice_that_cannot_be_read_is_told_of(store: Store) -> None:
    """P4: of a newer version, say: its reader gets past it, and knows that there was one."""
    await store.sessions.open(PARENT)
    newer = {"kind": "job-completed", "sessionId": PARENT, "senderId": RUN, "text": "t", "source": "s", "mood": "good"}
    place = cast("str", await store.client.xadd(store.keys.notices(PARENT), {"n": json.dumps(newer)}))
    (notice,) = await store.sessions.notices(PARENT, after="0-0")
    assert (notice.id, notice.kind, notice.sender_id) == (place, "notice-unreadable", PARENT)
    assert "job_list" in notice.text


async def test_what_is_refused_is_not_quoted(store: Store) -> None:
    """P14: a broken outcome still is one."""
    await store.settled()
    await store.set_field("outcome", '{"status": "completed", "output": "a secret"}')
    with pytest.raises(UnreadableRecord, match=RUN) as refused:
        await store.runs.get(RUN)
    assert "secret" not in str(refused.value)
    assert refused.value.__suppress_context__
