"""`status` and `transcript` against servers and workers: what an operator finds out with one command."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import redis
from click.testing import CliRunner, Result
from stage import HERE, MakeStage, Stage, start_job

from broker_config import BrokerSettings, EmbeddedServer
from subagent_tasks.cli import cli
from subagent_tasks.commands.status import look
from subagent_tasks.overview import Overview, RunRow
from subagent_tasks.protocol.keys import Keys
from subagent_tasks.store.overview import MAX_ENDED, open_overview
from subagent_tasks.testing import Kit, ScriptedModel, call_tool, fake_app, reply, stall, wait_until

END_SECONDS = 20.0
SECRET = "planted-9f2c"


def typed(settings: BrokerSettings, *words: str) -> Result:
    """The command as it is typed, in this process."""
    environment = {
        "SUBAGENT_TASKS_BROKER_URL": settings.broker_url,
        "SUBAGENT_TASKS_NAMESPACE": settings.namespace,
        "SUBAGENT_TASKS_LEASE_SECONDS": str(settings.lease_seconds),
    }
    return CliRunner().invoke(cli, words, env=environment)


async def said(settings: BrokerSettings, *words: str) -> str:
    """What a command that succeeds says. It runs a loop of its own, so not on this one."""
    result = await asyncio.to_thread(typed, settings, *words)
    assert result.exit_code == 0, result.output
    return result.output


async def job_of(kit: Kit, prompt: str) -> str:
    result = await kit.session.call("subagent", {"description": "a task", "prompt": prompt, "run_in_background": True})
    return str(cast("dict[str, Any]", result.value)["jobId"])


def all_runs(overview: Overview) -> dict[str, RunRow]:
    """By id, whatever they hang below."""
    found: dict[str, RunRow] = {}
    open_rows = [run for session in overview.sessions for run in session.runs]
    while open_rows:
        row = open_rows.pop()
        found[row.id] = row
        open_rows += row.runs
    return found


async def test_every_state_of_a_run_has_its_word() -> None:
    """protocol §2: running and the three endings, in one look; and no prompt in it (P14)."""
    model = ScriptedModel()
    model.on("goes on", stall())
    model.on("fine", reply(f"fine {SECRET}"))
    model.on("cut", reply("half", finish="length"))
    async with fake_app(model) as kit:
        settings = kit.app.settings
        running = await job_of(kit, f"goes on {SECRET}")
        killed = await job_of(kit, f"goes on too {SECRET}")
        await wait_until(lambda: model.requests == 2, description="both run")
        done, failed = await job_of(kit, f"fine {SECRET}"), await job_of(kit, f"cut {SECRET}")
        await kit.session.kill(killed)

        wanted = {running: "running", killed: "killed", done: "completed", failed: "failed"}

        async def all_said() -> bool:
            return {run_id: run.status for run_id, run in all_runs(await look(settings)).items()} == wanted

        await wait_until(all_said, description="each has its word")
        out, document = await said(settings, "status"), await said(settings, "status", "--json")
        assert SECRET not in out + document
        assert "Session test-session" in out
        row = all_runs(Overview.model_validate_json(document))[running]
        assert (row.label, row.provider, str(row.worker).split("-")[0]) == ("a task", "spawn", "worker")
        assert str(row.note).startswith("waits for its model for")
        await kit.session.kill(running)


async def test_without_a_worker_the_queue_and_the_run_say_why() -> None:
    """Why is this child stuck? Here because nobody is there."""
    async with fake_app(ScriptedModel(), worker=False) as kit:
        job_id = await job_of(kit, "waits")
        overview = await look(kit.app.settings)
        assert [(queue.name, queue.waiting) for queue in overview.queues] == [(kit.app.queues[0], 1)]
        assert (all_runs(overview)[job_id].status, all_runs(overview)[job_id].note) == ("queued", "no worker is alive")
        assert [process.role for process in overview.processes] == ["host"]
        await kit.session.kill(job_id)


async def test_a_run_owned_by_a_run_hangs_below_it_even_when_that_has_ended_long_ago() -> None:
    """design §2: the tree is found through the records' owners."""
    async with fake_app(ScriptedModel(), worker=False, check_leaks=False) as kit:
        keys = Keys(kit.app.settings.namespace)
        top = await job_of(kit, "top")
        fields = await cast("Any", kit.redis.hgetall(keys.session(top)))
        await kit.session.kill(top)
        child = {**fields, "id": "child", "owner": top, "depth": "2"}
        await cast("Any", kit.redis.hset(keys.session("child"), mapping=child))
        await cast("Any", kit.redis.sadd(keys.unsettled(top), "child"))
        await cast("Any", kit.redis.hset(keys.session(top), "finished_at", "1"))
        overview = await look(kit.app.settings)
        assert [session.id for session in overview.sessions] == ["test-session"]
        assert [run.id for run in overview.sessions[0].runs] == [top]
        assert [run.id for run in overview.sessions[0].runs[0].runs] == ["child"]


async def test_ten_thousand_settled_runs_are_looked_at_without_their_outcomes() -> None:
    """The server sends three small fields of each, and of those that were seen before nothing."""
    with EmbeddedServer() as server, redis.Redis.from_url(server.url, decode_responses=True) as client:
        settings = BrokerSettings(broker_url=server.url, namespace="many")
        now_ms = int(client.time()[0]) * 1000
        spec = json.dumps({"provider": "spawn", "queue": "q", "label": "l", "runLimitSeconds": 60,
                           "request": {"label": "l", "prompt": ""}})  # fmt: skip
        pipeline = client.pipeline(transaction=False)
        for number in range(10_000):
            # The last 200 ended just now.
            ended_ms = now_ms if number >= 9800 else now_ms - 3_600_000
            fields = {
                "version": 1, "kind": "one-shot", "id": f"r{number}", "owner": "s", "root": "s", "depth": 1, "token": 1,
                "mode": "background", "state": "settled", "seq": 1, "attempt": 0, "created_at": ended_ms, "spec": spec,
                "started_at": ended_ms, "finished_at": ended_ms, "status": "completed", "outcome": "o" * 2000,
            }  # fmt: skip
            cast("Any", pipeline).hset(Keys("many").session(f"r{number}"), mapping=fields)
        pipeline.execute()

        def sent_bytes() -> int:
            return int(client.info("stats")["total_net_output_bytes"])

        async with open_overview(settings) as store:
            before = sent_bytes()
            first = await store.read(recent_ms=600_000)
            between = sent_bytes()
            second = await store.read(recent_ms=600_000)
            after = sent_bytes()
    assert (len(first.runs), first.omissions.ended) == (MAX_ENDED, 200 - MAX_ENDED)
    assert {run.record.id for run in second.runs} == {run.record.id for run in first.runs}
    # 20 MB of outcomes stay where they are.
    assert between - before < 2_000_000
    assert after - between < (between - before) / 1.5


async def test_a_record_of_a_newer_version_hides_no_other() -> None:
    """One run that cannot be read must not blind the operator."""
    async with fake_app(ScriptedModel(), worker=False) as kit:
        newer, known = await job_of(kit, "newer"), await job_of(kit, "known")
        key = Keys(kit.app.settings.namespace).session(newer)
        await cast("Any", kit.redis.hset(key, "version", "99"))
        overview = await look(kit.app.settings)
        assert list(all_runs(overview)) == [known]
        assert any(warning.startswith("1 records are of a newer version") for warning in overview.warnings)
        result = await asyncio.to_thread(typed, kit.app.settings, "transcript", newer)
        assert (result.exit_code, result.output.count("\n")) == (1, 1)
        assert "record version 99" in result.output
        await cast("Any", kit.redis.hset(key, "version", "1"))
        await kit.session.kill(newer)
        await kit.session.kill(known)


async def test_a_run_of_a_frozen_worker_is_stopping_until_it_is_gone(make_stage: MakeStage) -> None:
    """P5, P6: asked to end, then without its worker; with nobody else alive, that is said too."""
    stage = make_stage()
    (worker,) = stage.ensure(1)
    stage.model.on("frozen", stall())
    settings = stage.app.settings
    async with stage.session() as session:
        job_id = await start_job(session, "frozen")
        await wait_until(lambda: stage.asked("frozen"), description="it runs")
    running = all_runs(await look(settings))[job_id]
    assert (running.status, str(running.worker).split("-")[1]) == ("running", str(worker.pid))
    worker.freeze()
    await said(settings, "kill", job_id)
    stopping = all_runs(await look(settings))[job_id]
    assert stopping.status == "stopping"
    assert str(stopping.note).startswith("its end was asked for; ")
    worker.kill()

    async def nobody_lives() -> bool:
        return not any(process.alive for process in (await look(settings)).processes)

    await wait_until(nobody_lives, description="its heartbeat lapsed")
    out = await said(settings, "status")
    assert "its worker is gone, no process is alive to recover it: start a worker" in out
    assert f"{running.worker}  dead for " in out


def test_a_watch_refreshes_in_place_until_ctrl_c(stage: Stage) -> None:
    """What it shows changes; leaving it is no failure."""
    with in_terminal(stage, "status", "--watch") as (process, screen):
        screen.wait_for("none ended lately")
        stage.redis.zadd(stage.keys.processes, {"worker-4711-abc": 4_000_000_000_000})
        screen.wait_for("worker-4711-abc")
        process.send_signal(signal.SIGINT)
        assert process.wait(END_SECONDS) == 0
    stage.redis.zrem(stage.keys.processes, "worker-4711-abc")
    assert "Traceback" not in screen.text


@pytest.fixture
def told_app() -> ScriptedModel:
    model = ScriptedModel()
    model.on("find it", [call_tool("peek", {"path": "a"}), reply("found it")])
    return model


def peek(path: str) -> str:
    """Look at a path."""
    return f"seen {path}"


async def test_a_transcript_tells_the_run_from_its_request_to_its_end(told_app: ScriptedModel) -> None:
    """Who asked whom, what ran with what outcome, and what came back, in this order."""
    async with fake_app(told_app, tools=[peek]) as kit:
        result = await kit.session.call("subagent", {"description": "a search", "prompt": "find it"}, call_id="c7")
        run_id = str(cast("dict[str, Any]", result.value)["runId"])
        out = await said(kit.app.settings, "transcript", run_id)
        steps = [
            f"run {run_id}: a search", "asked by  session test-session, with the tool subagent, call c7",
            "takes its prompt:", "| find it", "calls peek with", "runs the tool peek", "the tool peek returned after",
            "| seen a", "answers after", "| found it", "completed after", "model requests 2, tool calls 1",
        ]  # fmt: skip
        rest = out
        for step in steps:
            assert step in rest, f"no {step!r} in its place:\n{out}"
            rest = rest.partition(step)[2]


async def test_a_transcript_as_json_is_one_event_per_line(told_app: ScriptedModel) -> None:
    """Exactly the events a host reads."""
    async with fake_app(told_app, tools=[peek]) as kit:
        result = await kit.session.call("subagent", {"description": "a search", "prompt": "find it"})
        run_id = str(cast("dict[str, Any]", result.value)["runId"])
        out = await said(kit.app.settings, "transcript", run_id, "--json")
        events = [event.model_dump(mode="json") async for event in kit.session.transcript(run_id)]
        assert [json.loads(line) for line in out.splitlines()] == events
        assert await said(kit.app.settings, "transcript", run_id, "--json", "--follow") == out


async def test_an_id_that_names_no_run_is_one_clear_line() -> None:
    """P13: unknown or expired, and a parent session's."""
    async with fake_app(ScriptedModel(), worker=False) as kit:
        for name, reason in (("nobody", "unknown run nobody: namespace"), ("test-session", "is a parent session")):
            result = await asyncio.to_thread(typed, kit.app.settings, "transcript", name)
            assert (result.exit_code, result.output.count("\n")) == (1, 1)
            assert reason in result.output


async def test_following_ends_when_the_run_does(stage: Stage) -> None:
    """Each step is told as it happens; the last line is the ending."""
    stage.ensure(1)
    stage.model.on("followed", [call_tool("hold", {"text": "follow-gate"}), reply("through")])
    async with stage.session() as session:
        job_id = await start_job(session, "followed")
        await stage.noted("follow-gate begun")
        with in_terminal(stage, "transcript", job_id, "--follow") as (process, screen):
            await asyncio.to_thread(screen.wait_for, "runs the tool hold")
            assert "completed" not in screen.text
            stage.open_gate("follow-gate")
            assert await asyncio.to_thread(process.wait, END_SECONDS) == 0
            screen.wait_for("that last answer is what came back")


async def test_following_can_be_interrupted(stage: Stage) -> None:
    """Exit code 130: what was told is not the whole; the run goes on."""
    stage.ensure(1)
    stage.model.on("endless", stall())
    async with stage.session() as session:
        job_id = await start_job(session, "endless")
        with in_terminal(stage, "transcript", job_id, "--follow") as (process, screen):
            await asyncio.to_thread(screen.wait_for, "| endless")
            process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(process.wait, END_SECONDS) == 130
        assert "Traceback" not in screen.text
        assert stage.state(job_id) == "driven"
        await session.kill(job_id)


class Screen:
    """What a process wrote to its terminal so far."""

    def __init__(self, master: int) -> None:
        self.text = ""
        self._changed = threading.Condition()
        threading.Thread(target=self._read, args=(master,), daemon=True).start()

    def wait_for(self, text: str) -> None:
        """Wait until it was written. A failed wait shows all that was."""
        with self._changed:
            assert self._changed.wait_for(lambda: text in self.text, END_SECONDS), f"no {text!r} in:\n{self.text}"

    def _read(self, master: int) -> None:
        while True:
            try:
                chunk = os.read(master, 65_536)
            except OSError:  # the other end is closed
                return
            if not chunk:
                return
            with self._changed:
                self.text += chunk.decode(errors="replace")
                self._changed.notify_all()


@contextmanager
def in_terminal(stage: Stage, *words: str) -> Generator[tuple[subprocess.Popen[bytes], Screen]]:
    """A command on a terminal of its own; it ends with the block."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "subagent_tasks", *words],
        cwd=HERE,
        env={**stage.environment, "PYTHONWARNINGS": "ignore", "PATH": "", "TERM": "xterm", "COLUMNS": "200"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        # A shell starts what it puts in the background with Ctrl-C ignored, and that is inherited: a terminal's is not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(slave)
    try:
        yield process, Screen(master)
    finally:
        process.kill()
        process.wait()
        os.close(master)
