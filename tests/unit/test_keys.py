"""Keys and channels: no two things share one, and all of a tree lie in one hash slot."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_values import ids

from subagent_tasks.protocol import keys as keys_module
from subagent_tasks.protocol.ids import checked_id, run_id_for_call
from subagent_tasks.protocol.keys import Keys, celery_result_key

# Ids a user may choose: parts of keys, separators and braces among them.
IDS = ["a", "b", "a:b", "a:", ":a", "session:a", "}:session:a", "{x}:a", "processes", "0", " ", "é"]
NAMESPACES = ["a", "ab", "a.b", "subagent-tasks"]


# What BrokerSettings takes for a namespace.
namespaces = st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True)


def all_names(namespace: str, ids: Iterable[str] = IDS) -> dict[tuple[str, str], str]:
    """Every key and channel of a namespace, by kind and id."""
    keys = Keys(namespace)
    names: dict[tuple[str, str], str] = {}
    for kind, member in inspect.getmembers(Keys):
        if kind.startswith("_") or kind in ("namespace", "is_ours"):
            continue
        if isinstance(member, property):
            names[kind, ""] = getattr(keys, kind)
        else:
            names |= {(kind, id_): getattr(keys, kind)(id_) for id_ in ids}
    return names


def test_no_two_things_share_a_key() -> None:
    """An id with a separator in it must not reach into another structure."""
    names = [name for namespace in NAMESPACES for name in all_names(namespace).values()]
    names += [celery_result_key(id_) for id_ in IDS]
    assert len(names) == len(set(names))


@given(namespaces, namespaces, ids, ids)
def test_no_two_ids_share_a_key(mine: str, other: str, one: str, another: str) -> None:
    """Whatever a caller chose for an id, an operator for a namespace; protocol §1: each namespace has one hash tag."""
    assert checked_id(one, name="id") == one
    names = [name for namespace in {mine, other} for name in all_names(namespace, {one, another}).values()]
    names += [celery_result_key(id_) for id_ in {one, another}]
    assert len(names) == len(set(names))
    for namespace in (mine, other):
        assert {hash_tag(name) for name in all_names(namespace, {one, another}).values()} == {namespace}


@given(st.tuples(namespaces, ids, ids), st.tuples(namespaces, ids, ids))
def test_no_two_calls_share_a_run(one: tuple[str, str, str], another: tuple[str, str, str]) -> None:
    """protocol §3: the id is a function of namespace, session and call."""
    named = {run_id_for_call(namespace=a, session_id=b, call_id=c) for a, b, c in (one, another)}
    assert len(named) == len({one, another})


@given(namespaces, ids, ids, ids)
def test_no_call_passes_for_another_sessions(namespace: str, one: str, two: str, three: str) -> None:
    """protocol §3: wherever ids have their colons."""
    first = run_id_for_call(namespace=namespace, session_id=one, call_id=f"{two}:{three}")
    assert first != run_id_for_call(namespace=namespace, session_id=f"{one}:{two}", call_id=three)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_every_key_has_the_hash_tag_of_its_namespace(namespace: str) -> None:
    """protocol §1: all keys of a namespace share the tag, whatever braces an id holds."""
    tags = {match[1] for name in all_names(namespace).values() if (match := re.search(r"\{([^}]*)\}", name))}
    assert tags == {namespace}


@pytest.mark.parametrize(("mine", "other"), list(itertools.permutations(NAMESPACES, 2)))
def test_a_namespace_does_not_take_anothers_keys_for_its_own(mine: str, other: str) -> None:
    """Two deployments share a server."""
    assert not [name for name in all_names(other).values() if Keys(mine).is_ours(name)]


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_a_namespace_knows_its_own_keys(namespace: str) -> None:
    """What the leak check relies on."""
    assert all(Keys(namespace).is_ours(name) for name in all_names(namespace).values())


def test_the_table_of_kinds_is_complete() -> None:
    """One module knows every key, its type and its lifetime (design §8)."""
    table = re.findall(r"^    (\w+) +(?:hash|stream|zset|set|string) ", keys_module.__doc__ or "", re.MULTILINE)
    kinds = {kind for kind, _ in all_names("a") if not kind.endswith("_channel")}
    assert set(table) == kinds


def test_a_result_is_where_celery_looks_for_it() -> None:
    """protocol §1: one of the two named exceptions."""
    assert celery_result_key("7f") == "celery-task-meta-7f"


def hash_tag(key: str) -> str:
    """What Redis hashes: between the first brace and the next one that closes, or all of it."""
    _, opened, rest = key.partition("{")
    tag, closed, _ = rest.partition("}")
    return tag if opened and closed and tag else key
