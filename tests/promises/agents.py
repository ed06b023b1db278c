"""One declaration, as in the README: workers import it by name, the tests' hosts run it under the same environment."""

from __future__ import annotations

import asyncio
import os
import re
import time
from pathlib import Path

# The first model request of a worker must not pay for the import of the API's client.
import pydantic_ai.models.openai  # noqa: F401  # pyright: ignore[reportUnusedImport]  # for its cost

from subagent_tasks import SubagentApp
from subagent_tasks.protocol.interfaces import Drive, Provider, Run
from subagent_tasks.protocol.models import Capabilities, ChildRequest
from subagent_tasks.providers import SpawnProvider

NOTES = Path(os.environ.get("PROMISES_NOTES", os.devnull))
GATES = Path(os.environ.get("PROMISES_GATES", os.devnull))
MODEL_URL = os.environ.get("PROMISES_MODEL_URL", "http://127.0.0.1:9/v1")


def note(text: str) -> str:
    """Write a line down."""
    write(text)
    return f"noted {text}"


async def hold(text: str) -> str:
    """Write a line down, then wait until the gate of that name is open."""
    write(f"{text} begun")
    while not (GATES / text).exists():  # noqa: ASYNC110  # the gate is opened in another process
        await asyncio.sleep(0.01)
    write(f"{text} ended")
    return f"held {text}"


def block(text: str) -> str:
    """As `hold`, but a plain function: it keeps its thread."""
    write(f"{text} begun")
    while not (GATES / text).exists():
        time.sleep(0.01)
    write(f"{text} ended")
    return f"blocked {text}"


async def hang(text: str) -> str:
    """Write a line down, then let the event loop stand still until the gate of that name is open."""
    return block(text)


def keep_the_gil(text: str) -> str:
    """Write a line down, then let no other thread of the process run for minutes, as bad C code does."""
    write(f"{text} begun")
    re.match("(a+)+b", "a" * 40)
    return f"kept {text}"


def trip(text: str) -> str:
    """Fail with what it was given."""
    raise ValueError(f"tripped over {text}")


def write(line: str) -> None:
    with NOTES.open("a") as notes:
        notes.write(f"{os.getpid()} {line}\n")


class PoisonProvider(Provider):
    """Its children take their worker with them."""

    name = "poison"
    queue = ""
    capabilities = Capabilities(depth_limit=True)
    inherits_parent_context = False
    resumable = True

    async def start(self, request: ChildRequest, drive: Drive) -> Run:
        write("poisoned")
        os._exit(9)


class BrokenProvider(PoisonProvider):
    """Its children never start, and the reason quotes the prompt."""

    name = "broken"

    async def start(self, request: ChildRequest, drive: Drive) -> Run:
        raise RuntimeError(f"cannot start: {request.prompt}")


app = SubagentApp()
for tool in (note, hold, block, hang, keep_the_gil, trip):
    app.add_tool(tool)
app.add_provider(SpawnProvider(model="openai:stub-1", base_url=MODEL_URL))
# With a queue of its own, so that a test can say which worker may drive which child.
app.add_provider(SpawnProvider(model="openai:stub-1", base_url=MODEL_URL, name="apart"))
app.add_provider(PoisonProvider())
app.add_provider(BrokenProvider())
app.add_delegation_tool(provider="spawn")
app.add_delegation_tool(provider="spawn", tool_name="subagent_once", recovery="fail")
app.add_delegation_tool(provider="spawn", tool_name="subagent_deep", max_depth=5)
app.add_delegation_tool(provider="apart", tool_name="subagent_apart")
app.add_delegation_tool(provider="poison", tool_name="subagent_poison")
app.add_delegation_tool(provider="broken", tool_name="subagent_broken")
app.add_job_tools()
celery = app.celery
