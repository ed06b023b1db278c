"""The demo's declaration. Its worker imports `app`; its host makes the same app for the model that was asked for."""

from __future__ import annotations

from pydantic_ai.models import Model

from broker_config import BrokerSettings
from subagent_tasks.app import SubagentApp
from subagent_tasks.providers import SpawnProvider

LOCAL_MODEL = "openai-chat:smollm2"
MAX_LOCAL_TOKENS = 300
"""The small model may ramble; a sentence takes it about 60 tokens."""


def make_app(settings: BrokerSettings | None = None, *, model: str | Model = LOCAL_MODEL) -> SubagentApp:
    """One provider, one delegation tool, the job tools.

    The tool's `agent_options` travel with each request, so the worker, a process of its own, uses the model that the
    host was told, whatever its own default is. Where the model is and its key are in the worker's OPENAI_BASE_URL and
    OPENAI_API_KEY, which the API's own client reads: nothing of the demo's passes through the environment.
    """
    app = SubagentApp(settings)
    app.add_provider(SpawnProvider(model=model, instructions="You summarise documents for engineers."))
    options: dict[str, object] = {"model": model} if isinstance(model, str) else {}
    if model == LOCAL_MODEL:
        options["max_tokens"] = MAX_LOCAL_TOKENS
    app.add_delegation_tool(
        provider="spawn",
        # They read one text and answer: a tool in sight would only take the small model's time and wits.
        tool_filter={"allow": []},
        **({"agent_options": options} if options else {}),
    )
    app.add_job_tools()
    return app


app = make_app()
