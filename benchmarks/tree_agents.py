"""What the worker of `trees` is pointed at: `celery -A benchmarks.tree_agents worker`."""

from __future__ import annotations

from benchmarks.trees import declare

app = declare()
celery = app.celery
