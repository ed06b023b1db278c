"""`fake_app`: everything a test of delegation needs, in one process: a server, a worker, a host, an open session."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import redis.asyncio
from pydantic_ai.models import Model

from broker_config import BrokerSettings
from subagent_tasks.app import SubagentApp
from subagent_tasks.host import Host, Session
from subagent_tasks.protocol.interfaces import Provider
from subagent_tasks.providers import SpawnProvider
from subagent_tasks.testing.checks import assert_no_leaked_keys, assert_settled
from subagent_tasks.testing.fake_server import FakeServer
from subagent_tasks.testing.waiting import wait_until
from subagent_tasks.testing.worker_thread import WorkerThread
from subagent_tasks.toolbox import ToolLike

SETTLE_SECONDS = 5.0
"""How long the runs of a test may take to end once the test is over."""


@dataclass(frozen=True, slots=True)
class Kit:
    """What a test has: the declared app, an open host, an open session of it, and the server's client."""

    app: SubagentApp
    host: Host
    session: Session
    url: str
    redis: redis.asyncio.Redis


@asynccontextmanager
async def fake_app(
    model: Model | None = None,
    *,
    providers: Sequence[Provider] = (),
    tools: Sequence[ToolLike] = (),
    url: str | None = None,
    settings: dict[str, Any] | None = None,
    job_tools: dict[str, Any] | None = None,
    concurrency: int = 100,
    worker: bool = True,
    check_leaks: bool = True,
    **delegation: Any,
) -> AsyncGenerator[Kit]:
    """A declared app with a running worker and an open session, on fakeredis behind a socket.

    `model` serves the provider `spawn`; `providers` are declared beside it. Further keyword arguments configure the
    delegation tool (`provider="spawn"` and `tool_name="subagent"` unless given). `url` names a server to use instead of
    fakeredis, `settings` overrides `BrokerSettings`, `worker=False` starts none. At the end, unless told otherwise, all
    runs must be settled and no key may be left without a lifetime.
    """
    with ExitStack() as stack:
        url = url or stack.enter_context(FakeServer()).url
        # A namespace of its own, so that tests can share a server.
        overrides: dict[str, Any] = {
            "broker_url": url,
            "namespace": f"test-{uuid.uuid4().hex[:12]}",
            **(settings or {}),
        }
        app = SubagentApp(BrokerSettings(**overrides))
        for tool in tools:
            app.add_tool(tool)
        if model is not None:
            app.add_provider(SpawnProvider(model=model))
        for provider in providers:
            app.add_provider(provider)
        app.add_delegation_tool(**{"provider": next(iter(app.providers), "spawn"), **delegation})
        app.add_job_tools(**(job_tools or {}))
        client = redis.asyncio.Redis.from_url(app.settings.redis_py_url, decode_responses=True)
        thread = WorkerThread(app.celery, concurrency=concurrency) if worker else None
        try:
            if thread is not None:
                await asyncio.to_thread(thread.__enter__)
            async with app.host() as host:
                session = await host.open_session("test-session")
                yield Kit(app=app, host=host, session=session, url=url, redis=client)
                if check_leaks:
                    await _assert_nothing_left(client, app.settings.namespace)
        finally:
            if thread is not None:
                await asyncio.to_thread(thread.__exit__, None, None, None)
            await client.aclose()
            app.celery.close()


async def _assert_nothing_left(client: redis.asyncio.Redis, namespace: str) -> None:
    """What a test started may take a moment to end; which runs did not is the last thing seen of them."""
    unsettled: list[str] = []

    async def settled() -> bool:
        unsettled.clear()
        try:
            await assert_settled(client, namespace)
        except AssertionError as error:
            unsettled.append(str(error))
        return not unsettled

    try:
        await wait_until(settled, description="all runs are settled", timeout_seconds=SETTLE_SECONDS)
    except AssertionError:
        raise AssertionError(
            f"the test ended, and {SETTLE_SECONDS:g} s later it still has {unsettled[0]}; wait for them or "
            "kill them in the test, or pass check_leaks=False"
        ) from None
    await assert_no_leaked_keys(client, namespace)
