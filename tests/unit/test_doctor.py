"""The doctor's checks: facts in, findings out. Every finding that is bad says what to do."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any, cast

import pytest

from broker_config import BrokerSettings
from subagent_tasks import SubagentApp
from subagent_tasks.doctor import Finding, examine
from subagent_tasks.doctor.declaration import check_app, check_celery, check_provider, check_timeouts
from subagent_tasks.doctor.server import check_clock, check_eviction, check_persistence, check_topology, check_version
from subagent_tasks.doctor.work import check_unacknowledged
from subagent_tasks.doctor.workers import check_any_worker, check_heartbeats, check_tasks, check_workers
from subagent_tasks.errors import ConfigurationError, OperatorError
from subagent_tasks.protocol.interfaces import Drive, Provider, Run
from subagent_tasks.protocol.models import ChildRequest
from subagent_tasks.providers import SpawnProvider
from subagent_tasks.queue.inspection import Unacknowledged
from subagent_tasks.queue.publisher import ACTIVATE
from subagent_tasks.store.server import ServerFacts, facts_of

INFO: dict[str, Any] = {
    "redis_version": "7.4.1",
    "redis_mode": "standalone",
    "role": "master",
    "cluster_enabled": 0,
    "maxmemory_policy": "noeviction",
    "aof_enabled": 1,
    "aof_last_write_status": "ok",
}
SOUND = facts_of(INFO, time_ms=1_000_000)
QUEUE = "shop.subagents.spawn"


def test_a_sound_server_passes_every_check() -> None:
    """protocol §1: one primary that evicts nothing and writes everything down."""
    checks = [check_version, check_topology, check_eviction, check_persistence]
    assert {check(SOUND).level for check in checks} == {"ok"}
    assert check_clock(SOUND, here_ms=1_000_900).level == "ok"


@pytest.mark.parametrize(
    ("facts", "check", "names"),
    [
        (replace(SOUND, redis_version=(6, 0, 16), version="6.0.16"), check_version, "6.0.16"),
        (replace(SOUND, redis_version=()), check_version, "too old"),
        (replace(SOUND, mode="cluster"), check_topology, "Redis Cluster is not supported"),
        (replace(SOUND, mode="sentinel"), check_topology, "Sentinel"),
        (replace(SOUND, role="slave"), check_topology, "cannot be written to"),
        (replace(SOUND, eviction_policy="allkeys-lru"), check_eviction, "allkeys-lru"),
        (replace(SOUND, append_only=False), check_persistence, "append-only file is off"),
        (replace(SOUND, last_write_failed=True), check_persistence, "last write"),
    ],
)
def test_what_breaks_a_promise_fails_with_its_fix(facts: ServerFacts, check: Any, names: str) -> None:
    """P1, protocol §1: each names what it found and what to do."""
    finding: Finding = check(facts)
    assert finding.level == "failed"
    assert names in finding.message
    assert finding.fix


@pytest.mark.parametrize("check", [check_eviction, check_persistence])
def test_what_a_server_does_not_say_is_a_warning(check: Any) -> None:
    """A managed server may hide fields of INFO; that proves nothing."""
    assert check(replace(SOUND, eviction_policy=None, append_only=None)).level == "warning"


@pytest.mark.parametrize("here_ms", [1_000_000 - 60_000, 1_000_000 + 60_000])
def test_a_clock_that_is_off_is_a_warning(here_ms: int) -> None:
    """protocol §4: leases go by Redis time alone, so it breaks no promise."""
    finding = check_clock(SOUND, here_ms=here_ms)
    assert finding.level == "warning"
    assert "60.0 s" in finding.message


def test_a_valkey_is_named_by_its_own_version() -> None:
    """It reports the Redis it stands for as well."""
    facts = facts_of({**INFO, "redis_version": "7.2.4", "valkey_version": "9.1.2"}, time_ms=0)
    assert (facts.name, facts.version, check_version(facts).level) == ("Valkey", "9.1.2", "ok")


def test_the_timeouts_are_shown_in_their_order() -> None:
    """field fault 2: settings whose relations are broken do not load at all."""
    finding = check_timeouts(BrokerSettings(run_limit_seconds=1800))
    assert "run limit 1800 s < visibility 7200 s" in finding.message


def test_each_declared_queue_needs_a_worker() -> None:
    """design §8: a worker of other providers does not help."""
    consumed = {"w1@host": frozenset({QUEUE}), "w2@host": frozenset({"shop.subagents.acp"})}
    served, missing = check_workers([QUEUE, "shop.subagents.fork"], consumed, living=2)
    assert (served.level, "w1@host" in served.message, "w2@host" in served.message) == ("ok", True, False)
    assert missing.level == "failed"
    assert "--queues fork" in missing.fix
    assert "2 alive" in missing.message


def test_an_app_without_providers_fails() -> None:
    """Nothing could ever run."""
    assert [finding.level for finding in check_workers([], {}, living=0)] == ["failed"]


def test_a_tool_whose_provider_is_missing_is_the_apps_fault() -> None:
    """behaviour §2.5: nothing is wrong with the broker, and starting it would not help."""
    app = SubagentApp(BrokerSettings())
    app.add_delegation_tool(provider="spawn")
    finding = check_app(app)
    assert (finding.check, finding.level) == ("app", "failed")
    assert 'no subagent provider registered for "spawn"' in finding.message
    assert finding.fix == "correct the declaration and ask again"


async def test_a_declaration_is_checked_though_no_server_answers() -> None:
    """One look tells all that is wrong."""
    app = SubagentApp(BrokerSettings(broker_url="redis://127.0.0.1:9/0"))
    app.add_delegation_tool(provider="spawn")
    failed = [finding.check for finding in await examine(app.settings, app) if finding.level == "failed"]
    assert failed == ["app", "server"]


class Preparing(Provider):
    """Raises what it is given, or hangs."""

    name = "own"

    def __init__(self, error: Exception | None = None, *, hangs: bool = False) -> None:
        self._error, self._hangs = error, hangs

    async def prepare(self) -> None:
        if self._hangs:
            await asyncio.Event().wait()
        if self._error is not None:
            raise self._error

    async def start(self, request: ChildRequest, drive: Drive) -> Run:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("provider", "level", "names"),
    [
        (Preparing(), "ok", "can be prepared"),
        (Preparing(OperatorError("set KEY")), "warning", "cannot run a child in this environment: set KEY"),
        (Preparing(RuntimeError("secret")), "warning", "its prepare raised RuntimeError"),
        (Preparing(hangs=True), "warning", "was not prepared within 0.01 s"),
        (Preparing(ConfigurationError("no such model")), "failed", "no such model"),
    ],
)
async def test_a_provider_is_asked_whether_it_could_run_a_child(provider: Provider, level: str, names: str) -> None:
    """What the workers' environment may have is a warning; a declaration that fits nowhere has failed (P13, P14)."""
    finding = await check_provider(provider, timeout_seconds=0.01)
    assert (finding.check, finding.level) == ("provider own", level)
    assert names in finding.message
    assert "secret" not in finding.message


async def test_a_missing_api_key_is_found_before_the_first_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be set where the workers run, so it breaks nothing yet."""
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    finding = await check_provider(SpawnProvider(model="openai:gpt-5-mini", api_key_env="NO_SUCH_KEY"))
    assert (finding.check, finding.level) == ("provider spawn", "warning")
    assert "set NO_SUCH_KEY in the environment of the worker" in finding.message


def test_who_consumes_must_beat() -> None:
    """P6: a run is taken away from a worker without a heartbeat. Other queues are none of our business."""
    consumed = {name: frozenset({QUEUE}) for name in ("good@a", "bad@b")} | {"other@c": frozenset({"celery"})}
    (finding,) = check_heartbeats(
        [QUEUE], consumed, pids={"good@a": 11, "bad@b": 12, "other@c": 13}, beating=["worker-11-abc", "worker-1-def"]
    )
    assert (finding.check, finding.level) == ("heartbeats", "failed")
    assert "bad@b (process 12) consumes but does not beat" in finding.message
    assert "restart it" in finding.fix


def test_workers_of_one_process_id_are_counted() -> None:
    """In containers every worker may be process 1."""
    consumed = {name: frozenset({QUEUE}) for name in ("w@a", "w@b", "w@c")}
    pids = dict.fromkeys(consumed, 1)
    beating = ["worker-1-abc", "worker-1-def"]
    (finding,) = check_heartbeats([QUEUE], consumed, pids=pids, beating=beating)
    assert "1 of w@a, w@b, w@c (process 1) consumes but does not beat" in finding.message
    (finding,) = check_heartbeats([QUEUE], consumed, pids=pids, beating=[*beating, "worker-1-ghi"])
    assert finding.level == "ok"


def test_a_worker_that_does_not_say_its_process_id_is_a_warning() -> None:
    """It may be busy; that proves nothing."""
    (finding,) = check_heartbeats([QUEUE], {"w@a": frozenset({QUEUE})}, pids={}, beating=[])
    assert finding.level == "warning"
    assert "w@a" in finding.message


def test_without_an_app_any_living_worker_will_do() -> None:
    """The queues are not known then."""
    assert check_any_worker(["worker-1-a"], namespace="shop").level == "ok"
    assert "shop" in check_any_worker([], namespace="shop").message


def test_a_worker_of_another_app_on_our_queue_fails() -> None:
    """It throws away what it takes."""
    consumed = {"ours": frozenset({QUEUE}), "theirs": frozenset({QUEUE, "celery"}), "elsewhere": frozenset({"celery"})}
    tasks = {"ours": frozenset({ACTIVATE}), "theirs": frozenset({"mail.send"}), "elsewhere": frozenset({"mail.send"})}
    [finding] = check_tasks([QUEUE], consumed, tasks=tasks)
    assert finding.level == "failed"
    assert finding.message.startswith(f"theirs consumes {QUEUE} and does not know the task")


def test_the_app_s_own_celery_settings_pass() -> None:
    app = SubagentApp()
    assert check_celery(cast("Any", app.celery.conf), app.settings).level == "ok"


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"task_acks_late": True}, "task_acks_late is True, not False"),
        ({"redis_socket_timeout": None}, "redis_socket_timeout is None, not 5"),
        ({"broker_transport_options": {"visibility_timeout": 3}}, "broker_transport_options['socket_timeout'] is None"),
    ],
)
def test_a_changed_celery_setting_fails_by_its_name(change: dict[str, Any], names: str) -> None:
    """P2, P8: whoever overrides what a promise hangs on is told which."""
    app = SubagentApp()
    app.celery.conf.update(change)
    finding = check_celery(cast("Any", app.celery.conf), app.settings)
    assert finding.level == "failed"
    assert names in finding.message


@pytest.mark.parametrize(
    ("count", "age_seconds", "level"), [(None, 0, "ok"), (0, 0, "ok"), (3, 1, "ok"), (3, 3600, "warning")]
)
def test_a_message_that_is_held_for_long_is_a_warning(count: int | None, age_seconds: int, level: str) -> None:
    """A backlog in a hand that does not work on it."""
    found = None if count is None else Unacknowledged(count, time.time() - age_seconds)
    assert check_unacknowledged(found, BrokerSettings()).level == level
