"""Servers that every tier may use: fakeredis behind a socket and the bundled real one, emptied before each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from broker_config import EmbeddedServer
from subagent_tasks.testing import FakeServer


@pytest.fixture(scope="session")
def fake_server_url() -> Iterator[str]:
    with FakeServer() as server:
        yield server.url


@pytest.fixture(scope="session")
def bundled_server_url() -> Iterator[str]:
    with EmbeddedServer() as server:
        yield server.url


@pytest.fixture(params=["fakeredis", "bundled"])
def server(request: pytest.FixtureRequest) -> str:
    """The URL of an empty server; each test runs on both kinds."""
    fixtures = {"fakeredis": "fake_server_url", "bundled": "bundled_server_url"}
    url = str(request.getfixturevalue(fixtures[request.param]))
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    return url
