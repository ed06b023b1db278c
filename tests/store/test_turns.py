"""Who may ask Redis when many want to: in the order they came, and nobody longer than the server is silent.

The commands are stand-ins, so that a test says how long one takes.
"""

from __future__ import annotations

import asyncio

import pytest

from broker_config import BrokerSettings
from subagent_tasks.errors import BrokerUnavailable
from subagent_tasks.store.connection import MAX_CONNECTIONS, Moves, connect

TIMEOUT_SECONDS = 0.3


@pytest.fixture
async def moves() -> Moves:
    settings = BrokerSettings(redis_timeout_seconds=TIMEOUT_SECONDS, lease_seconds=6)
    return Moves(connect(settings), settings)


async def fill(moves: Moves) -> tuple[asyncio.Event, list[asyncio.Task[object]]]:
    """As many commands under way as there may be, until the event is set."""
    may_end = asyncio.Event()
    tasks = [asyncio.create_task(moves.read(may_end.wait())) for _ in range(MAX_CONNECTIONS)]
    await asyncio.sleep(0)
    return may_end, [*tasks]


async def test_commands_get_their_turn_in_the_order_they_came(moves: Moves) -> None:
    """P8: redis-py's pool gives a free connection to whoever asks next; under load the oldest never got one."""
    may_end, under_way = await fill(moves)
    answered: list[int] = []

    async def command(number: int) -> None:
        answered.append(number)
        await asyncio.sleep(0)

    waiting: list[asyncio.Task[None]] = []
    for number in range(100):
        waiting.append(asyncio.create_task(moves.read(command(number))))
        await asyncio.sleep(0)
    may_end.set()
    await asyncio.gather(*under_way, *waiting)
    assert answered == list(range(100))


async def test_whoever_waits_while_others_are_answered_goes_on_waiting(moves: Moves) -> None:
    """protocol §4: a server that answers is not away, however many want it."""
    rounds, longest = 8, TIMEOUT_SECONDS / 4

    async def command() -> str:
        # It takes this long; all together wait for twice the timeout.
        await asyncio.sleep(longest)
        return "answered"

    answers = await asyncio.gather(*(moves.read(command()) for _ in range(rounds * MAX_CONNECTIONS)))
    assert set(answers) == {"answered"}


async def test_a_silent_server_keeps_nobody_longer_than_twice_the_timeout(moves: Moves) -> None:
    """P8: neither those that asked nor those that wait for their turn."""
    silent = asyncio.Event()
    asking = [asyncio.create_task(moves.read(silent.wait())) for _ in range(20 * MAX_CONNECTIONS)]
    # One after the other they would take twenty times the timeout.
    async with asyncio.timeout(10 * TIMEOUT_SECONDS):
        answers = await asyncio.gather(*asking, return_exceptions=True)
    assert {type(answer) for answer in answers} == {BrokerUnavailable}


async def test_a_turn_that_is_given_up_is_taken_by_the_next(moves: Moves) -> None:
    """behaviour §2.7: a caller that is cancelled while it waits, or just as its turn comes, keeps nobody waiting."""
    may_end, under_way = await fill(moves)
    given_up = [asyncio.create_task(moves.read(asyncio.sleep(0))) for _ in range(MAX_CONNECTIONS)]
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.gather(*under_way)
    for task in given_up:
        task.cancel()
    await asyncio.gather(*given_up, return_exceptions=True)
    later = [moves.read(asyncio.sleep(0, result=number)) for number in range(2 * MAX_CONNECTIONS)]
    assert await asyncio.gather(*later) == list(range(2 * MAX_CONNECTIONS))
