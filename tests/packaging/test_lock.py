"""`requirements.lock` pins everything the project asks for, and says nothing about where packages come from.

The Makefile and the Dockerfile install it with `--no-deps --require-hashes`: what it leaves out is missing, what it
does not hash is refused.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

_PIN = re.compile(r"(?P<name>[a-z0-9]+(?:-[a-z0-9]+)*)==(?P<version>[^\s;]+)(?: ; (?P<marker>[^\\]+))? \\")
_HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}(?: \\)?")
_COMMENT = re.compile(r"    # (?:via(?: \S.*)?|  \S.*)")


@cache
def pins() -> dict[str, str]:
    """The pinned packages and their versions. Some are for other platforms."""
    return {pin["name"]: pin["version"] for pin in map(_PIN.fullmatch, LOCK.splitlines()) if pin}


def declared() -> list[Requirement]:
    """All that pyproject.toml asks for: to run, in every extra, to develop, and to build without isolation."""
    project = PYPROJECT["project"]
    groups = (*project["optional-dependencies"].values(), *PYPROJECT["dependency-groups"].values())
    lines = [
        *project["dependencies"],
        *PYPROJECT["build-system"]["requires"],
        *(line for group in groups for line in group),
    ]
    return [Requirement(line) for line in dict.fromkeys(lines)]


# ------------------------------------------------------------------ what stands in it


def test_every_line_is_a_pin_a_hash_or_a_comment() -> None:
    """No option, URL or path: where packages come from is for each machine to say."""
    kinds = (_PIN, _HASH, _COMMENT)
    assert [line for line in LOCK.splitlines() if not any(kind.fullmatch(line) for kind in kinds)] == []


@pytest.mark.parametrize("trace", ["index-url", "find-links", "trusted-host", " @ ", "/"])
def test_no_word_says_where_packages_come_from(trace: str) -> None:
    """Comments included."""
    assert trace not in LOCK


def test_every_pin_has_a_hash() -> None:
    """One package without is refused with all the others."""
    lines = LOCK.splitlines()
    bare = [
        line
        for line, following in zip(lines, [*lines[1:], ""], strict=True)
        if _PIN.fullmatch(line) and not _HASH.fullmatch(following)
    ]
    assert bare == []


def test_no_package_is_pinned_twice() -> None:
    """Two versions for two platforms would need to be told apart here."""
    names = [pin["name"] for pin in map(_PIN.fullmatch, LOCK.splitlines()) if pin]
    assert len(names) == len(set(names)) > 0


# ------------------------------------------------------------------ what it must hold


@pytest.mark.parametrize("requirement", declared(), ids=str)
def test_what_the_project_asks_for_is_pinned_to_a_version_that_it_accepts(requirement: Requirement) -> None:
    """pyproject.toml: dependencies, extras, groups and the build backend."""
    version = pins().get(canonicalize_name(requirement.name))
    assert version is not None, f"{requirement.name} is not pinned: make lock"
    assert requirement.specifier.contains(version, prereleases=True), f"{version} is pinned: make lock"


def test_what_the_pinned_packages_ask_for_is_pinned() -> None:
    """Installed without their dependencies, they would fail at their first import. Followed from what is declared."""
    missing = {f"{owner} needs {name}" for owner, name in needed() if name not in pins()}
    assert missing == set()


def needed() -> Iterator[tuple[str, str]]:
    """Who needs which package on this platform, through every extra that is asked for."""
    waiting = declared()
    done: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in done:
                continue
            done.add((name, extra))
            for further in requirements_of(name):
                if applies(further.marker, extra):
                    yield name, canonicalize_name(further.name)
                    waiting.append(further)


def requirements_of(name: str) -> list[Requirement]:
    """What an installed package asks for, unless pyproject.toml overrules it.

    Nothing for one that is not installed: only an environment made from the lock, as CI's is, holds them all.
    """
    overruled = {entry["name"]: entry["requires-dist"] for entry in PYPROJECT["tool"]["uv"]["dependency-metadata"]}
    try:
        return [Requirement(line) for line in overruled.get(name, metadata.requires(name) or ())]
    except metadata.PackageNotFoundError:
        return []


def applies(marker: Marker | None, extra: str) -> bool:
    return marker is None or marker.evaluate({"extra": extra})
