"""The examples of the README, run as a reader would: a worker from Celery's command line, a host beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from broker_config import EmbeddedServer
from subagent_tasks.testing import reply, stub_llm
from subagent_tasks.testing.processes import WorkerProcess

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_host_of_the_readme_delegates_to_a_worker_of_its_agents() -> None:
    """Step 1, Shows 2: `celery -A agents worker` runs the delegations of a second process."""
    with stub_llm() as model, EmbeddedServer() as server:
        model.on("Say hello", reply("Hello there."))
        model.on("prime numbers", reply("2, 3, 5"))
        environment = {
            **os.environ,
            "SUBAGENT_TASKS_BROKER_URL": server.url,
            "SUBAGENT_TASKS_NAMESPACE": "examples",
            "OPENAI_BASE_URL": model.url,
            "OPENAI_API_KEY": "not-a-key",
            "PYTHONWARNINGS": "ignore",
        }
        with WorkerProcess("agents", directory=EXAMPLES, env=environment) as worker:
            worker.wait_ready()
            host = subprocess.run(
                [sys.executable, "host.py"], cwd=EXAMPLES, env=environment, capture_output=True, text=True, timeout=30
            )
    assert host.returncode == 0, host.stderr
    lines = host.stdout.splitlines()
    assert lines[:2] == ["tools: subagent, job_output, job_list, job_kill", "foreground: Hello there."]
    assert lines[2].startswith("background: started background subagent job ")
    assert "finished [status: completed]" in lines[3]
    assert lines[4:] == ["output: 2, 3, 5", "[status: completed]"]
