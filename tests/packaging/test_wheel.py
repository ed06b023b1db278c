"""The wheel holds all that runs and nothing else, and works where the source tree is out of reach.

Built and installed without a network; what is installed runs in an interpreter that reads no `.pth` file, so that the
editable installation of the tests cannot stand in for it. What the wheel depends on is `test_lock`'s.
"""

from __future__ import annotations

import ast
import configparser
import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Mapping
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import subagent_tasks
from subagent_tasks import providers, testing

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGES = ("broker_config", "subagent_tasks")
DIST_INFO = f"subagent_tasks-{PROJECT['version']}.dist-info"
BUILD_SECONDS = 20


def run(*command: str, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    """What a command of this interpreter printed; its error output is the failure's message."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
    )
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by the installed hatchling in this environment: no isolation, so nothing is fetched."""
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder), cwd=ROOT)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def contents(wheel: Path) -> dict[str, str]:
    """The files in the wheel, by their path there."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed into it, and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    options = ("--no-deps", "--no-index", "--no-compile", "--quiet", "--disable-pip-version-check")
    run("-m", "pip", "install", *options, "--target", str(target), str(wheel), cwd=target)
    return target


def run_installed(installed: Path, *arguments: str, cwd: Path) -> str:
    """Run the interpreter with the installed wheel and its dependencies alone."""
    dependencies = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    search = os.pathsep.join([str(installed), *dependencies])
    # -S: no `.pth` file is read, the one that leads to this source tree among them.
    return run("-S", *arguments, cwd=cwd, env={"PYTHONPATH": search, "PYTHONSAFEPATH": "1", "PYTHONWARNINGS": "ignore"})


# ------------------------------------------------------------------ what is in it


def test_every_file_of_the_packages_is_in_the_wheel(contents: dict[str, str]) -> None:
    """design §9: modules, scripts, the server's configuration and typing markers alike."""
    expected = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in contents if not name.startswith(DIST_INFO)} == expected


@pytest.mark.parametrize(
    "name",
    [
        "broker_config/redis.conf",
        "broker_config/users.acl",
        "broker_config/py.typed",
        "subagent_tasks/py.typed",
        *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "subagent_tasks/protocol/lua").glob("*.lua"))),
    ],
)
def test_what_is_no_module_is_in_the_wheel(contents: dict[str, str], name: str) -> None:
    """design §9: what the code reads at run time, and what type checkers look for, by name."""
    assert contents[name] == (ROOT / name).read_text(encoding="utf-8")


def test_nothing_else_is_in_the_wheel(contents: dict[str, str]) -> None:
    """No tests, examples, benchmarks or caches land in a user's site-packages."""
    assert {name.split("/")[0] for name in contents} == {*PACKAGES, DIST_INFO}


def test_the_wheel_has_the_command(contents: dict[str, str]) -> None:
    """design §4, command line."""
    entry_points = configparser.ConfigParser()
    entry_points.read_string(contents[f"{DIST_INFO}/entry_points.txt"])
    assert dict(entry_points["console_scripts"]) == {"subagent-tasks": "subagent_tasks.cli:main"}


def test_the_wheel_carries_its_licence(contents: dict[str, str]) -> None:
    """The licence asks to be kept with every copy."""
    assert contents[f"{DIST_INFO}/licenses/LICENSE"] == (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_the_metadata_asks_for_what_the_project_declares(contents: dict[str, str]) -> None:
    """design §10: a user's `pip install` brings what is declared, extras included."""
    metadata = Parser().parsestr(contents[f"{DIST_INFO}/METADATA"])
    asked = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    assert {requirement.name for requirement in asked if requirement.marker is None} == {
        Requirement(line).name for line in PROJECT["dependencies"]
    }
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    assert (metadata["Name"], metadata["Version"], metadata["License-Expression"]) == (
        PROJECT["name"],
        PROJECT["version"],
        PROJECT["license"],
    )


# ------------------------------------------------------------------ that it works

LOADS_EVERYTHING = """
import importlib, pkgutil, sys
import broker_config, subagent_tasks
from subagent_tasks.protocol import scripts

for package in (broker_config, subagent_tasks):
    print("from", package.__file__)
for module in pkgutil.walk_packages(subagent_tasks.__path__, "subagent_tasks."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for script in scripts.ALL:
    assert "redis.call" in script.source, script.name
for file in (broker_config.CONFIG_FILE, broker_config.ACL_FILE):
    assert file.read_text(encoding="utf-8"), file
print("scripts", len(scripts.ALL))
"""


def test_the_installed_wheel_imports_and_loads_every_script(installed: Path, tmp_path: Path) -> None:
    """Nothing that runs is left behind in the source tree."""
    lines = run_installed(installed, "-c", LOADS_EVERYTHING, cwd=tmp_path).splitlines()
    assert lines[:-1] == [f"from {installed / package / '__init__.py'}" for package in PACKAGES]
    lua = {path.stem for path in (installed / "subagent_tasks/protocol/lua").glob("*.lua")}
    assert lines[-1] == f"scripts {sum(not name.startswith('_') for name in lua)}"


def test_the_installed_command_line_answers(installed: Path, tmp_path: Path) -> None:
    """design §4: `python -m subagent_tasks`, for where the script is not on the path."""
    shown = run_installed(installed, "-m", "subagent_tasks", "--help", cwd=tmp_path)
    assert shown.startswith("Usage: subagent-tasks ")
    assert "worker" in shown


def test_the_installed_script_tells_the_version(installed: Path, tmp_path: Path) -> None:
    """design §4: the entry point runs, and finds the metadata of its own installation."""
    shown = run_installed(installed, str(installed / "bin/subagent-tasks"), "--version", cwd=tmp_path)
    assert shown.split()[-1] == PROJECT["version"]


# ------------------------------------------------------------------ its public surface


def test_the_type_checked_file_names_all_that_is_exported() -> None:
    """style, Tests: `tests/public_api.py` is the whole public surface; pyright sees to the other direction."""
    tree = ast.parse((ROOT / "tests/public_api.py").read_text(encoding="utf-8"))
    named = {
        (node.module, alias.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    exported = {(module.__name__, name) for module in (subagent_tasks, providers, testing) for name in module.__all__}
    assert exported - named == set()
