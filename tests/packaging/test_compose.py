"""`docker-compose.yml` and `deploy/Dockerfile` agree with the package, as far as can be told without an engine.

Everything they name must exist and be ours: files, users, settings, the command line. That the containers then run is
not decided here.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
from packaging.specifiers import SpecifierSet

from broker_config import ACL_FILE, CONFIG_FILE, ENV_PREFIX, BrokerSettings, load_settings
from subagent_tasks.cli import cli

ROOT = Path(__file__).resolve().parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yml"
TEXT = COMPOSE_FILE.read_text(encoding="utf-8")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

_ENTRY = re.compile(r"(?P<indent> *)(?:- (?P<item>\S.*)|(?P<key>[^\s:#]+):(?: (?P<value>\S.*))?)")
# Plain text of YAML without a meaning of its own: no quotes, anchors, tags, blocks or comments.
_PLAIN = re.compile(r"(?![&*!|>%@`'\"\[{?-])(?!.*(?:: | #)).+")
_VARIABLE = re.compile(r"\$\{(?P<name>[A-Z_]+)(?::-(?P<default>[^}]*))?\}")


def parse(text: str) -> dict[str, Any]:
    """The part of YAML that the file is written in: mappings, lists of plain text, JSON lists. Refuses the rest."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    value, rest = _block(lines, 0)
    assert not rest, f"cannot read {rest[0]!r}"
    assert isinstance(value, dict)
    return value


def _block(lines: list[str], indent: int) -> tuple[dict[str, Any] | list[str] | None, list[str]]:
    """The value that the lines begin with at this indentation, and the lines behind it."""
    mapping: dict[str, Any] = {}
    items: list[str] = []
    while lines:
        entry = _ENTRY.fullmatch(lines[0])
        assert entry is not None, f"cannot read {lines[0]!r}"
        if len(entry["indent"]) < indent:
            break
        assert len(entry["indent"]) == indent, f"unexpected indentation: {lines[0]!r}"
        lines = lines[1:]
        if entry["item"]:
            assert not mapping, f"a list among keys: {entry['item']!r}"
            items.append(cast("str", _scalar(entry["item"])))
            continue
        assert not items, f"a key in a list: {entry['key']!r}"
        assert entry["key"] not in mapping, f"given twice: {entry['key']!r}"
        if entry["value"]:
            mapping[entry["key"]] = _scalar(entry["value"])
        else:
            mapping[entry["key"]], lines = _block(lines, indent + 2)
    return mapping or items or None, lines


def _scalar(text: str) -> object:
    if text.startswith("["):
        return json.loads(text)
    assert _PLAIN.fullmatch(text), f"cannot read {text!r}"
    return text


COMPOSE = parse(TEXT)
REDIS: dict[str, Any] = COMPOSE["services"]["redis"]
WORKER: dict[str, Any] = COMPOSE["services"]["worker"]
DOCKERFILE_PATH = ROOT / WORKER["build"]["context"] / WORKER["build"]["dockerfile"]


def instructions(name: str) -> list[str]:
    """What follows each instruction of that name in the Dockerfile, continued lines joined."""
    text = DOCKERFILE_PATH.read_text(encoding="utf-8").replace("\\\n", " ")
    return [line.removeprefix(name).strip() for line in text.splitlines() if line.startswith(f"{name} ")]


def copied() -> list[str]:
    """What the Dockerfile copies from the build context."""
    return [source for rest in instructions("COPY") for source in rest.split()[:-1]]


def mounts(service: dict[str, Any]) -> dict[str, Path]:
    """The bind mounts of a service: the path in the container -> the file here."""
    parts = [volume.split(":") for volume in service["volumes"]]
    return {inside: ROOT / source for source, inside, *_ in parts if source.startswith(".")}


def environment() -> dict[str, str]:
    """The worker's environment where the operator set nothing: every variable has its default."""
    given: dict[str, str] = WORKER["environment"]
    return {name: _VARIABLE.sub(lambda match: match["default"] or "", value) for name, value in given.items()}


def users() -> dict[str, list[str]]:
    """The users of `users.acl` and their rules."""
    lines = [line.split() for line in ACL_FILE.read_text(encoding="utf-8").splitlines()]
    return {words[1]: words[2:] for words in lines}


# ------------------------------------------------------------------ the file itself


def test_compose_can_read_the_file() -> None:
    """By compose itself where it is installed; elsewhere `parse` read it, which refuses what it does not know."""
    if not has_compose():
        assert set(COMPOSE) == {"services", "volumes"}
        return
    checked = subprocess.run(
        ["docker", "compose", "--file", str(COMPOSE_FILE), "config", "--quiet"],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert checked.returncode == 0, checked.stderr


def has_compose() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=20).returncode == 0


@pytest.mark.parametrize(
    "text", ["a: b: c", "a: &x b", "a:\n   b: c", "a: |\n  b", "a: 'b'", "a: b # c", "a: b\na: c", "a:\n  - b\n  c: d"]
)
def test_what_the_reader_does_not_know_it_refuses(text: str) -> None:
    """The facts below would be about another file than the one compose sees otherwise."""
    with pytest.raises(AssertionError):
        parse(text)


def test_services_name_only_what_there_is() -> None:
    """A volume or a service that is not declared is found out by compose alone, at the start."""
    assert set(WORKER["depends_on"]) <= set(COMPOSE["services"])
    assert "healthcheck" in REDIS, "the worker waits until Redis is healthy"
    named = {volume.split(":")[0] for volume in REDIS["volumes"] if not volume.startswith(".")}
    assert named == set(COMPOSE["volumes"])


@pytest.mark.parametrize("service", ["redis", "worker"])
def test_every_mounted_file_exists(service: str) -> None:
    """Docker makes an empty folder of a mounted file that is missing."""
    mounted = mounts(COMPOSE["services"][service])
    assert mounted
    assert {str(path): path.is_file() for path in mounted.values()} == dict.fromkeys(map(str, mounted.values()), True)


def test_no_variable_of_the_file_is_taken_for_a_setting() -> None:
    """A variable with our prefix that is no setting makes every command refuse the operator's own shell (P13)."""
    assert [name for name in variables() if name.startswith(ENV_PREFIX) and not is_setting(name)] == []


@pytest.mark.parametrize("name", [name for name in WORKER["environment"] if name.startswith(ENV_PREFIX)])
def test_every_setting_of_the_worker_exists(name: str) -> None:
    """P13: the worker would refuse to start."""
    assert is_setting(name)


def variables() -> Iterator[str]:
    for match in _VARIABLE.finditer(TEXT):
        yield match["name"]


def is_setting(name: str) -> bool:
    return name.removeprefix(ENV_PREFIX).lower() in BrokerSettings.model_fields


# ------------------------------------------------------------------ Redis


def test_redis_runs_with_our_configuration_and_users() -> None:
    """design §9: `redis.conf` and `users.acl` are used by compose and by the tests."""
    program, config_file, *options = REDIS["command"]
    mounted = mounts(REDIS)
    assert program == "redis-server"
    assert mounted[config_file] == CONFIG_FILE
    assert mounted[options[options.index("--aclfile") + 1]] == ACL_FILE


def test_what_redis_writes_outlives_its_container() -> None:
    """P1: the log lies on a volume."""
    options = REDIS["command"]
    assert f"redis-data:{options[options.index('--dir') + 1]}" in REDIS["volumes"]


def test_the_health_check_logs_in_as_a_user_that_may_ping() -> None:
    """users.acl: `health` has PING with any password and nothing else; `default` is off."""
    kind, program, *words = REDIS["healthcheck"]["test"]
    rules = users()[words[words.index("--user") + 1]]
    assert (kind, program, words[-1]) == ("CMD", "redis-cli", "ping")
    assert "--pass" in words, "redis-cli ignores --user without a password"
    assert {"on", "nopass", "+ping"} <= set(rules)
    assert "off" in users()["default"]


def test_the_worker_logs_in_as_the_user_of_the_acl_file() -> None:
    """A trial works as it comes: the user and the placeholder password are those of `users.acl`."""
    url = urlsplit(load_settings(broker_url=environment()[f"{ENV_PREFIX}BROKER_URL"]).redis_py_url)
    assert url.username is not None
    assert url.hostname in COMPOSE["services"]
    rules = users()[url.username]
    assert "on" in rules
    assert f">{url.password}" in rules


def test_the_user_of_the_worker_may_use_its_keys() -> None:
    """users.acl names the keys of one namespace: the one a worker has unless told otherwise."""
    settings = load_settings(broker_url=environment()[f"{ENV_PREFIX}BROKER_URL"])
    username = urlsplit(settings.redis_py_url).username
    assert username is not None
    assert f"{ENV_PREFIX}NAMESPACE" not in WORKER["environment"]
    namespace = BrokerSettings.model_fields["namespace"].default
    assert {f"~{{{namespace}}}:*", f"~{namespace}.subagents.*"} <= set(users()[username])


# ------------------------------------------------------------------ the worker and its image


def test_the_worker_command_is_one_of_our_command_line() -> None:
    """design §4: parsed by the command itself, which does not run."""
    name, *arguments = WORKER["command"]
    context = cli.make_context("subagent-tasks", [name, *arguments])
    command = cli.get_command(context, name)
    assert command is not None
    parsed = command.make_context(name, arguments, parent=context)
    assert (parsed.params["app"], parsed.params["concurrency"]) == ("agents:app", 1000)


def test_the_app_of_the_worker_is_mounted_where_it_starts() -> None:
    """`module:attribute` is looked for in the current directory first."""
    module, _, attribute = WORKER["command"][1].partition(":")
    folder = instructions("WORKDIR")[-1]
    declaration = mounts(WORKER)[str(PurePosixPath(folder, f"{module}.py"))]
    assert re.search(rf"^{attribute} = SubagentApp\(", declaration.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_image_starts_our_command() -> None:
    """The entry point is the script that the project installs."""
    [entry_point] = instructions("ENTRYPOINT")
    assert json.loads(entry_point) == list(PYPROJECT["project"]["scripts"])


def test_the_image_has_a_python_that_the_project_supports() -> None:
    """pyproject: `requires-python`."""
    [image] = instructions("FROM")
    version = image.removeprefix("python:").removesuffix("-slim")
    assert version in SpecifierSet(PYPROJECT["project"]["requires-python"])


@pytest.mark.parametrize("source", copied())
def test_what_the_image_copies_is_in_the_build_context(source: str) -> None:
    """A source that is missing, or that `.dockerignore` leaves out, fails the build."""
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert (ROOT / WORKER["build"]["context"] / source).exists()
    assert not [pattern for pattern in ignored if fnmatch.fnmatch(source, pattern)]


def test_what_the_image_copies_is_enough_to_install_it(tmp_path: Path) -> None:
    """The image installs the package from these files alone, with the build backend of the pins."""
    for source in copied():
        here = ROOT / source
        if here.is_dir():
            shutil.copytree(here, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(here, tmp_path / source)
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert built.returncode == 0, built.stderr
    assert list((tmp_path / "dist").glob("*.whl"))
