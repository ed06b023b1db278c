"""What our workers are pointed at: `celery -A benchmarks.agents worker`."""

from __future__ import annotations

from benchmarks.noop import declare

app = declare()
celery = app.celery
