"""The command line against a real server and real workers, as an operator types it."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from stage import HERE, WORKER_OPTIONS, MakeStage, Stage, job, start_job

from broker_config import EmbeddedServer
from subagent_tasks.cli import cli
from subagent_tasks.testing import call_tool, reply, stall, wait_until
from subagent_tasks.testing.processes import WorkerProcess

END_SECONDS = 20.0


def typed(stage: Stage, *words: str, **environment: str) -> Result:
    """A command that needs no application, in this process."""
    return CliRunner().invoke(cli, words, env={**stage.environment, **environment})


@contextmanager
def started(environment: Mapping[str, str], *words: str) -> Generator[subprocess.Popen[str]]:
    """A command in a process of its own, which ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "subagent_tasks", *words],
        cwd=HERE,
        # Celery warns where tests run as root.
        env={**environment, "PYTHONWARNINGS": "ignore", "PATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    out, err = process.communicate(timeout=END_SECONDS)
    return process.returncode, out, err


def test_run_prints_the_answer_and_tells_the_progress_beside_it(stage: Stage) -> None:
    """design §4: stdout is the answer alone, so that it can be piped."""
    stage.ensure(1)
    stage.model.on("cli-run", [call_tool("note", {"text": "cli-run"}), reply("the answer\nin two lines")])
    with started(stage.environment, "run", "agents:app", "cli-run") as command:
        code, out, err = ended(command)
    assert (code, out) == (0, "the answer\nin two lines\n")
    steps = ["has taken the prompt", "→ note(", "← note: noted cli-run", "» the answer", "ended: completed"]
    assert [step for step in steps if step in err] == steps


def test_run_fails_when_the_child_does(stage: Stage) -> None:
    """behaviour §2.9: the account a model would get, on stderr."""
    stage.ensure(1)
    stage.model.on("cli-cut", reply("half of", finish="length"))
    with started(stage.environment, "run", "agents:app", "cli-cut") as command:
        code, out, err = ended(command)
    assert (code, out) == (1, "")
    assert "hit its token limit" in err
    assert "half of" in err


@pytest.mark.parametrize(
    ("number", "word", "exit_code"), [(signal.SIGINT, "interrupted", 130), (signal.SIGTERM, "terminated", 143)]
)
async def test_a_run_that_is_stopped_kills_its_child(
    stage: Stage, number: signal.Signals, word: str, exit_code: int
) -> None:
    """P5: the child does not go on behind the back of who pressed Ctrl-C, nor of `timeout` or a supervisor."""
    stage.ensure(1)
    prompt = f"cli-{word}"
    stage.model.on(prompt, stall())
    with started(stage.environment, "run", "agents:app", prompt) as command:
        await wait_until(lambda: stage.asked(prompt), description="it runs", timeout_seconds=END_SECONDS)
        command.send_signal(number)
        code, out, err = ended(command)
    run_ids = re.findall(rf"^{word}: killing run (\S+)$", err, re.MULTILINE)
    assert (code, out) == (exit_code, "")
    assert [stage.state(run_id) for run_id in run_ids] == ["settled"]


async def test_run_names_what_it_started_so_that_it_can_be_killed(make_stage: MakeStage) -> None:
    """P5: as soon as the call is accepted, though no worker has taken it."""
    stage = make_stage()
    with started(stage.environment, "run", "agents:app", "cli-named", "--session", "mine") as command:
        assert command.stderr is not None
        line = await in_thread(command.stderr.readline)
        named = re.fullmatch(r"run (\S+) of session mine\n", line)
        assert named is not None, line
        result = await in_thread(typed, stage, "kill", named[1])
        code, _, err = await in_thread(ended, command)
    assert (result.exit_code, code) == (0, 1)
    assert "killed" in err


async def test_an_operator_kills_any_run(stage: Stage) -> None:
    """P5: by its id alone; its owner finds it killed. Asking again says how it ended."""
    stage.ensure(1)
    stage.model.on("cli-kill", stall())
    async with stage.session() as session:
        job_id = await start_job(session, "cli-kill")
        await wait_until(lambda: stage.asked("cli-kill"), description="it runs")
        result = await in_thread(typed, stage, "kill", job_id, "--reason", "no longer wanted")
        assert (result.exit_code, "requested the end" in result.output) == (0, True)
        assert (await job(session, job_id, wait_ms=5000))["job"]["status"] == "killed"
        assert stage.redis.hget(stage.keys.session(job_id), "kill_reason") == "no longer wanted"
        again = await in_thread(typed, stage, "kill", job_id)
        assert (again.exit_code, "had already finished [status: killed" in again.output) == (0, True)


def test_an_unknown_run_cannot_be_killed(stage: Stage) -> None:
    """P13: the operator is told where it was looked for."""
    result = typed(stage, "kill", "nobody")
    assert result.exit_code == 1
    assert f"unknown run nobody: namespace '{stage.namespace}' has none" in result.output


async def test_a_worker_that_is_told_to_stop_hands_its_children_back(make_stage: MakeStage) -> None:
    """protocol §4: SIGTERM ends the process with exit code 0; what it drove waits for the next worker."""
    stage = make_stage()
    stage.model.on("cli-worker", stall())
    with started(stage.environment, "worker", "agents:app", "--queues", "spawn", "--loglevel", "warning") as worker:
        async with stage.session() as session:
            job_id = await start_job(session, "cli-worker")
            await wait_until(lambda: stage.asked("cli-worker"), description="it runs", timeout_seconds=END_SECONDS)
            assert stage.driver_pid(job_id) == worker.pid
            worker.send_signal(signal.SIGTERM)
            code, _, err = await in_thread(ended, worker)
            assert code == 0
            assert f"worker {worker.pid} of agents:app: queues {stage.queue()}" in err
            assert stage.state(job_id) == "queued"
            await session.kill(job_id)


def test_a_worker_that_cannot_reach_the_server_says_so(stage: Stage) -> None:
    """P13: one line, exit code 1."""
    with started(
        {**stage.environment, "SUBAGENT_TASKS_BROKER_URL": "redis://127.0.0.1:9/0"}, "worker", "agents:app"
    ) as w:
        code, _, err = ended(w)
    assert code == 1
    assert "did not answer" in err
    assert "Traceback" not in err


def test_the_doctor_finds_the_worker_of_each_queue(stage: Stage) -> None:
    """Every provider of the declaration is served."""
    stage.ensure(1)
    with started(stage.environment, "doctor", "agents:app") as command:
        code, out, _ = ended(command)
    assert code == 0, out
    assert stage.queue("spawn") in out
    assert stage.queue("poison") in out


def test_the_doctor_finds_a_consumer_without_a_heartbeat(make_stage: MakeStage, tmp_path: Path) -> None:
    """P6: any Celery app can be told to consume our queue; what it takes is lost to it."""
    stage = make_stage()
    (tmp_path / "plain.py").write_text(f"import celery\napp = celery.Celery(broker={stage.url!r})\n")
    queues = ",".join(stage.app.queues)
    options = (*WORKER_OPTIONS, "-P", "solo", "-Q", queues)
    environment = {"PYTHONWARNINGS": "ignore"}
    with WorkerProcess("plain", directory=tmp_path, env=environment, options=options) as consumer:
        consumer.wait_ready()
        with started(stage.environment, "doctor", "agents:app") as command:
            code, out, _ = ended(command)
        assert code == 1
        assert f"(process {consumer.pid}) consumes but does not beat" in " ".join(out.split())


def test_the_doctor_misses_a_worker(make_stage: MakeStage) -> None:
    """With the fix beside it."""
    result = typed(make_stage(), "doctor")
    assert result.exit_code == 1
    assert "no worker is alive" in result.output
    assert "fix: start one: subagent-tasks worker APP" in result.output


def test_the_doctor_of_a_broker_that_is_down_says_one_thing(stage: Stage) -> None:
    """It never raises for what it was asked to find."""
    result = typed(stage, "doctor", SUBAGENT_TASKS_BROKER_URL="redis://127.0.0.1:9/0")
    assert result.exit_code == 1
    assert "redis://127.0.0.1:9/0 did not answer" in result.output
    assert "1 of 2 checks failed" in result.output


def test_the_doctor_of_a_broker_that_hangs_answers_in_time(own_server: EmbeddedServer, stage: Stage) -> None:
    """P8: a frozen server accepts connections and answers nothing."""
    own_server.freeze()
    short = {"SUBAGENT_TASKS_BROKER_URL": own_server.url, "SUBAGENT_TASKS_REDIS_TIMEOUT_SECONDS": "0.3"}
    result = typed(stage, "doctor", **short)
    own_server.thaw()
    assert result.exit_code == 1
    assert "did not answer" in result.output


@pytest.mark.parametrize(
    ("options", "finding"),
    [
        ({"appendonly": "no"}, "append-only file is off"),
        ({"maxmemory-policy": "allkeys-lru"}, "maxmemory-policy is allkeys-lru"),
    ],
)
def test_the_doctor_finds_a_server_that_breaks_promises(options: dict[str, str], finding: str, stage: Stage) -> None:
    """P1: what `broker_config/redis.conf` is for."""
    with EmbeddedServer(options=options) as server:
        result = typed(stage, "doctor", SUBAGENT_TASKS_BROKER_URL=server.url)
    assert result.exit_code == 1
    assert finding in result.output


async def in_thread(function: Any, *arguments: Any) -> Any:
    """Commands run an event loop of their own, and wait while this one serves."""
    return await asyncio.to_thread(function, *arguments)
