"""The Celery message of an activation, as the text that stands in the Redis list of its queue.

Built by hand because the script that queues a run pushes it in the same atomic move (protocol §1). It is Celery's
message protocol 2 in kombu's Redis envelope; a test runs one through a real worker. It carries ids, never a prompt.
"""

from __future__ import annotations

import json

HIDDEN = "-"  # stands for the arguments in events, logs and inspect


def activation_message(*, task: str, task_id: str, run_id: str, queue: str) -> str:
    """The message that makes a worker of `queue` call the task named `task` with `run_id` and `queue`.

    `task_id` is the run id for the first message of a run and an id of its own for later ones (design §3).
    Push it with LPUSH on the list named `queue`, which is what kombu uses for priority 0.
    """
    body = [[run_id, queue], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]
    headers = {
        "lang": "py",
        "task": task,
        "id": task_id,
        "root_id": task_id,
        "parent_id": None,
        "group": None,
        "argsrepr": HIDDEN,
        "kwargsrepr": HIDDEN,
        "origin": "subagent-tasks",
        "retries": 0,
        "timelimit": [None, None],
        "eta": None,
        "expires": None,
        "ignore_result": True,
    }
    properties = {
        "correlation_id": task_id,
        "delivery_mode": 2,
        # Where kombu puts the message back if a worker loses its connection before it acknowledged.
        "delivery_info": {"exchange": "", "routing_key": queue},
        "priority": 0,
        "delivery_tag": task_id,
    }
    # No `body_encoding`: the body is plain text, not base64.
    return _json(
        {
            "body": _json(body),
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": headers,
            "properties": properties,
        }
    )


def task_of(text: str) -> str:
    """The task a message in a queue's list calls; what is no message of Celery's calls `?`."""
    try:
        return str(json.loads(text)["headers"]["task"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "?"


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
