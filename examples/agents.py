"""The declaration: imported by the host and by the workers alike."""

from __future__ import annotations

from pathlib import Path

from subagent_tasks import SubagentApp
from subagent_tasks.providers import SpawnProvider


def read_file(path: str) -> str:
    """Read a text file of the worker's machine."""
    return Path(path).read_text(encoding="utf-8")


app = SubagentApp()
app.add_tool(read_file)
app.add_provider(SpawnProvider(model="openai:gpt-5-mini"))
app.add_delegation_tool(provider="spawn")
app.add_job_tools()
celery = app.celery
