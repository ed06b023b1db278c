"""What the composed workers run, until a declaration of your own is mounted in its place.

`subagent` asks OpenAI: its children need OPENAI_API_KEY. `subagent_small` asks the service `model` and needs no key; it
is what the service `demo` calls.
"""

from __future__ import annotations

import os

from subagent_tasks import SubagentApp
from subagent_tasks.providers import SpawnProvider

MODEL_URL = os.environ.get("MODEL_URL", "http://model:8080/v1")

app = SubagentApp()
app.add_provider(SpawnProvider(model="openai:gpt-5-mini"))
app.add_provider(SpawnProvider(model="smollm2", name="small", base_url=MODEL_URL, max_tokens=100))
app.add_delegation_tool(provider="spawn")
app.add_delegation_tool(
    provider="small",
    tool_name="subagent_small",
    # A model this small only talks; and whoever tries this out should not wait for an hour.
    tool_filter={"allow": []},
    run_limit_seconds=120,
)
app.add_job_tools()
celery = app.celery
