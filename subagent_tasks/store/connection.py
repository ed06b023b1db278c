"""The way to Redis: one bounded pool, one runner for scripts, one place where its errors become ours.

redis-py repeats a command by itself when the reply is lost; every move is made so that a repeat changes nothing.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar, cast

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from broker_config import BrokerSettings, safe_url
from subagent_tasks.errors import BrokerUnavailable
from subagent_tasks.protocol.scripts import Script

T = TypeVar("T")

MAY_NOT = "its ACL does not allow this user what broker_config/users.acl lists"
REFUSALS = {"OOM": "it is out of memory", "READONLY": "it is a replica", "MISCONF": "it cannot save to its disk",
            "NOREPLICAS": "it has too few replicas", "ACL": MAY_NOT}  # fmt: skip
"""What a server that answers, and refuses what is asked, begins its answer with. `ACL` is a script's own answer."""

MAX_CONNECTIONS = 32
"""So many commands are under way at once; the others wait their turn."""

UNREACHABLE = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError)


def connect(settings: BrokerSettings, *, max_connections: int = MAX_CONNECTIONS) -> redis.asyncio.Redis:
    """A client that waits at most `redis_timeout_seconds` for a connection; its commands are bounded by `Moves`."""
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        settings.redis_py_url,
        decode_responses=True,
        max_connections=max_connections,
        timeout=settings.redis_timeout_seconds,
        # `Moves.read` bounds every command. With a timeout here redis-py sends with `wait_for`, which costs a task per
        # command and, before Python 3.12, swallows a cancellation that comes as it ends.
        socket_timeout=None,
        socket_connect_timeout=settings.redis_timeout_seconds,
        socket_keepalive=not settings.redis_py_url.startswith("unix:"),
        retry=Retry(ExponentialBackoff(cap=0.5, base=0.02), 3),
        health_check_interval=0,
        client_name="subagent-tasks",
    )
    return redis.asyncio.Redis.from_pool(pool)


class Moves:
    """Runs the scripts of `protocol.scripts` and plain reads, with errors translated."""

    def __init__(self, client: redis.asyncio.Redis, settings: BrokerSettings) -> None:
        self.client = client
        self._timeout_seconds = settings.redis_timeout_seconds
        self._where = safe_url(settings.state_url)
        # In the order they came: redis-py's pool lets newcomers overtake, so of a thousand children some got none.
        self._turns = asyncio.Semaphore(MAX_CONNECTIONS)
        self._answered_at = 0.0

    async def run(
        self,
        script: Script,
        *,
        keys: Mapping[str, str],
        args: Mapping[str, str | int],
        rest: Sequence[str | int] = (),
    ) -> list[Any]:
        """Run one move and return its answer, the word first."""
        key_list, arg_list = script.key_list(keys), script.arg_list(args, rest)
        try:
            answer = await self._command("EVALSHA", script.sha, len(key_list), *key_list, *arg_list)
        except redis.exceptions.NoScriptError:
            answer = await self._command("EVAL", script.source, len(key_list), *key_list, *arg_list)
        return cast("list[Any]", answer)

    async def read(self, command: Awaitable[T]) -> T:
        """Await a command of the client, at most `redis_timeout_seconds` with all its tries; errors are translated.

        Its time begins with its turn. It waits for that as long as others are answered, and no longer than its own time
        once nobody is.
        """
        try:
            async with self._turn(command), asyncio.timeout(self._timeout_seconds):
                answer = await command
            self._answered_at = asyncio.get_running_loop().time()
            return answer
        except UNREACHABLE as error:
            raise self._unavailable(error) from error
        except redis.exceptions.ResponseError as error:
            if (why := _refusal(error)) is None:
                raise
            raise BrokerUnavailable(f"Redis at {self._where} refuses: {why}; mend that, nothing was changed") from error

    @asynccontextmanager
    async def _turn(self, command: Awaitable[object]) -> AsyncGenerator[None]:
        if self._turns.locked():
            await self._wait_for_turn(command)
        else:
            await self._turns.acquire()
        try:
            yield
        finally:
            self._turns.release()

    async def _wait_for_turn(self, command: Awaitable[object]) -> None:
        clock = asyncio.get_running_loop().time
        since = clock()
        turn = asyncio.ensure_future(self._turns.acquire())
        try:
            while not turn.done():
                left_seconds = max(since, self._answered_at) + self._timeout_seconds - clock()
                if left_seconds <= 0:
                    raise TimeoutError
                await asyncio.wait({turn}, timeout=left_seconds)
        except BaseException:
            turn.add_done_callback(self._give_back)
            turn.cancel()
            if inspect.iscoroutine(command):
                command.close()  # it will not be awaited any more
            raise

    def _give_back(self, turn: asyncio.Future[Literal[True]]) -> None:
        # It may have come in the moment in which it was given up.
        if not turn.cancelled():
            self._turns.release()

    async def _command(self, *words: str | int) -> Any:
        return await self.read(cast("Awaitable[Any]", self.client.execute_command(*words)))

    def _unavailable(self, error: BaseException) -> BrokerUnavailable:
        return BrokerUnavailable(
            f"Redis at {self._where} did not answer ({type(error).__name__}): check that it runs and that "
            "SUBAGENT_TASKS_REDIS_URL (or SUBAGENT_TASKS_BROKER_URL) names it"
        )


def _refusal(error: redis.exceptions.ResponseError) -> str | None:
    """Why the server refuses, or None when the error says something else."""
    if isinstance(error, redis.exceptions.NoPermissionError):
        return MAY_NOT
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return REFUSALS["OOM"]
    if isinstance(error, redis.exceptions.ReadOnlyError):
        return REFUSALS["READONLY"]
    return REFUSALS.get(str(error).partition(" ")[0])


def pairs(flat: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """HGETALL inside a script answers flat; outside, redis-py already made a mapping."""
    if isinstance(flat, Mapping):
        return dict(flat)
    return dict(zip(flat[::2], flat[1::2], strict=True))
