"""Checks of the declaration and of the settings: what can be seen without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

from broker_config import BrokerSettings, celery_settings
from subagent_tasks.app import SubagentApp
from subagent_tasks.doctor.finding import Finding
from subagent_tasks.errors import ConfigurationError, SubagentError
from subagent_tasks.protocol.interfaces import Provider

PREPARE_SECONDS = 30.0
"""How long a provider may take to prepare; the import of a model's client takes one or two."""

TASTE = frozenset(
    (
        "enable_utc",
        "task_send_sent_event",
        "worker_hijack_root_logger",
        "worker_redirect_stdouts",
        "worker_send_task_events",
    )
)
"""Settings of Celery's that a deployment may choose otherwise: no promise but P14's events and logs hangs on them."""


def check_app(app: SubagentApp) -> Finding:
    """Whether the declaration is whole, which shows only when it is used."""
    try:
        _ = app.celery
    except SubagentError as error:
        return Finding("app", "failed", str(error), "correct the declaration and ask again")
    return Finding("app", "ok", f"declares the providers {', '.join(app.providers) or '(none)'}")


async def check_provider(provider: Provider, *, timeout_seconds: float = PREPARE_SECONDS) -> Finding:
    """Whether a child could be started here; what it needs may be set where the workers run, and only there."""
    check = f"provider {provider.name}"
    try:
        async with asyncio.timeout(timeout_seconds):
            await provider.prepare()
    except ConfigurationError as error:
        return Finding(check, "failed", str(error), "correct the declaration and ask again")
    except SubagentError as error:
        reason = str(error)
    except TimeoutError:
        reason = f"it was not prepared within {timeout_seconds:g} s"
    except Exception as error:
        # Whatever a provider of the deployment's own raises; its text may quote anything.
        reason = f"its prepare raised {type(error).__name__}"
    else:
        return Finding(check, "ok", "can be prepared in this environment")
    return Finding(
        check,
        "warning",
        f"it cannot run a child in this environment: {reason}",
        "see that the environment of the workers has what is missing; ask there again: subagent-tasks doctor APP",
    )


def check_timeouts(settings: BrokerSettings) -> Finding:
    """The settings could be read, so their relations hold (`BrokerSettings`); here they are for the eye."""
    return Finding(
        "timeouts",
        "ok",
        f"in order: model request {settings.model_request_timeout_seconds:g} s <= run limit "
        f"{settings.run_limit_seconds:g} s < visibility {settings.visibility_timeout_seconds:g} s <= retention "
        f"{settings.retention_seconds:g} s; a dead worker is found within {2 * settings.lease_seconds:g} s",
    )


def check_celery(conf: Mapping[str, Any], settings: BrokerSettings) -> Finding:
    """Whether Celery still has the settings the promises hang on; an app may have changed `app.celery.conf` since."""
    changed: list[str] = []
    for name, wanted in celery_settings(settings).items():
        if name in TASTE:
            continue
        value = conf.get(name)
        if isinstance(wanted, Mapping):
            # Further options of a transport's are the deployment's.
            options = cast("Mapping[str, Any]", value or {})
            parts = cast("Mapping[str, Any]", wanted).items()
            changed += [
                f"{name}[{key!r}] is {options.get(key)!r}, not {part!r}"
                for key, part in parts
                if options.get(key) != part
            ]
        elif value != wanted and not name.endswith(("_url", "_backend")):
            changed.append(f"{name} is {value!r}, not {wanted!r}")
    if changed:
        return Finding("celery", "failed", "; ".join(changed), "leave these settings of Celery's as the app makes them")
    return Finding("celery", "ok", "has the settings that the promises need, socket timeouts among them")
