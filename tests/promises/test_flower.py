"""Flower, as an operator starts it: `celery -A agents flower`."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from stage import HERE, MakeStage

from subagent_tasks.testing import reply, wait_until


async def test_flower_shows_the_tasks_without_what_they_are_about(make_stage: MakeStage) -> None:
    """Step 1 and P14: the run is there under its id, its arguments are hidden."""
    stage = make_stage()
    stage.model.on("flower-secret", reply("done"))
    stage.worker(options=("-E",)).wait_ready()
    with flower(stage.environment) as address:
        await wait_until(lambda: fetched(f"{address}/api/workers"), description="flower is up")
        async with stage.session() as session:
            arguments = {"description": "look", "prompt": "flower-secret"}
            result = await session.call("subagent", arguments)
        assert isinstance(result.value, dict)
        run_id = str(result.value["runId"])
        tasks = await wait_until(lambda: finished(address, run_id), description="flower has seen it end")
        assert tasks is not None
    assert (tasks[run_id]["args"], "flower-secret" in json.dumps(tasks)) == ("-", False)


@contextmanager
def flower(environment: dict[str, str]) -> Generator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "celery", "-A", "agents", "flower", "--address=127.0.0.1", f"--port={port}"]
    env = {**os.environ, **environment, "FLOWER_UNAUTHENTICATED_API": "true", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(command, cwd=HERE, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


async def fetched(url: str) -> Any:
    def read() -> Any:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                return json.load(answer)
        except (urllib.error.URLError, TimeoutError):
            return None

    return await asyncio.to_thread(read)


async def finished(address: str, run_id: str) -> dict[str, Any] | None:
    tasks = await fetched(f"{address}/api/tasks")
    return tasks if tasks and tasks.get(run_id, {}).get("state") == "SUCCESS" else None
