"""Celery's consumer, kept alive through a restart of the broker.

celery 5.7.0 closes a lost connection right after dismantling it. Closing it closes its default channel, kombu's Redis
channel then tries to give its unacknowledged messages back through the client it no longer has, and the
AttributeError ends the worker (`facts-celery` §6). Earlier versions do not close it and need nothing from here.
"""

from __future__ import annotations

from typing import Any

import celery  # pyright: ignore[reportMissingTypeStubs]
from celery.worker.consumer import Consumer  # pyright: ignore[reportMissingTypeStubs]
from packaging.version import Version

FIRST_VERSION_THAT_NEEDS_IT = Version("5.7.0")


class RestartProofConsumer(Consumer):
    """Hides the default channel from the close. It stays usable for the late acknowledgements of running tasks."""

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        connection: Any = self.connection
        if connection is not None:
            connection._default_channel = None
        super().on_connection_error_after_connected(exc)  # pyright: ignore[reportUnknownMemberType]  # untyped


def consumer_path(celery_version: str = celery.__version__) -> str:
    """The value for the setting `worker_consumer`."""
    if Version(celery_version) >= FIRST_VERSION_THAT_NEEDS_IT:
        return f"{__name__}:{RestartProofConsumer.__name__}"
    return "celery.worker.consumer:Consumer"
