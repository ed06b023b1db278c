"""What the promises are tried on: real servers, a stub of a model API, and stages for worker processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack

import pytest
from stage import MakeStage, Stage

from broker_config import EmbeddedServer
from subagent_tasks.testing import stub_llm


@pytest.fixture(scope="module")
def shared_server() -> Iterator[EmbeddedServer]:
    """A real server that nobody of the module stops."""
    with EmbeddedServer() as running:
        yield running


@pytest.fixture(scope="module")
def make_stage(shared_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeStage]:
    """Stages on the module's server, or on `url`; all processes end with the module."""
    with ExitStack() as stack:

        def make(*, url: str | None = None, environment: Mapping[str, str] | None = None) -> Stage:
            model = stack.enter_context(stub_llm())
            stage = Stage(
                url=url or shared_server.url,
                model=model,
                directory=tmp_path_factory.mktemp("stage"),
                environment=dict(environment or {}),
            )
            stack.push(stage.stack)
            return stage

        yield make


@pytest.fixture(scope="module")
def stage(make_stage: MakeStage) -> Stage:
    """The module's stage."""
    return make_stage()


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    """For a test that kills or freezes it."""
    with EmbeddedServer() as running:
        yield running
