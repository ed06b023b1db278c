"""`docs/coverage.md` and the tests agree on which scenario of behaviour §10 is tested where, in both directions.

A test names its scenarios in its docstring: `behaviour §10.21`, or `scenario 21`, `scenarios 23, 24`.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coverage.md"
LAST_SCENARIO = 193

_SECTION = re.compile(r"§10\.(\d+)")
_WORDS = re.compile(r"scenarios? (\d+(?:, \d+)*)")
_ROW = re.compile(r"^\| (\d+) \| (.+) \|$", re.MULTILINE)
_TEST_ID = re.compile(r"`(tests/[\w/.]+\.py::\w+)`")


@cache
def docstrings() -> dict[str, str]:
    """Every test function of the project, as file::name, with its docstring."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found[f"{path.relative_to(ROOT).as_posix()}::{node.name}"] = ast.get_docstring(node) or ""
    return found


def named_by(docstring: str) -> set[int]:
    """The scenarios that a docstring names."""
    listed = ", ".join(_WORDS.findall(docstring))
    return {int(number) for number in [*_SECTION.findall(docstring), *re.findall(r"\d+", listed)]}


@cache
def page() -> dict[int, set[str]]:
    """The table: scenario -> the tests in its row."""
    rows: defaultdict[int, set[str]] = defaultdict(set)
    for number, cell in _ROW.findall(PAGE.read_text(encoding="utf-8")):
        rows[int(number)] |= set(_TEST_ID.findall(cell))
    return dict(rows)


def test_every_scenario_named_by_a_test_is_in_the_page() -> None:
    """style: every requirement has an id and a test, enforced both ways; the message is what to add to which row."""
    missing = [
        f"{number}: `{test_id}`"
        for test_id, docstring in docstrings().items()
        for number in sorted(named_by(docstring))
        if test_id not in page().get(number, set())
    ]
    assert not missing, "add to docs/coverage.md: " + "; ".join(missing)


def test_every_test_in_the_page_exists_and_names_its_scenario() -> None:
    """style: a renamed or removed test leaves no claim behind."""
    stale = [
        f"{number}: `{test_id}`"
        for number, test_ids in page().items()
        for test_id in sorted(test_ids)
        if number not in named_by(docstrings().get(test_id, ""))
    ]
    assert not stale, "in docs/coverage.md, but not (or no longer) a test of that scenario: " + "; ".join(stale)


def test_every_row_is_a_scenario_with_a_test_in_order() -> None:
    """style: a row without a test would claim what nobody checks."""
    numbers = [int(number) for number, _ in _ROW.findall(PAGE.read_text(encoding="utf-8"))]
    assert numbers == sorted(set(numbers))
    assert all(1 <= number <= LAST_SCENARIO for number in numbers)
    assert all(page().values())


def test_both_ways_of_naming_a_scenario_are_read() -> None:
    """The page would be blind to the tests of one way otherwise."""
    assert named_by("behaviour §10.21: text") == {21}
    assert named_by("behaviour §2.7, §10.3 and §10.4") == {3, 4}
    assert named_by("behaviour §2.9, scenarios 23, 24, 26") == {23, 24, 26}
    assert named_by("behaviour §10, scenario 5; P13 says 7") == {5}
    assert named_by("behaviour §3.10") == set()
