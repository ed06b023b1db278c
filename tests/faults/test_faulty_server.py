"""The proxy that tests stand behind: what it loses, and that it loses nothing else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
import redis
import redis.exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from broker_config import EmbeddedServer
from subagent_tasks.errors import CallerError, OperatorError
from subagent_tasks.protocol import scripts
from subagent_tasks.testing.faults import FaultyServer, freeze_server, refuse, restart_server, value_end

Client = Any  # redis-py types its methods for sync and async at once


@pytest.fixture
def faulty(server: str) -> Iterator[FaultyServer]:
    with FaultyServer(server) as faulty:
        yield faulty


@pytest.fixture
def client(faulty: FaultyServer) -> Iterator[Client]:
    """Behind the proxy, and never trying twice."""
    with connect(faulty.url) as client:
        yield client


@pytest.fixture
def direct(server: str) -> Iterator[Client]:
    with connect(server) as client:
        yield client


def connect(url: str) -> Client:
    return cast("Any", redis.Redis).from_url(url, decode_responses=True, retry=None, socket_timeout=5)


def test_without_a_fault_everything_is_passed_on(client: Client, faulty: FaultyServer) -> None:
    """Replies of every shape, and of several packets."""
    large = "x" * 300_000
    assert client.set("text", large)
    assert client.get("text") == large
    assert client.get("missing") is None
    assert client.lpush("list", *range(2_000)) == 2_000
    assert len(client.lrange("list", 0, -1)) == 2_000
    assert client.pipeline().incr("n").incr("n").execute() == [1, 2]
    with pytest.raises(redis.exceptions.ResponseError):
        client.incr("text")
    assert faulty.replies_lost == 0


def test_the_command_runs_and_its_reply_is_lost(client: Client, direct: Client, faulty: FaultyServer) -> None:
    """protocol §1: what redis-py answers by sending it again."""
    client.ping()
    faulty.lose_reply("INCR")
    with pytest.raises(redis.exceptions.ConnectionError):
        client.incr("n")
    assert direct.get("n") == "1"
    assert faulty.replies_lost == 1


def test_a_fault_happens_as_often_as_asked_for(client: Client, direct: Client, faulty: FaultyServer) -> None:
    """Then the server is whole again."""
    faulty.lose_reply("INCR", times=2)
    for _ in range(2):
        with pytest.raises(redis.exceptions.ConnectionError):
            client.incr("n")
    assert client.incr("n") == 3
    assert faulty.replies_lost == 2


def test_a_client_that_tries_again_repeats_the_command(direct: Client, faulty: FaultyServer) -> None:
    """The very fault the moves are made for."""
    with cast("Any", redis.Redis).from_url(faulty.url, retry=Retry(NoBackoff(), 1)) as client:
        client.ping()
        faulty.lose_reply("INCR")
        client.incr("n")
    assert direct.get("n") == "2"


def test_other_commands_are_not_harmed(client: Client, faulty: FaultyServer) -> None:
    """Only what matches."""
    faulty.lose_reply("the needle")
    assert client.set("a", "hay")
    assert client.get("a") == "hay"
    with pytest.raises(redis.exceptions.ConnectionError):
        client.set("a", "the needle")


def test_a_fault_can_be_called_off(client: Client, faulty: FaultyServer) -> None:
    """For tests that end before it happened."""
    faulty.lose_reply("INCR")
    faulty.heal()
    assert client.incr("n") == 1


def test_in_a_pipeline_the_replies_before_it_arrive(client: Client, direct: Client, faulty: FaultyServer) -> None:
    """Each reply belongs to its own command; those behind the lost one go with the connection."""
    faulty.lose_reply("second")
    with pytest.raises(redis.exceptions.ConnectionError):
        client.pipeline(transaction=False).set("a", "first").set("b", "second").execute()
    assert direct.mget("a", "b") == ["first", "second"]
    assert faulty.replies_lost == 1


def test_a_script_is_matched_by_its_sha(client: Client, faulty: FaultyServer) -> None:
    """Commands name a script by its SHA."""
    script = scripts.BEAT
    client.script_load(script.source)
    faulty.lose_reply(script)
    with pytest.raises(redis.exceptions.ConnectionError):
        client.evalsha(script.sha, 4, "p", "d", "f", "c", "me", "6000")


def test_a_script_the_server_does_not_know_is_lost_when_it_runs(
    client: Client, direct: Client, faulty: FaultyServer
) -> None:
    """NOSCRIPT means that nothing ran: the answer is passed on, and the fault waits for the script in full."""
    script = scripts.BEAT
    direct.script_flush()
    faulty.lose_reply(script)
    arguments = (4, "p", "d", "f", "c", "me", "6000")
    with pytest.raises(redis.exceptions.NoScriptError):
        client.evalsha(script.sha, *arguments)
    with pytest.raises(redis.exceptions.ConnectionError):
        client.eval(script.source, *arguments)
    assert direct.zscore("p", "me")


def test_a_cut_ends_every_connection_and_accepts_new_ones(client: Client, faulty: FaultyServer) -> None:
    """A blip of the network."""
    address = ("127.0.0.1", urlsplit(faulty.url).port)
    with closing(socket.create_connection(address, timeout=5)) as connection:
        connection.sendall(b"*1\r\n$4\r\nPING\r\n")
        assert connection.recv(64) == b"+PONG\r\n"
        faulty.cut()
        assert connection.recv(64) == b""
    assert client.ping()


def test_a_server_that_refuses_closes_old_connections_and_new_ones(client: Client, faulty: FaultyServer) -> None:
    """Until it is healed."""
    assert client.ping()
    refuse(faulty)
    for _ in range(3):
        with pytest.raises(redis.exceptions.ConnectionError):
            client.ping()
    faulty.heal()
    assert client.ping()


def test_a_connection_accepted_just_before_is_refused_too(server: str) -> None:
    """There is a moment between accepting a client and reaching the server."""

    class RefusingMeanwhile(FaultyServer):
        async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reached = await super()._connect()
            self._is_refusing = True
            return reached

    with (
        RefusingMeanwhile(server) as faulty,
        connect(faulty.url) as client,
        pytest.raises(redis.exceptions.ConnectionError),
    ):
        client.ping()


def test_what_is_stalled_arrives_once_it_flows_again(server: str, direct: Client, faulty: FaultyServer) -> None:
    """Nothing is closed, and nothing lost: the client merely waits."""
    with connect(faulty.url) as client:
        assert client.set("n", 1)
        faulty.stall()
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(client.incr, "n")
            with pytest.raises(TimeoutError):
                waiting.result(0.1)
            assert direct.get("n") == "1"
            faulty.heal()
            assert waiting.result(5) == 2


def test_a_frozen_server_answers_nothing_until_the_block_ends() -> None:
    with EmbeddedServer() as server, connect(server.url) as client, ThreadPoolExecutor() as pool:
        assert client.ping()
        with freeze_server(server):
            waiting = pool.submit(client.ping)
            with pytest.raises(TimeoutError):
                waiting.result(0.1)
        assert waiting.result(5)


def test_a_restarted_server_is_another_process_with_the_same_data() -> None:
    with EmbeddedServer() as server, connect(server.url) as client:
        assert client.set("n", 1)
        pid = server.pid
        restart_server(server)
        assert server.pid != pid
        assert client.get("n") == "1"


def test_messages_reach_a_subscriber(client: Client, direct: Client) -> None:
    """They answer no command."""
    pubsub = client.pubsub()
    pubsub.subscribe("channel")
    assert pubsub.get_message(timeout=5)["type"] == "subscribe"
    for number in range(3):
        direct.publish("channel", str(number))
    assert [pubsub.get_message(timeout=5)["data"] for _ in range(3)] == ["0", "1", "2"]
    pubsub.close()


def test_the_address_keeps_login_and_database() -> None:
    """So that it can stand for the server in a setting."""
    with FaultyServer("redis://me:secret@127.0.0.1:1/3") as faulty:
        assert faulty.url.startswith("redis://me:secret@127.0.0.1:")
        assert faulty.url.endswith("/3")


def test_a_server_on_a_socket_can_be_behind_it() -> None:
    """The bundled server has one."""
    with (
        EmbeddedServer(unix_socket=True) as server,
        FaultyServer(server.url) as faulty,
        connect(faulty.url) as client,
    ):
        assert client.ping()


def test_what_is_encrypted_is_refused() -> None:
    """P13: with what would do."""
    with pytest.raises(CallerError, match="rediss://: use redis:// or a Unix socket"):
        FaultyServer("rediss://127.0.0.1:6380/0")


def test_outside_its_block_it_has_no_address() -> None:
    """P13."""
    with pytest.raises(OperatorError, match="inside `with`"):
        _ = FaultyServer("redis://127.0.0.1:1/0").url


VALUES = [
    b"+OK\r\n",
    b"-ERR no\r\n",
    b":7\r\n",
    b"$-1\r\n",
    b"$0\r\n\r\n",
    b"$4\r\na\r\nb\r\n",
    b"*-1\r\n",
    b"*0\r\n",
    b"*2\r\n$1\r\na\r\n*1\r\n:1\r\n",
    b"%1\r\n+key\r\n:1\r\n",
    b"~1\r\n+a\r\n",
    b">2\r\n+message\r\n+text\r\n",
    b"|1\r\n+ttl\r\n:3\r\n$1\r\na\r\n",
    b"_\r\n",
    b",1.5\r\n",
    b"#t\r\n",
    b"=5\r\ntxt:a\r\n",
    b"PING\r\n",
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_value_ends_where_the_next_begins(value: bytes) -> None:
    """RESP 2 and 3."""
    assert value_end(value + b"+NEXT\r\n", 0) == len(value)


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_part_of_a_value_is_no_value(value: bytes) -> None:
    """Packets break anywhere."""
    assert all(value_end(value[:length], 0) is None for length in range(len(value)))
