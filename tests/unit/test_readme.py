"""The README says what is so: its code is the examples' code, its table is the settings'."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from broker_config import ENV_PREFIX, BrokerSettings

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["agents.py", "host.py"])
def test_the_readme_shows_the_example_as_it_is(name: str) -> None:
    """Step 1: a complete declaration and host, run by a test."""
    shown = re.search(rf"<!-- examples/{name} -->\n```python\n(.*?)```", README, re.DOTALL)
    assert shown is not None, f"README shows no examples/{name}"
    code = (ROOT / "examples" / name).read_text(encoding="utf-8")
    # The example's own docstring and the annotations import are left out of the README.
    _, _, body = code.partition("from __future__ import annotations\n\n")
    assert shown.group(1).strip() == body.strip()


def test_the_configuration_table_names_every_setting() -> None:
    """Step 1: the configuration table of the README."""
    listed = set(re.findall(rf"`{ENV_PREFIX}([A-Z_]+)`", README))
    assert {name.upper() for name in BrokerSettings.model_fields} <= listed


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(tests/[a-z0-9_/.]+)`", README))))
def test_what_the_readme_calls_proof_exists(path: str) -> None:
    """The promises table points at real tests."""
    assert (ROOT / path).exists()
