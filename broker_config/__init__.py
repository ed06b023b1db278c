"""Everything that must be true of the broker for the promises to hold: settings, Celery's configuration, queue names,
the server's own configuration, and a bundled server. Imports nothing of `subagent_tasks`.
"""

from __future__ import annotations

from broker_config.celery_settings import celery_settings
from broker_config.embedded import ACL_FILE, CONFIG_FILE, EmbeddedServer, EmbeddedServerError
from broker_config.queues import kombu_queue, kombu_queues, queue_name
from broker_config.settings import ENV_PREFIX, BrokerSettings, SettingsError, load_settings, safe_url

__all__ = [
    "ACL_FILE",
    "CONFIG_FILE",
    "ENV_PREFIX",
    "BrokerSettings",
    "EmbeddedServer",
    "EmbeddedServerError",
    "SettingsError",
    "celery_settings",
    "kombu_queue",
    "kombu_queues",
    "load_settings",
    "queue_name",
    "safe_url",
]
