"""What the worker of `waiting` is pointed at: `celery -A benchmarks.spawn_agents worker`."""

from __future__ import annotations

from benchmarks.spawn import declare

app = declare()
celery = app.celery
