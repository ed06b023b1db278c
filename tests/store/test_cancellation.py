"""A caller that is cancelled while Redis is asked ends there, whatever the moment."""

from __future__ import annotations

import asyncio

import pytest

from broker_config import BrokerSettings
from subagent_tasks.store.connection import Moves, connect
from subagent_tasks.store.doorbell import Doorbell


@pytest.mark.parametrize("steps", range(8))
async def test_a_cancellation_during_a_command_is_not_swallowed(server: str, steps: int) -> None:
    """behaviour §2.7: the cancellation of the awaiting task ends the call.

    Before Python 3.12 `wait_for` loses one that comes as what it awaits ends, so nothing may send with it.
    """
    settings = BrokerSettings(broker_url=server)
    client = connect(settings)
    moves = Moves(client, settings)
    await moves.read(client.time())

    async def read_and_go_on() -> None:
        await moves.read(client.time())
        await asyncio.Event().wait()

    reading = asyncio.create_task(read_and_go_on())
    for _ in range(steps):
        await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait({reading}, timeout=1)
    was_cancelled = reading.cancelled()
    reading.cancel()
    await client.aclose()

    assert was_cancelled


@pytest.mark.parametrize("steps", range(8))
async def test_a_cancellation_during_a_subscription_is_not_swallowed(server: str, steps: int) -> None:
    """As above, on the connection that listens."""
    doorbell = Doorbell(BrokerSettings(broker_url=server))
    await doorbell.listen("first", lambda _: None)

    async def listen_and_go_on() -> None:
        await doorbell.listen("second", lambda _: None)
        await asyncio.Event().wait()

    listening = asyncio.create_task(listen_and_go_on())
    for _ in range(steps):
        await asyncio.sleep(0)
    listening.cancel()
    await asyncio.wait({listening}, timeout=1)
    was_cancelled = listening.cancelled()
    listening.cancel()
    await doorbell.close()

    assert was_cancelled
