"""Jobs of a session: their limit, their life, who may touch them, and the notices that tell of their endings."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from subagent_tasks import CallerError, ConfigurationError, Session, SubagentApp, Unauthorized, UnknownJob
from subagent_tasks.delegation import Delegation
from subagent_tasks.errors import UnsupportedVersion
from subagent_tasks.protocol.keys import Keys
from tests.behaviour.bench import Bench, first_notices, job_id_of, job_of, pending_notices, status_of, until
from tests.behaviour.provider import ended


async def test_only_an_app_with_job_tools_takes_jobs(bench: Bench) -> None:
    """behaviour §10.49: without them, or with them in another declaration only: refused; declared: accepted."""
    child, bare, equipped = bench.provider.child(), bench.other_app(), bench.other_app()
    for app in (bare, equipped):
        app.add_delegation_tool(provider="scripted")
    equipped.add_job_tools()
    async with bare.host() as host:
        refused = await (await bench.session(host=host)).call("subagent", child.in_background())
        assert refused.text.startswith("Error: background jobs unavailable: ")
    async with equipped.host() as host:
        session = await bench.session(host=host)
        accepted = await session.call("subagent", child.in_background())
        await bench.settled(session, job_id_of(accepted))
    assert child.starts == 1


@pytest.mark.parametrize("label", ["", " ", "\n"])
async def test_a_job_needs_a_label(bench: Bench, label: str) -> None:
    """behaviour §10.50: the model's only part in a job's registration; its kind is ours."""
    session, child = await bench.session(), bench.provider.child()
    result = await session.call("subagent", child.in_background(description=label))
    assert (result.text, result.code) == (
        "Error: invalid job label: expected a non-empty string",
        "INVALID_ARGS",
    )
    assert child.starts == 0


@pytest.mark.parametrize("limit", ["0", "-1", "1.5", "many"])
def test_a_job_limit_that_is_none_is_refused(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """behaviour §10.50: the operator's part; the error names the variable and the value."""
    monkeypatch.setenv("SUBAGENT_TASKS_MAX_ACTIVE_JOBS", limit)
    with pytest.raises(ConfigurationError, match=f"SUBAGENT_TASKS_MAX_ACTIVE_JOBS.*{limit}"):
        SubagentApp()


async def test_ten_jobs_run_and_the_eleventh_waits_for_one_to_settle(bench: Bench) -> None:
    """behaviour §10.51: a stopping job still counts; a settled one makes room at once."""
    session = await bench.session()
    held = [bench.provider.child(holds_result=True, ignores_cancel=True) for _ in range(10)]
    ids = [await bench.running_job(session, child) for child in held]
    eleventh = bench.provider.child()
    limit = (
        "Error: background job limit reached for this owner (limit: 10); use job_kill to stop an unneeded job, "
        "wait for it to finish, then retry"
    )
    assert (await session.call("subagent", eleventh.in_background())).text == limit
    assert status_of(await session.call("job_kill", {"job_id": ids[0]})) == "stopping"
    assert (await session.call("subagent", eleventh.in_background())).text == limit
    held[0].go_on.set()
    await bench.settled(session, ids[0])
    accepted = await session.call("subagent", eleventh.in_background())
    assert eleventh.starts <= 1
    for child in held:
        child.go_on.set()
    for job_id in (*ids, job_id_of(accepted)):
        await bench.settled(session, job_id)
    assert eleventh.starts == 1


async def test_foreground_runs_and_other_sessions_do_not_count(bench: Bench) -> None:
    """behaviour §3.3: the limit is for background jobs of one owner."""
    app = bench.other_app(max_active_jobs=1)
    app.add_delegation_tool(provider="scripted")
    app.add_job_tools()
    child, other = bench.provider.child(holds_result=True), bench.provider.child()
    async with app.host() as host:
        one, two = await bench.session(host=host), await bench.session(host=host)
        first = await bench.running_job(one, child)
        assert (await one.call("subagent", other.arguments())).text == "done"
        second = await bench.job(two, other.in_background())
        await bench.settled(two, second)
        child.go_on.set()
        await bench.settled(one, first)


async def test_a_job_id_is_the_id_of_its_celery_result(bench: Bench) -> None:
    """behaviour §10.53: ours are result ids, unique everywhere; what plain Celery reads agrees with job_output."""
    session = await bench.session()
    child, failing = bench.provider.child(), bench.provider.child(result=ended(stop_reason="error"))
    done, failed = [await bench.job(session, each.in_background()) for each in (child, failing)]
    assert done != failed
    for job_id, state, status in ((done, "SUCCESS", "completed"), (failed, "FAILURE", "failed")):
        assert status_of(await bench.settled(session, job_id)) == status
        assert bench.kit.app.celery.AsyncResult(job_id).state == state
    killed = await bench.running_job(session, bench.provider.child(holds_result=True))
    await session.call("job_kill", {"job_id": killed})
    assert status_of(await bench.settled(session, killed)) == "killed"
    assert bench.kit.app.celery.AsyncResult(killed).state == "REVOKED"


async def test_a_failed_call_leaves_no_job_behind(bench: Bench) -> None:
    """behaviour §10.53: what was refused has no id, no listing and no result."""
    session, child = await bench.session(), bench.provider.child()
    await session.call("subagent", child.in_background(description=""), call_id="c1")
    assert (await session.call("job_list", {})).value == []
    job_id = await bench.job(session, child.in_background(), call_id="c1")
    assert [job["id"] for job in await listed(session)] == [job_id]
    await bench.settled(session, job_id)


async def listed(session: Session) -> list[dict[str, Any]]:
    return cast("list[dict[str, Any]]", (await session.call("job_list", {})).value)


async def test_output_is_empty_while_live_and_the_same_at_every_later_reading(bench: Bench) -> None:
    """behaviour §10.54"""
    session, child = await bench.session(), bench.provider.child(holds_result=True, result=ended("the answer"))
    job_id = await bench.running_job(session, child)
    live = await session.call("job_output", {"job_id": job_id})
    assert live.text == "(no new output)\n[status: running]"
    assert isinstance(live.value, dict)
    assert live.value["text"] == ""
    child.go_on.set()
    first = await bench.settled(session, job_id)
    assert first.text == "the answer\n[status: completed]"
    assert [await session.call("job_output", {"job_id": job_id}) for _ in range(3)] == [first] * 3


async def test_a_job_that_ended_without_output_has_an_empty_text(bench: Bench) -> None:
    """behaviour §10.55"""
    session, child = await bench.session(), bench.provider.child(result=ended(""))
    result = await bench.settled(session, await bench.job(session, child.in_background()))
    assert isinstance(result.value, dict)
    assert (result.value["text"], result.text) == ("", "(no new output)\n[status: completed]")


async def test_a_rejected_result_is_a_failed_job_and_nothing_more(bench: Bench) -> None:
    """behaviour §10.56: contained; the worker goes on with other work."""
    session, child, after = await bench.session(), bench.provider.child(result=OSError("gone")), bench.provider.child()
    job = job_of(await bench.settled(session, await bench.job(session, child.in_background())))
    assert (job["status"], job["detail"]) == ("failed", "OSError: gone")
    assert (await session.call("subagent", after.arguments())).text == "done"


async def test_a_snapshot_shows_neither_owner_nor_report(bench: Bench) -> None:
    """behaviour §3.4: id, kind, label, status, detail and times alone."""
    session, child = await bench.session(), bench.provider.child(result=ended(stop_reason="error"))
    job_id = await bench.job(session, child.in_background(description="count things"))
    job = job_of(await bench.settled(session, job_id))
    assert set(job) == {"id", "kind", "label", "status", "detail", "startedAt", "finishedAt"}
    assert (job["kind"], job["label"]) == ("subagent", "count things")
    assert job["startedAt"] <= job["finishedAt"]


async def test_a_job_nobody_claimed_is_queued_and_dies_at_once(bench: Bench) -> None:
    """design §6: `queued` before a worker took it; a kill settles it there and then, and no child ever starts."""
    app = bench.other_app(providers=[type(bench.provider)("nobody", queue="nobody")])
    app.add_delegation_tool(provider="nobody")
    app.add_job_tools()
    async with app.host() as host:
        session = await bench.session(host=host)
        job_id = await bench.job(session, {"description": "d", "prompt": "p", "run_in_background": True})
        assert status_of(await session.call("job_output", {"job_id": job_id})) == "queued"
        killed = await session.call("job_kill", {"job_id": job_id})
        assert status_of(killed) == "killed"
    assert bench.kit.app.celery.AsyncResult(job_id).state == "REVOKED"


# Waiting.


async def test_a_wait_that_sees_the_end_reports_it(bench: Bench) -> None:
    """behaviour §10.59, §10.75: the terminal snapshot, and no notice afterwards."""
    session, child = await bench.session(), bench.provider.child(holds_result=True)
    job_id = await bench.running_job(session, child)
    waiting = asyncio.create_task(bench.settled(session, job_id))
    await asyncio.sleep(0)
    child.go_on.set()
    assert status_of(await waiting) == "completed"
    assert await pending_notices(bench, session) == 0


async def test_a_wait_that_runs_out_reports_nothing(bench: Bench) -> None:
    """behaviour §10.59: the live snapshot, no error; the ending is announced later."""
    session, child = await bench.session(), bench.provider.child(holds_result=True)
    job_id = await bench.running_job(session, child)
    waited = await session.call("job_output", {"job_id": job_id, "wait": True, "timeout_ms": 20})
    assert (waited.text, waited.is_error) == ("(no new output)\n[status: running]", False)
    child.go_on.set()
    assert [notice.sender_id for notice in await first_notices(session, 1)] == [job_id]


async def test_a_wait_for_a_finished_job_returns_at_once(bench: Bench) -> None:
    """behaviour §10.59"""
    session, child = await bench.session(), bench.provider.child()
    job_id = await bench.job(session, child.in_background())
    await first_notices(session, 1)
    async with asyncio.timeout(5):
        waited = await session.call("job_output", {"job_id": job_id, "wait": True, "timeout_ms": 600_000})
    assert status_of(waited) == "completed"
    assert await pending_notices(bench, session) == 0


async def test_an_aborted_wait_leaves_the_job_alone(bench: Bench) -> None:
    """behaviour §10.60: `wait aborted`; the job goes on and is announced."""
    session, child, signal = await bench.session(), bench.provider.child(holds_result=True), asyncio.Event()
    job_id = await bench.running_job(session, child)
    call = {"job_id": job_id, "wait": True, "timeout_ms": 5000}
    waiting = asyncio.create_task(session.call("job_output", call, signal=signal))
    await asyncio.sleep(0.02)
    signal.set()
    aborted = await waiting
    assert (aborted.text, aborted.code) == ("Error: wait aborted", "ABORTED")
    assert status_of(await session.call("job_output", {"job_id": job_id})) == "running"
    child.go_on.set()
    await first_notices(session, 1)


async def test_an_abort_together_with_the_end_swallows_nothing(bench: Bench) -> None:
    """behaviour §10.60: either the snapshot was delivered, or the notice is there; never neither."""
    session = await bench.session()
    for pause in range(8):
        child, signal = bench.provider.child(holds_result=True), asyncio.Event()
        job_id = await bench.running_job(session, child)
        call = {"job_id": job_id, "wait": True, "timeout_ms": 5000}
        waiting = asyncio.create_task(session.call("job_output", call, signal=signal))
        child.go_on.set()
        for _ in range(pause * 10):
            await asyncio.sleep(0)
        signal.set()
        if (await waiting).is_error:
            notice = (await first_notices(session, 1))[-1]
            assert notice.sender_id == job_id
            await session.acknowledge(notice)
        else:
            assert await pending_after_acknowledged(session) == []


async def pending_after_acknowledged(session: Session) -> list[str]:
    """Who sent the notices that wait for this reader."""
    found: list[str] = []
    notices = session.notices()
    try:
        while True:
            async with asyncio.timeout(0.05):
                found.append((await anext(notices)).sender_id)
    except TimeoutError:
        return found


async def test_who_waits_for_the_end_is_not_told_it_by_a_notice_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """behaviour §3.7, P4: though the notice is there before the waiting call has read the end."""
    session, child, later = await bench.session(), bench.provider.child(holds_result=True), bench.provider.child()
    read, may_read, reads = Delegation.collect, asyncio.Event(), 0

    async def slowly(self: Delegation, run_id: str, *, owner: str) -> Any:
        nonlocal reads
        reads += 1
        if reads > 1:
            await may_read.wait()
        return await read(self, run_id, owner=owner)

    monkeypatch.setattr(Delegation, "collect", slowly)
    job_id = await bench.running_job(session, child)
    waiting = asyncio.create_task(session.call("job_output", {"job_id": job_id, "wait": True}))
    await until(lambda: reads == 1, "the call waits")
    heard = asyncio.create_task(first_notices(session, 1))
    child.go_on.set()
    await until(lambda: reads == 2, "the call is about to read the end")
    next_id = await bench.job(session, later.in_background())
    await until(lambda: _has_notices(bench, session, 2), "both are announced")
    may_read.set()
    assert status_of(await waiting) == "completed"
    assert [notice.sender_id for notice in await heard] == [next_id]


async def _has_notices(bench: Bench, session: Session, count: int) -> bool:
    return await pending_notices(bench, session) == count


async def test_an_abort_after_the_end_delivers_the_snapshot(bench: Bench) -> None:
    """behaviour §10.60"""
    session, child, signal = await bench.session(), bench.provider.child(), asyncio.Event()
    job_id = await bench.job(session, child.in_background())
    await first_notices(session, 1)
    call = session.call("job_output", {"job_id": job_id, "wait": True}, signal=signal)
    waiting = asyncio.create_task(call)
    await asyncio.sleep(0)
    signal.set()
    assert status_of(await waiting) == "completed"


# Ownership.


async def test_a_job_is_fenced_to_its_session(bench: Bench) -> None:
    """behaviour §10.61: another session can neither read, wait for, kill, list nor follow it."""
    owner, other = await bench.session(), await bench.session()
    child = bench.provider.child(holds_result=True)
    job_id = await bench.running_job(owner, child)
    foreign = f"Error: job {job_id} belongs to another session"
    for name, more in (
        ("job_output", {}),
        ("job_output", {"wait": True, "timeout_ms": 50}),
        ("job_kill", {"reason": "mine"}),
    ):
        refused = await other.call(name, {"job_id": job_id, **more})
        assert (refused.text, refused.code) == (foreign, "UNAUTHORIZED")
    assert (await other.call("job_list", {})).text == "(no background jobs)"
    with pytest.raises(Unauthorized, match="belongs to another session"):
        await other.kill(job_id)
    with pytest.raises(Unauthorized, match="belongs to another session"):
        await anext(other.transcript(job_id))
    child.go_on.set()
    assert status_of(await bench.settled(owner, job_id)) == "completed"
    assert child.cancel_reasons == []
    assert await pending_notices(bench, other) == 0


async def test_a_foreground_run_is_no_job(bench: Bench) -> None:
    """design §6: the hint says what the id is; it is neither read nor listed as a job."""
    session, child = await bench.session(), bench.provider.child()
    run = await session.call("subagent", child.arguments())
    assert isinstance(run.value, dict)
    run_id = str(run.value["runId"])
    read = await session.call("job_output", {"job_id": run_id})
    assert read.text.startswith(f"Error: unknown job {run_id}: this is the id of a foreground run")
    assert (await session.call("job_list", {})).value == []


# The service calls on jobs.


async def test_a_kill_by_the_host_is_announced(bench: Bench) -> None:
    """protocol §5: the model did not ask for it, so it is told."""
    session, child = await bench.session(), bench.provider.child(holds_result=True)
    job_id = await bench.running_job(session, child)
    assert (await session.kill(job_id, reason="the user said stop")).text == f"requested cancellation of job {job_id}"
    (notice,) = await first_notices(session, 1)
    assert "[status: killed]" in notice.text
    assert child.cancel_reasons == ["the user said stop"]


async def test_a_completion_that_beat_its_kill_is_announced(bench: Bench) -> None:
    """protocol §5: the model that asked for the kill would otherwise never learn of the result."""
    session, child = await bench.session(), bench.provider.child(holds_result=True, ignores_cancel=True)
    job_id = await bench.running_job(session, child)
    await session.call("job_kill", {"job_id": job_id})
    child.go_on.set()
    (notice,) = await first_notices(session, 1)
    assert "[status: completed]" in notice.text


@pytest.mark.parametrize("job_id", ["", "nope", "a" * 201, "a\nb", "a\ud800", "*", None, 7])
async def test_a_kill_of_an_id_that_is_none_is_refused(bench: Bench, job_id: Any) -> None:
    """P13: typed, by kind of mistake."""
    session = await bench.session()
    with pytest.raises((CallerError, UnknownJob), match=r"job_id must be |unknown job "):
        await session.kill(job_id)


async def test_a_parent_sessions_id_is_no_job(bench: Bench) -> None:
    """P13: ids of other kinds are unknown jobs, whatever their record holds."""
    session, other = await bench.session(), await bench.session()
    for name in ("job_output", "job_kill"):
        for session_id in (session.id, other.id):
            refused = await session.call(name, {"job_id": session_id})
            assert refused.text == f"Error: unknown job {session_id}"


async def test_a_transcript_tells_the_run_in_order(bench: Bench) -> None:
    """design §4: contiguous from 0, the prompt first and the settlement last."""
    session, child = await bench.session(), bench.provider.child()
    job_id = await bench.job(session, child.in_background())
    events = [event async for event in session.transcript(job_id, follow=True)]
    assert [event.kind for event in events] == ["input", "settled"]
    assert [event.seq for event in events] == [0, 1]
    assert events[0].data["text"] == child.prompt
    assert events[-1].data == {"status": "completed", "stopReason": "completed"}


async def test_a_transcript_without_follow_is_what_there_is(bench: Bench) -> None:
    """design §4"""
    session, child = await bench.session(), bench.provider.child(holds_result=True)
    job_id = await bench.running_job(session, child)
    assert [event.kind async for event in session.transcript(job_id)] == ["input"]
    child.go_on.set()
    await bench.settled(session, job_id)


@pytest.mark.parametrize("child_id", ["", "nope", "a" * 201, "a\x00", None])
async def test_a_transcript_of_an_id_that_is_none_is_refused(bench: Bench, child_id: Any) -> None:
    """P13"""
    session = await bench.session()
    with pytest.raises(CallerError, match=r"child_id must be |unknown child "):
        await anext(session.transcript(child_id))


# Notices.


async def test_a_notice_names_the_job_and_never_its_output(bench: Bench) -> None:
    """behaviour §3.7: text, summary and source of a completion."""
    session, child = await bench.session(), bench.provider.child(result=ended("the secret answer"))
    job_id = await bench.job(session, child.in_background(description="find it"))
    (notice,) = await first_notices(session, 1)
    text = f"background job {job_id} (subagent: find it) finished [status: completed]. Read its output with job_output."
    assert notice.text == text
    assert notice.blocks == ({"type": "text", "text": text},)
    assert notice.summary == "subagent find it [status: completed]"
    assert (notice.kind, notice.source) == ("job-completed", "job-completed")
    assert (notice.session_id, notice.sender_id) == (session.id, job_id)
    assert "secret" not in notice.model_dump_json()


async def test_a_reader_resumes_behind_what_it_acknowledged(bench: Bench) -> None:
    """P4: what was only read comes again, what was acknowledged does not, also in another host."""
    session = await bench.session()
    ids = [await announced_job(bench, session) for _ in range(3)]
    first, second, _ = await first_notices(session, 3)
    assert [notice.sender_id for notice in await first_notices(session, 3)] == ids
    await session.acknowledge(second)
    await session.acknowledge(first)  # cumulative: an older one moves nothing back
    async with bench.kit.app.host() as host:
        again = await host.open_session(session.id)
        assert [notice.sender_id for notice in await first_notices(again, 1)] == ids[2:]


async def announced_job(bench: Bench, session: Session) -> str:
    """A job that has ended and was announced."""
    before = await pending_notices(bench, session)
    job_id = await bench.job(session, bench.provider.child().in_background())

    async def is_announced() -> bool:
        return await pending_notices(bench, session) > before

    await until(is_announced, "the job is announced")
    return job_id


async def test_replay_is_followed_by_what_happens_live_in_order(bench: Bench) -> None:
    """P4: one iterator, the waiting ones first, then each as it comes, none twice."""
    session = await bench.session()
    waiting = [await announced_job(bench, session) for _ in range(2)]
    notices = session.notices()
    seen: list[str] = []
    async with asyncio.timeout(5):
        for _ in waiting:
            seen.append((await anext(notices)).sender_id)
        for _ in range(3):
            live = await bench.job(session, bench.provider.child().in_background())
            waiting.append(live)
            seen.append((await anext(notices)).sender_id)
    assert seen == waiting
    await cast("Any", notices).aclose()


async def test_a_burst_is_told_completely_and_once(bench: Bench) -> None:
    """P4: endings that come together, while the reader reads."""
    session, held = await bench.session(), [bench.provider.child(holds_result=True) for _ in range(10)]
    ids = [await bench.running_job(session, child) for child in held]
    reading = asyncio.create_task(first_notices(session, 10))
    for child in held:
        child.go_on.set()
    notices = await reading
    assert sorted(notice.sender_id for notice in notices) == sorted(ids)
    assert [notice.id for notice in notices] == sorted(notice.id for notice in notices)


async def test_each_reader_has_a_cursor_of_its_own(bench: Bench) -> None:
    """design §4: what one acknowledged, the other still gets."""
    session = await bench.session()
    job_id = await announced_job(bench, session)
    (notice,) = await first_notices(session, 1)
    await session.acknowledge(notice)
    audit = await bench.host.open_session(session.id, reader="audit")
    assert [notice.sender_id for notice in await first_notices(audit, 1)] == [job_id]
    assert await pending_after_acknowledged(session) == []


async def test_two_readers_at_once_both_hear_a_live_notice(bench: Bench) -> None:
    """P4: the doorbell rings for everybody who listens."""
    session = await bench.session()
    audit = await bench.host.open_session(session.id, reader="audit")
    reading = [asyncio.create_task(first_notices(each, 1)) for each in (session, audit)]
    await asyncio.sleep(0.02)
    job_id = await bench.job(session, bench.provider.child().in_background())
    assert [[notice.sender_id for notice in found] for found in await asyncio.gather(*reading)] == [[job_id]] * 2


async def test_a_notice_of_another_session_cannot_be_acknowledged(bench: Bench) -> None:
    """P13: it would move the wrong cursor."""
    session, other = await bench.session(), await bench.session()
    await announced_job(bench, session)
    (notice,) = await first_notices(session, 1)
    with pytest.raises(Unauthorized, match=f"belongs to session '{session.id}'"):
        await other.acknowledge(notice)


# Records of a newer version.


async def test_a_session_of_a_newer_version_is_refused(bench: Bench) -> None:
    """P13: both versions and the fix are named, and nothing is changed."""
    session = await bench.session()
    key = Keys(bench.kit.app.settings.namespace).session(session.id)
    await bench.kit.redis.hset(key, "version", "99")
    before = await bench.kit.redis.hgetall(key)
    with pytest.raises(UnsupportedVersion, match=r"version 99, this process reads up to \d+: upgrade subagent-tasks"):
        await bench.host.open_session(session.id)
    assert await bench.kit.redis.hgetall(key) == before


async def test_a_job_of_a_newer_version_is_refused(bench: Bench) -> None:
    """P13: as an error of each call that names it, and nothing is changed; the others are still listed."""
    session = await bench.session()
    job_id = await announced_job(bench, session)
    key = Keys(bench.kit.app.settings.namespace).session(job_id)
    await bench.kit.redis.hset(key, "version", "99")
    before = await bench.kit.redis.hgetall(key)
    for name, arguments in (("job_output", {"job_id": job_id}), ("job_kill", {"job_id": job_id})):
        refused = await session.call(name, arguments)
        assert (name, refused.code) == (name, "UNSUPPORTED_VERSION")
        assert "upgrade subagent-tasks here, nothing was changed" in refused.text
    assert await bench.kit.redis.hgetall(key) == before
    assert await pending_notices(bench, session) == 1
