"""The asyncio pool, the hand-built message and the replaced `revoke`, each through a real Celery worker."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import redis
import toy_app
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded
from celery.result import AsyncResult, allow_join_result
from celery.worker import state as worker_state
from toy_app import Stage, push, toy, wait_until, worker_process

from broker_config.embedded import EmbeddedServer
from subagent_tasks.queue.control import install_revoke, uninstall_revoke
from subagent_tasks.queue.pool import POOL_PATH
from subagent_tasks.testing.fake_server import FakeServer
from subagent_tasks.testing.worker_thread import WorkerThread

pytestmark = [
    # Celery's result backend still calls SETEX, which redis-py 8 deprecates.
    pytest.mark.filterwarnings("ignore:.*setex.*:DeprecationWarning"),
]


@pytest.fixture(scope="module", params=[FakeServer, EmbeddedServer])
def servers(request: pytest.FixtureRequest) -> Iterator[str]:
    with request.param() as server:
        yield server.url


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with EmbeddedServer() as server:
        yield server.url


class Toy:
    """One worker in this process, its stage and a client."""

    def __init__(self, url: str) -> None:
        self.client = redis.Redis.from_url(url)
        self.client.flushall()
        self.stage = Stage(url)
        self.app = toy(url, stage=self.stage, worker_disable_prefetch=True)

    def close(self) -> None:
        backend = cast("Any", self.app).backend
        backend.result_consumer.stop()
        backend.client.close()
        self.app.close()
        self.client.close()

    def send(self, name: str, *args: object, **options: Any) -> AsyncResult:
        return cast("AsyncResult", self.app.send_task(name, args, **options))

    def inspect(self, what: str) -> list[Any]:
        """Each worker's answer. `limit` is there because it ends the wait as soon as one has answered."""
        return list(getattr(cast("Any", self.app).control.inspect(timeout=5, limit=1), what)().values())

    def until(self, what: str, count: int) -> None:
        wait_until(lambda: self.stage.counts[what] >= count, description=f"{count} x {what}")


Start = Callable[[str, int], Toy]


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(url, concurrency)` gives a running `Toy`."""
    with contextlib.ExitStack() as stack:

        def open_toy(url: str, concurrency: int) -> Toy:
            running = Toy(url)
            stack.callback(running.close)
            stack.enter_context(WorkerThread(running.app, concurrency=concurrency))
            # A worker is ready before it listens for control commands, and a broadcast waits for nobody.
            wait_until(lambda: cast("Any", running.client).pubsub_numpat(), description="it listens")
            stack.enter_context(allow_join_result())  # a worker's start forbids it in its whole process
            return running

        yield open_toy


def test_activations_run_on_one_loop_without_a_thread_each(servers: str, start: Start) -> None:
    """Brief of the pool: coroutine first. 300 no-ops at `-c 100`, from hand-built messages."""
    running = start(servers, 100)
    push(running.client, *(f"noop-{i}" for i in range(300)))
    running.until("noop ended", 300)
    assert running.stage.threads == {"activations"}


def test_a_plain_function_task_has_its_result(servers: str, start: Start) -> None:
    """Other people's tasks keep working beside ours."""
    assert start(servers, 4).send("toy.add", 1, 2).get(timeout=5) == 3


def test_a_coroutine_task_is_awaited_never_stored(servers: str, start: Start) -> None:
    """Field fault 7: `async def` stored as SUCCESS without running."""
    assert start(servers, 4).send("toy.add_async", 1, 2).get(timeout=5) == 3


def test_autoretry_sees_the_exception_of_a_coroutine_task(url: str, start: Start) -> None:
    """facts-celery §6: it is silently ignored where the tracer only sees a coroutine."""
    assert start(url, 4).send("toy.flaky").get(timeout=5) == 2


def test_no_more_than_the_limit_run_at_once(url: str, start: Start) -> None:
    """`-c` is a cap; a message over it is neither started nor acknowledged."""
    running = start(url, 3)
    push(running.client, *(f"hold-{i}" for i in range(10)))
    running.until("hold started", 3)
    running.stage.open_gate()
    running.until("hold ended", 10)
    assert running.stage.most_at_once == 3


def test_a_full_worker_leaves_the_rest_on_the_queue(url: str, start: Start) -> None:
    """Field fault 5: no hoarding, with `worker_disable_prefetch`."""
    running = start(url, 2)
    push(running.client, *(f"hold-{i}" for i in range(20)))
    running.until("hold started", 2)
    wait_until(lambda: running.client.hlen("unacked") == 0, description="both acknowledged")
    assert running.client.llen(toy_app.QUEUE) == 18
    running.stage.open_gate()
    running.until("hold ended", 20)


def test_a_thousand_waiting_coroutines_fit_one_process(url: str, start: Start) -> None:
    """facts-celery §0: one process holds 1000."""
    running = start(url, 1000)
    push(running.client, *(f"hold-{i}" for i in range(1000)))
    running.until("hold started", 1000)
    running.stage.open_gate()
    running.until("hold ended", 1000)
    assert running.stage.most_at_once == 1000


def test_an_activation_that_raises_frees_its_slot_and_stores_nothing(url: str, start: Start) -> None:
    """Protocol §2: Celery writes no result of ours."""
    running = start(url, 1)
    push(running.client, "raise-1")
    push(running.client, "noop-1")
    running.until("noop ended", 1)
    assert not running.client.keys("celery-task-meta-*")


def test_what_an_activation_raised_is_logged_by_type_only(
    url: str, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """P14."""
    running = start(url, 1)
    push(running.client, "raise-1")
    wait_until(lambda: "ValueError" in caplog.text, description="the failure is logged")
    assert "secret" not in caplog.text


def test_inspect_does_not_show_the_arguments(url: str, start: Start) -> None:
    """P14."""
    running = start(url, 1)
    push(running.client, "hold-1")
    running.until("hold started", 1)
    (active,) = running.inspect("active")
    running.stage.open_gate()
    assert [(task["id"], task["args"]) for task in active] == [("hold-1", "-")]


def test_inspect_counts_what_runs(url: str, start: Start) -> None:
    """The operator sees the pool in `celery inspect stats`."""
    running = start(url, 3)
    push(running.client, "hold-1")
    running.until("hold started", 1)
    (stats,) = running.inspect("stats")
    running.stage.open_gate()
    assert {**stats["pool"]} == {
        "implementation": POOL_PATH,
        "max-concurrency": 3,
        "activations": 1,
        "other-tasks": 0,
        "waiting": 0,
    }


def test_a_coroutine_task_meets_its_soft_limit(url: str, start: Start) -> None:
    """Celery's time limits hold for other people's coroutines."""
    result = start(url, 2).send("toy.long", 30, soft_time_limit=0.2)
    with pytest.raises(SoftTimeLimitExceeded):
        result.get(timeout=5)


def test_a_coroutine_task_meets_its_hard_limit(url: str, start: Start) -> None:
    """As above; the coroutine is cancelled, its `finally` runs."""
    running = start(url, 2)
    result = running.send("toy.long", 30, time_limit=0.2)
    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=5)
    running.until("long ended", 1)


def test_a_terminated_coroutine_task_is_cancelled_and_revoked(url: str, start: Start) -> None:
    """Field fault 14: revoke does nothing on threads."""
    running = start(url, 2)
    result = running.send("toy.long", 30)
    running.until("long started", 1)
    running.app.control.revoke(result.id, terminate=True)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=5)
    running.until("long ended", 1)


def test_a_task_that_exits_fails_and_takes_nothing_with_it(url: str, start: Start) -> None:
    """A thread and a shared loop cannot end the way a prefork child does."""
    running = start(url, 2)
    assert running.send("toy.leave").get(timeout=5, propagate=False) is not None
    push(running.client, "noop-1")
    running.until("noop ended", 1)


def test_the_lifecycle_is_started_released_and_stopped_in_order(url: str) -> None:
    """Protocol §4: release every drive before anything it needs goes away."""
    stage = Stage(url)
    with WorkerThread(toy(url, stage=stage), concurrency=1):
        assert stage.calls == ["start"]
    assert stage.calls == ["start", "release", "stop"]


class TestRevoke:
    @pytest.fixture(autouse=True)
    def stock_commands_afterwards(self) -> Iterator[None]:
        yield
        uninstall_revoke()
        worker_state.revoked.clear()

    def ask(self, running: Toy, ids: list[str], **options: Any) -> dict[str, str]:
        (answer,) = cast(
            "list[dict[str, dict[str, str]]]",
            running.app.control.revoke(ids, reply=True, timeout=5, limit=1, **options),
        )
        return next(iter(answer.values()))

    def test_an_id_of_ours_becomes_a_kill_and_stores_nothing(self, url: str, start: Start) -> None:
        """Protocol §2: Celery's own `revoke` must not write our results."""
        running = start(url, 1)
        killed: list[tuple[str, bool]] = []
        install_revoke(lambda id, terminate: killed.append((id, terminate)) is None)
        answer = self.ask(running, ["run-1"], terminate=True)
        assert (killed, "ok" in answer) == ([("run-1", True)], True)
        assert not running.client.exists("celery-task-meta-run-1")
        assert "run-1" not in worker_state.revoked

    def test_an_id_of_others_goes_to_the_stock_command(self, url: str, start: Start) -> None:
        """The two kinds may come in one command."""
        running = start(url, 1)
        install_revoke(lambda id, terminate: id == "run-1")
        self.ask(running, ["run-1", "other-1"])
        assert ("other-1" in worker_state.revoked, "run-1" in worker_state.revoked) == (True, False)
        assert running.app.AsyncResult("other-1").state == "REVOKED"

    def test_an_id_that_could_not_be_judged_is_left_alone_and_reported(self, url: str, start: Start) -> None:
        """With Redis away, the stock command could write over a result of ours."""
        running = start(url, 1)

        def kill(id: str, terminate: bool) -> bool:
            raise ConnectionError

        install_revoke(kill)
        assert "error" in self.ask(running, ["run-1"])
        assert "run-1" not in worker_state.revoked

    def test_the_terminate_command_is_a_kill_too(self, url: str, start: Start) -> None:
        """Celery's `terminate` calls its own `revoke`, past the registry."""
        running = start(url, 1)
        killed: list[tuple[str, bool]] = []
        install_revoke(lambda id, terminate: killed.append((id, terminate)) is None)
        running.app.control.terminate("run-1", reply=True, timeout=5, limit=1)
        assert killed == [("run-1", True)]

    def test_installing_twice_asks_the_last_one_once(self, url: str, start: Start) -> None:
        """Two worker starts in one process."""
        running = start(url, 1)
        first: list[str] = []
        second: list[str] = []
        install_revoke(lambda id, terminate: first.append(id) is None)
        install_revoke(lambda id, terminate: second.append(id) is None)
        self.ask(running, ["run-1"])
        assert (first, second) == ([], ["run-1"])

    def test_a_revoked_id_does_not_stop_an_activation(self, url: str, start: Start) -> None:
        """facts-celery §6: stock workers drop every later message of a revoked id for hours. Here the claim decides."""
        running = start(url, 1)
        worker_state.revoked.add("noop-1")
        push(running.client, "noop-1")
        running.until("noop ended", 1)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "worker.log"


@pytest.fixture
def client(url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(url) as client:
        client.flushall()
        yield client


def test_sigterm_releases_running_activations_and_leaves(url: str, client: redis.Redis, log: Path) -> None:
    """Protocol §4; field reports of workers that wait for hour-long tasks. Within three seconds."""
    with worker_process(url, log, "-c", "4") as worker:
        push(client, "drive-1", "drive-2")
        wait_until(lambda: client.get("toy:driving") == b"2", description="both are driven", seconds=10)
        asked_at = time.monotonic()
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(5) == 0, log.read_text()
        assert time.monotonic() - asked_at < 3
    assert client.lrange("toy:calls", 0, -1) == [b"release", b"stop"]


def test_an_activation_that_ignores_its_release_is_cancelled_at_the_grace(
    url: str, client: redis.Redis, log: Path
) -> None:
    """Every wait is bounded (P8): the toy's grace is 1.5 s, its activation sleeps 60 s."""
    with worker_process(url, log, "-c", "4") as worker:
        push(client, "stubborn-1")
        wait_until(lambda: client.get("toy:driving"), description="it is driven", seconds=10)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(5) == 0, log.read_text()


def test_sigterm_puts_back_what_was_not_started(url: str, client: redis.Redis, log: Path) -> None:
    """P1: a prefetched message is acknowledged only when it starts."""
    with worker_process(url, log, "-c", "1") as worker:
        push(client, "drive-1", "noop-1", "noop-2")
        wait_until(lambda: client.get("toy:driving"), description="one is driven", seconds=10)
        wait_until(lambda: client.hlen("unacked") == 1, description="one more was fetched")
        worker.send_signal(signal.SIGTERM)
        worker.wait(5)
    assert (client.llen(toy_app.QUEUE), client.hlen("unacked")) == (2, 0)


def test_a_cold_shutdown_releases_too_and_stores_no_retry(url: str, client: redis.Redis, log: Path) -> None:
    """facts-celery §6: Celery marks an early-acknowledged task RETRY and queues nothing."""
    with worker_process(url, log, "-c", "4") as worker:
        push(client, "drive-1")
        wait_until(lambda: client.get("toy:driving"), description="it is driven", seconds=10)
        worker.send_signal(signal.SIGQUIT)
        worker.wait(5)
    assert client.lrange("toy:calls", 0, -1) == [b"release", b"stop"]
    assert not client.exists("celery-task-meta-drive-1")


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_another_pool_is_refused_with_one_line(url: str, log: Path, pool: str) -> None:
    """A worker on another pool would take messages that it cannot run."""
    with worker_process(url, log, "-P", pool) as worker:
        assert worker.wait(5) == 1
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    assert len(lines) == 1, lines
    assert "Start the worker without -P" in lines[0]


def test_a_lifecycle_that_cannot_start_ends_the_worker_with_one_line(url: str, log: Path) -> None:
    """Design §10, operator: what is wrong, without a traceback."""
    with worker_process(url, log, TOY_COMPLAINT="visibility_timeout is too short") as worker:
        assert worker.wait(5) == 1
    text = log.read_text()
    assert "This worker cannot start: visibility_timeout is too short" in text
    assert "Traceback" not in text
