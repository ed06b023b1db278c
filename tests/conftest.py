"""What every tier may use: fakeredis behind a socket and the bundled real server, emptied before each test.

Property tests are the same in every run of the suite; `HYPOTHESIS_PROFILE=long` tries thirty times as many examples,
other ones each time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import redis
from hypothesis import settings

from broker_config import EmbeddedServer
from subagent_tasks.testing import FakeServer

settings.register_profile("suite", derandomize=True, deadline=None, max_examples=100)
settings.register_profile("long", deadline=None, max_examples=3000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


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
