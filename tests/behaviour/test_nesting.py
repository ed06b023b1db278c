"""Children that delegate: the same tools in a child's hands, and waits that hold no slot (P11, behaviour §4.13, §7)."""

from __future__ import annotations

import asyncio

import pytest

from subagent_tasks.testing import ScriptedModel, call_tool, fake_app, reply


def chain(depth: int) -> ScriptedModel:
    """Each child delegates to the next one and repeats what it was told; the deepest answers."""
    model = ScriptedModel()
    for level in range(1, depth):
        prompt = {"description": "deeper", "prompt": f"level {level + 1}"}
        model.on(f"level {level}", [call_tool("subagent", prompt), reply(f"done at {level}")])
    model.on(f"level {depth}", reply("the bottom"))
    return model


@pytest.mark.parametrize(("depth", "concurrency", "chains"), [(3, 2, 8), (5, 1, 1)])
async def test_a_chain_is_longer_than_there_are_slots(depth: int, concurrency: int, chains: int) -> None:
    """P11: a child that waits for its own child holds no slot, so nesting cannot deadlock."""
    async with fake_app(chain(depth), concurrency=concurrency, max_depth=depth) as kit:
        calls = [kit.session.call("subagent", {"description": "top", "prompt": "level 1"}) for _ in range(chains)]
        results = await asyncio.gather(*calls)
        assert [result.text for result in results] == ["done at 1"] * chains
