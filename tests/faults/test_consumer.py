"""A worker lives through a restart of its broker. Each test is a real worker process on the bundled server."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import celery
import pytest
import redis
import toy_app
from celery import Celery
from celery.result import AsyncResult
from packaging.version import Version
from redis.backoff import ConstantBackoff
from redis.retry import Retry
from toy_app import push, wait_until, worker_process

from broker_config.embedded import EmbeddedServer
from subagent_tasks.queue.consumer import consumer_path

RECONNECT_SECONDS = 10.0  # Celery waits 2 s, then 4 s, between its attempts


@pytest.fixture
def broker() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def client(broker: EmbeddedServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(broker.url, retry=Retry(ConstantBackoff(0.1), 20)) as client:
        yield client


@pytest.fixture
def sender(broker: EmbeddedServer) -> Iterator[Celery]:
    app = toy_app.toy(broker.url)
    yield app
    backend = cast("Any", app).backend
    backend.result_consumer.stop()
    backend.client.close()
    app.close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "worker.log"


def test_an_idle_worker_consumes_again_after_a_restart(broker: EmbeddedServer, client: redis.Redis, log: Path) -> None:
    """Field fault 9: alive, ping green, consuming nothing."""
    with worker_process(broker.url, log, "-c", "4") as worker:
        push(client, "mark-1")
        wait_until(lambda: client.get("toy:marks") == b"1", description="the worker is up", seconds=10)
        broker.restart()
        push(client, "mark-2")
        wait_until(lambda: client.get("toy:marks") == b"2", description="it consumes again", seconds=RECONNECT_SECONDS)
        assert worker.poll() is None


def test_a_worker_ends_though_the_broker_is_frozen(broker: EmbeddedServer, client: redis.Redis, log: Path) -> None:
    """P8: SIGTERM has an end within the grace and a few seconds, whatever Redis does."""
    with worker_process(broker.url, log, "-c", "4") as worker:
        push(client, "mark-1")
        wait_until(lambda: client.get("toy:marks") == b"1", description="the worker is up", seconds=10)
        broker.freeze()
        try:
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(10) in (0, 70), log.read_text()
        finally:
            broker.thaw()


def test_a_busy_worker_lives_through_a_restart_and_consumes_again(
    broker: EmbeddedServer, client: redis.Redis, sender: Celery, log: Path
) -> None:
    """facts-celery §0.2: unacknowledged messages, running and prefetched, must not end the worker."""
    with worker_process(broker.url, log, "-c", "1", "--prefetch-multiplier", "4") as worker:
        long = cast("AsyncResult", sender.send_task("toy.long", (3,)))
        wait_until(lambda: client.get("toy:long"), description="the long task runs", seconds=10)
        push(client, "mark-1", "mark-2")
        wait_until(lambda: client.hlen("unacked") == 3, description="two more are prefetched")
        broker.restart()
        wait_until(long.successful, description="the long task ended", seconds=RECONNECT_SECONDS)
        push(client, "mark-3")
        wait_until(
            lambda: client.get("toy:marks") == b"3",
            description="the prefetched ones and a new one have run",
            seconds=RECONNECT_SECONDS,
        )
        wait_until(lambda: client.hlen("unacked") == 0, description="the late acknowledgement arrived")
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(5) == 0, log.read_text()


@pytest.mark.skipif(Version(celery.__version__) < Version("5.7.0"), reason="the fault came with 5.7.0")
def test_the_stock_consumer_still_needs_the_workaround(
    broker: EmbeddedServer, client: redis.Redis, sender: Celery, log: Path
) -> None:
    """When this fails, Celery has mended it: end the version range in `queue/consumer.py`."""
    stock = "celery.worker.consumer:Consumer"
    with worker_process(broker.url, log, "-c", "4", TOY_CONSUMER=stock) as worker:  # not saturated: that one survives
        sender.send_task("toy.long", (1,))
        wait_until(lambda: client.get("toy:long"), description="the long task runs", seconds=10)
        broker.restart()
        worker.wait(RECONNECT_SECONDS)
    assert "Unrecoverable error" in log.read_text()


@pytest.mark.parametrize(("version", "ours"), [("5.6.3", False), ("5.7.0", True), ("5.8.1", True)])
def test_the_workaround_is_installed_only_where_it_is_needed(version: str, ours: bool) -> None:
    """Design §10."""
    assert consumer_path(version).startswith("subagent_tasks.") is ours
