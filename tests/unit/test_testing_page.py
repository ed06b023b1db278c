"""The tests shown in docs/testing.md are tests: they pass as they are printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from subagent_tasks.testing import ScriptedModel, fake_app, kit

PAGE = Path(__file__).resolve().parents[2] / "docs" / "testing.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def shown_tests() -> dict[str, Any]:
    tests: dict[str, Any] = {}
    for block in BLOCKS:
        if "async def test_" not in block:
            continue
        names: dict[str, Any] = {}
        exec(compile(block, str(PAGE), "exec"), names)
        tests |= {name: value for name, value in names.items() if name.startswith("test_")}
    return tests


SHOWN = shown_tests()


def test_the_page_shows_tests() -> None:
    assert len(SHOWN) == 3


async def test_a_run_that_is_left_is_named_with_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/testing.md: what is checked at the end says what it found."""
    monkeypatch.setattr(kit, "SETTLE_SECONDS", 0.05)
    left: list[str] = []

    async def leave_a_run() -> None:
        async with fake_app(ScriptedModel(), worker=False) as test:
            arguments = {"description": "d", "prompt": "p", "run_in_background": True}
            result: Any = (await test.session.call("subagent", arguments)).value
            left.append(f"{{{test.app.settings.namespace}}}:session:{result['jobId']} is queued")

    with pytest.raises(AssertionError) as caught:
        await leave_a_run()
    assert left[0] in str(caught.value)
    assert "check_leaks=False" in str(caught.value)


# A lost connection makes Celery announce a change of its next major version.
@pytest.mark.filterwarnings("ignore::celery.exceptions.CPendingDeprecationWarning")
@pytest.mark.parametrize("name", SHOWN)
async def test_a_shown_test_passes(name: str) -> None:
    """docs/testing.md"""
    await SHOWN[name]()
