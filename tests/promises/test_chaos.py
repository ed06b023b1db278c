"""Everything at once: workers killed, links cut, replies lost, the server frozen, and every promise checked at the end.

`make chaos SECONDS=600 SEED=1` is the same for longer; what it checks is listed in `tests/chaos/checks.py`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[1] / "chaos"


@pytest.mark.timeout(240)
def test_every_promise_survives_a_short_chaos() -> None:
    """Design §5; a failure names the runs and keeps the logs."""
    done = subprocess.run(
        [sys.executable, str(CHAOS), "--seconds", "12", "--seed", "11"],
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
