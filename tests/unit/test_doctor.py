"""The doctor's checks: facts in, findings out. Every finding that is bad says what to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from broker_config import BrokerSettings
from subagent_tasks.doctor import (
    Finding,
    check_any_worker,
    check_clock,
    check_eviction,
    check_persistence,
    check_timeouts,
    check_topology,
    check_version,
    check_workers,
)
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


def test_without_an_app_any_living_worker_will_do() -> None:
    """The queues are not known then."""
    assert check_any_worker(["worker-1-a"], namespace="shop").level == "ok"
    assert "shop" in check_any_worker([], namespace="shop").message
