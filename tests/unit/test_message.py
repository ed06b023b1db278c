"""The hand-built Celery message: what Celery reads in it. The test that runs one is in `tests/faults/test_pool.py`."""

from __future__ import annotations

import json

from subagent_tasks.queue.message import HIDDEN, activation_message


def message(**changes: str) -> str:
    return activation_message(**{"task": "t", "task_id": "id-1", "run_id": "run-1", "queue": "q", **changes})


def test_every_id_celery_looks_at_is_the_task_id() -> None:
    """facts-core §A: `id = root_id = correlation_id = delivery_tag`."""
    parsed = json.loads(message())
    ids = {parsed["headers"]["id"], parsed["headers"]["root_id"]}
    ids |= {parsed["properties"]["correlation_id"], parsed["properties"]["delivery_tag"]}
    assert ids == {"id-1"}


def test_a_later_message_of_a_run_still_names_the_run_and_the_queue_it_came_through() -> None:
    """Design §3: later messages have ids of their own."""
    parsed = json.loads(message(task_id="id-2"))
    args, kwargs, _ = json.loads(parsed["body"])
    assert (parsed["headers"]["id"], args, kwargs) == ("id-2", ["run-1", "q"], {})


def test_the_body_is_plain_text() -> None:
    """Kombu decodes base64 only when the properties name it."""
    assert "body_encoding" not in json.loads(message())["properties"]


def test_arguments_are_hidden_from_events_and_logs() -> None:
    """P14."""
    headers = json.loads(message())["headers"]
    assert (headers["argsrepr"], headers["kwargsrepr"]) == (HIDDEN, HIDDEN)


def test_celery_stores_no_result_for_it() -> None:
    """Protocol §2: the scripts write the result."""
    assert json.loads(message())["headers"]["ignore_result"] is True


def test_an_unacknowledged_message_returns_to_its_own_queue() -> None:
    """Kombu restores to the routing key of the default exchange."""
    delivery = json.loads(message(queue="ns.subagents.spawn"))["properties"]["delivery_info"]
    assert delivery == {"exchange": "", "routing_key": "ns.subagents.spawn"}


def test_the_same_ids_give_the_same_bytes() -> None:
    """Protocol §1: a move repeated sends what it sent before."""
    assert message() == message()


def test_text_that_is_not_ascii_survives() -> None:
    """Ids come from callers."""
    args, _, _ = json.loads(json.loads(message(run_id="größe-✓"))["body"])
    assert args == ["größe-✓", "q"]
