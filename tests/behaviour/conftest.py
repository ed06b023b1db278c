"""One running app for each module of this folder: a worker takes a second to stop, so tests share it.

Tests stay apart by sessions and prompts of their own. What uses `bench` runs on the module's event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from subagent_tasks.testing import ScriptedModel, fake_app
from tests.behaviour.bench import Bench
from tests.behaviour.provider import ScriptedProvider


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    provider, model = ScriptedProvider(), ScriptedModel()
    settings = {"max_prompt_bytes": 70_000}
    async with fake_app(model, providers=[provider], tools=[look], provider="scripted", settings=settings) as kit:
        kit.app.add_delegation_tool(provider="spawn", tool_name="spawn_agent")
        async with kit.app.host() as host:
            yield Bench(kit, host, provider, model)
            provider.let_all_go()


def look(path: str) -> str:
    """Look at a path."""
    return f"seen {path}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if pytest_asyncio.is_async_test(item) and "bench" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)
