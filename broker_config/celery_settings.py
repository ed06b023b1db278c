"""Celery's own settings, in Celery's own names, grouped by the promise each keeps (design §5).

Everything here must be true for the promises to hold; concurrency, pool and log format stay the operator's. Routes,
tasks and the worker's pool are in `subagent_tasks.queue`. Why the numbers are what they are: `settings.py`.
"""

from __future__ import annotations

import math
from typing import Final

from broker_config.settings import BrokerSettings

# kombu blocks this long in BRPOP before the server answers "nothing".
_BRPOP_SECONDS: Final = 1.0
_HEALTH_CHECK_SECONDS: Final = 25


def celery_settings(settings: BrokerSettings) -> dict[str, object]:
    """The configuration for `Celery.conf.update`. Durations are seconds."""
    timeout_seconds = settings.redis_timeout_seconds
    return {
        # Where.
        "broker_url": settings.celery_broker_url,
        "result_backend": settings.celery_result_url,
        "enable_utc": True,
        # The scripts push to the queue's list and write the result's key by their plain names.
        "result_backend_transport_options": {"global_keyprefix": ""},
        # P1, accepted is durable: what was accepted is in Redis, so a worker waits for the broker however long it is
        # away, at its start as later, and gives up nothing.
        "broker_connection_retry": True,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        # Without it an outage of more than ten seconds that covers a foreign task's end loses its result.
        "result_backend_always_retry": True,
        # One connection for all threads that run foreign tasks, instead of one each.
        "result_backend_thread_safe": True,
        # P2, one driver: the lease says who drives, never Celery. So the message is acknowledged before the task runs,
        # a lost process gives nothing back, and an outage cancels nothing. Celery 6 turns the last one round.
        "task_acks_late": False,
        "task_reject_on_worker_lost": False,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "broker_transport_options": _transport_options(settings),
        # P3, settles once: the settling script alone writes results. With any of these Celery would write over it.
        "task_ignore_result": True,
        "task_store_errors_even_if_ignored": False,
        "task_track_started": False,
        # Result and record expire together. Whole seconds, rounded up: Celery takes 0 for "never".
        "result_expires": math.ceil(settings.retention_seconds),
        # The driver keeps the run's limit and settles it; a limit of Celery's would end the task without settling.
        "task_time_limit": None,
        "task_soft_time_limit": None,
        # P6, the dead are found: a message in a busy worker's hand is one that no idle worker can take. On Redis Celery
        # can fetch only what it can start; with other brokers it warns and fetches one more per slot.
        "worker_prefetch_multiplier": 1,
        "worker_disable_prefetch": settings.broker_is_redis or settings.celery_broker_url.startswith("sentinel:"),
        # P8, no call outlives its stated wait: every socket has a timeout, and a peer that vanished is noticed.
        "broker_connection_timeout": timeout_seconds,
        "redis_socket_timeout": timeout_seconds,
        "redis_socket_connect_timeout": timeout_seconds,
        # A Unix socket has no keepalive; redis-py refuses the option.
        "redis_socket_keepalive": not settings.celery_result_url.startswith("redis+socket:"),
        "redis_backend_health_check_interval": _HEALTH_CHECK_SECONDS,
        # P13, bad input is refused: a misspelt `--queues` ends the worker at its start instead of leaving it idle on a
        # queue that nobody writes to.
        "task_create_missing_queues": False,
        # P13, P14: nothing but JSON is read, so a message can run no code of its sender's.
        "task_serializer": "json",
        "result_serializer": "json",
        "accept_content": ["json"],
        # P14, nothing private leaks: no events unless an operator asks a worker for them, no arguments in results,
        # and what a tool prints is not turned into log lines.
        "task_send_sent_event": False,
        "worker_send_task_events": False,
        "result_extended": False,
        "worker_redirect_stdouts": False,
        # The application's logging is the application's: its redaction must not be swept away by Celery's handlers.
        "worker_hijack_root_logger": False,
    }


def _transport_options(settings: BrokerSettings) -> dict[str, object]:
    """Options of kombu's transport. Each transport reads its own, and some fail on what they do not know."""
    scheme = settings.celery_broker_url.partition("://")[0].lower()
    if scheme == "sqs":
        return {"visibility_timeout": math.ceil(settings.visibility_timeout_seconds)}
    if not settings.broker_is_redis and scheme != "sentinel":
        return {}
    # Below the BRPOP wait, every idle wait would look like a dead server.
    timeout_seconds = max(settings.redis_timeout_seconds, 2 * _BRPOP_SECONDS)
    return {
        # A backstop for what was fetched and never acknowledged, no test of life: it restarts running tasks.
        "visibility_timeout": settings.visibility_timeout_seconds,
        # kombu's list of unacknowledged messages costs two transactions per message, and our runs need none: the
        # script that queued a run remembers it, and the sweeper sends a lost message again, long before the visibility
        # timeout would. It sees an empty queue only where the broker holds the state.
        "ack_emulation": not settings.broker_holds_state,
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": timeout_seconds,
        "socket_keepalive": True,
        "health_check_interval": _HEALTH_CHECK_SECONDS,
        # A lost reply to LPUSH is not answered by a second LPUSH.
        "retry_on_timeout": False,
        # One list per queue. Several would be BRPOPped in order, and depth would have as many places.
        "priority_steps": [0],
        # As for results: the scripts push to the list by its plain name.
        "global_keyprefix": "",
    }
