"""P7: a tool call that may have run is never run again by us."""

from __future__ import annotations

from stage import MakeStage, Stage, job, start_job

from broker_config import EmbeddedServer
from subagent_tasks.agents.transcript import UNKNOWN_EFFECT
from subagent_tasks.testing import call_tool, call_tools, reply, wait_until


async def test_what_is_done_stays_done_and_what_runs_is_not_repeated(stage: Stage) -> None:
    """P7: kill -9 between two results of one message: the finished call keeps its result, the other is unknown."""
    stage.ensure(2)
    both = call_tools(call_tool("note", {"text": "p7-a done"}), call_tool("hold", {"text": "p7-a"}))
    stage.model.on("p7-a", [both, reply("went on")])
    async with stage.session() as session:
        job_id = await start_job(session, "p7-a")
        pid = await stage.noted("p7-a begun")
        await wait_until(
            lambda: any("tool_result" in str(fields) for _, fields in stage.transcript(job_id)),
            description="the first call has its result",
        )
        stage.by_pid(pid).kill()
        await wait_until(lambda: stage.state(job_id) == "settled", description="another worker finished it")
    assert stage.notes("p7-a") == ["p7-a done", "p7-a begun"] or stage.notes("p7-a") == ["p7-a begun", "p7-a done"]
    done, unknown = stage.model.seen[-1].messages[-2:]
    assert (done.text, UNKNOWN_EFFECT in unknown.text) == ("noted p7-a done", True)


async def test_a_run_that_may_not_resume_fails_though_another_worker_lives(stage: Stage) -> None:
    """P7, `recovery="fail"`: its caller is told that its worker was lost; nobody starts it again, from wherever."""
    stage.ensure(2)
    stage.model.on("p7-e", [call_tool("note", {"text": "p7-e"}), call_tool("hold", {"text": "p7-e held"}), reply("no")])
    async with stage.session() as session:
        job_id = await start_job(session, "p7-e", tool="subagent_once")
        stage.by_pid(await stage.noted("p7-e held begun")).kill()
        read = await job(session, job_id, wait_ms=5000)
    assert (read["job"]["status"], read["job"]["detail"]) == ("failed", "worker lost")
    assert stage.notes("p7-e") == ["p7-e", "p7-e held begun"]
    assert len(stage.asked("p7-e")) == 2


async def test_a_plain_function_that_ends_within_its_worker_s_grace_keeps_its_result(stage: Stage) -> None:
    """Protocol §4, shutdown: nothing interrupts it, so it is waited for, and the worker says so."""
    stage.ensure(2)
    stage.model.on("p7-d", [call_tool("block", {"text": "p7-d"}), reply("went on")])
    async with stage.session() as session:
        job_id = await start_job(session, "p7-d")
        leaver = stage.by_pid(await stage.noted("p7-d begun"))
        leaver.terminate()
        await wait_until(
            lambda: f"shutdown waits for a plain function to end run_id={job_id}" in leaver.log,
            description="the worker says what it waits for",
        )
        stage.open_gate("p7-d")
        await wait_until(lambda: stage.state(job_id) == "settled", description="the other worker finished it")
    assert stage.model.seen[-1].messages[-1].text == "blocked p7-d"
    assert leaver.wait(10) == 0


async def test_a_plain_function_that_outlives_its_worker_s_grace_is_not_repeated(make_stage: MakeStage) -> None:
    """Protocol §4, shutdown: a running function is waited for, then its call is recorded as unknown."""
    stage = make_stage(environment={"SUBAGENT_TASKS_SHUTDOWN_GRACE_SECONDS": "1"})
    stage.ensure(2)
    stage.model.on("p7-b", [call_tool("block", {"text": "p7-b"}), reply("went on")])
    async with stage.session() as session:
        job_id = await start_job(session, "p7-b")
        leaver = stage.by_pid(await stage.noted("p7-b begun"))
        leaver.terminate()
        await wait_until(lambda: stage.state(job_id) == "settled", description="the other worker finished it")
    assert stage.notes("p7-b") == ["p7-b begun"]
    assert UNKNOWN_EFFECT in stage.model.seen[-1].messages[-1].text
    stage.open_gate("p7-b")


async def test_an_outage_shorter_than_a_lease_repeats_nothing(
    make_stage: MakeStage, own_server: EmbeddedServer
) -> None:
    """Protocol §4: an outage is not a death; the server is away when the tool ends."""
    stage = make_stage(url=own_server.url)
    stage.ensure(1)
    stage.model.on("p7-c", [call_tool("hold", {"text": "p7-c"}), reply("the answer")])
    async with stage.session() as session:
        job_id = await start_job(session, "p7-c")
        await stage.noted("p7-c begun")
        own_server.kill()
        stage.open_gate("p7-c")
        await wait_until(lambda: stage.notes("p7-c ended"), description="the tool has ended in the outage")
        own_server.start()
        await wait_until(lambda: stage.state(job_id) == "settled", description="the run goes on and ends")
        assert stage.notes("p7-c") == ["p7-c begun", "p7-c ended"]
        assert stage.model.seen[-1].messages[-1].text == "held p7-c"
    for worker in stage.workers:
        worker.close()
