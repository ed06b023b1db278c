"""Our side of `waiting`: an app whose children are agents of the provider `spawn`.

Beside the app's tool each child is shown the delegation tool, as any child is: the bare side is spared that.
"""

from __future__ import annotations

from benchmarks.child import INSTRUCTIONS, look_up, waiting_model
from broker_config import BrokerSettings
from subagent_tasks import SubagentApp
from subagent_tasks.providers import SpawnProvider


def declare(settings: BrokerSettings | None = None) -> SubagentApp:
    """The app of worker and host alike; its delegation tool is `subagent`."""
    app = SubagentApp(settings)
    app.add_tool(look_up)
    app.add_provider(SpawnProvider(model=waiting_model(), instructions=INSTRUCTIONS))
    app.add_delegation_tool(provider="spawn")
    return app
