"""`docker-compose.yml` and `deploy/Dockerfile` agree with the package, as far as can be told without an engine.

Everything they name must exist and be ours: files, users, settings, the command line. That the containers then run is
not decided here; what they run is, as processes of this machine.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast
from unittest import mock
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from packaging.specifiers import SpecifierSet

from broker_config import ACL_FILE, CONFIG_FILE, ENV_PREFIX, BrokerSettings, EmbeddedServer, load_settings
from subagent_tasks import SubagentApp
from subagent_tasks.cli import cli
from subagent_tasks.testing import WorkerProcess, reply, stub_llm

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
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
REDIS, WORKER, DEMO, MODEL = (SERVICES[name] for name in ("redis", "worker", "demo", "model"))
OURS = {"worker": WORKER, "demo": DEMO}
"""The services that run our command line on the mounted declaration."""
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


def environment(service: dict[str, Any]) -> dict[str, str]:
    """A service's environment where the operator set nothing: what has a default has it, and the rest is not there."""
    given: dict[str, str | None] = service["environment"]
    return {
        name: _VARIABLE.sub(lambda match: match["default"] or "", value)
        for name, value in given.items()
        if value is not None
    }


def mounted_at(service: dict[str, Any], name: str) -> Path:
    """The file here that a service finds as `name` where it starts."""
    return mounts(service)[str(PurePosixPath(instructions("WORKDIR")[-1], name))]


def declared() -> SubagentApp:
    """The app that the services share, as they load it."""
    return cast("SubagentApp", runpy.run_path(str(mounted_at(WORKER, "agents.py")))["app"])


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
    needed = [item for service in SERVICES.values() for item in service.get("depends_on", {}).items()]
    assert needed
    for name, how in needed:
        assert name in SERVICES
        assert how["condition"] == ("service_healthy" if "healthcheck" in SERVICES[name] else "service_started")
    named = {volume.split(":")[0] for volume in REDIS["volumes"] if not volume.startswith(".")}
    assert named == set(COMPOSE["volumes"])


@pytest.mark.parametrize("service", SERVICES)
def test_every_mounted_file_exists(service: str) -> None:
    """Docker makes an empty folder of a mounted file that is missing."""
    mounted = mounts(SERVICES[service])
    assert mounted
    assert {str(path): path.is_file() for path in mounted.values()} == dict.fromkeys(map(str, mounted.values()), True)


def test_no_variable_of_the_file_is_taken_for_a_setting() -> None:
    """A variable with our prefix that is no setting makes every command refuse the operator's own shell (P13)."""
    assert [name for name in variables() if name.startswith(ENV_PREFIX) and not is_setting(name)] == []


@pytest.mark.parametrize("service", OURS)
def test_every_setting_of_a_service_exists(service: str) -> None:
    """P13: it would refuse to start."""
    assert [name for name in OURS[service]["environment"] if name.startswith(ENV_PREFIX) and not is_setting(name)] == []


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


@pytest.mark.parametrize("service", OURS)
def test_a_service_logs_in_as_the_user_of_the_acl_file(service: str) -> None:
    """A trial works as it comes: the user and the placeholder password are those of `users.acl`."""
    url = urlsplit(load_settings(broker_url=environment(OURS[service])[f"{ENV_PREFIX}BROKER_URL"]).redis_py_url)
    assert url.username is not None
    assert url.hostname in SERVICES
    rules = users()[url.username]
    assert "on" in rules
    assert f">{url.password}" in rules


def test_the_user_of_the_worker_may_use_its_keys() -> None:
    """users.acl names the keys of one namespace: the one a worker has unless told otherwise."""
    settings = load_settings(broker_url=environment(WORKER)[f"{ENV_PREFIX}BROKER_URL"])
    username = urlsplit(settings.redis_py_url).username
    assert username is not None
    assert not any(f"{ENV_PREFIX}NAMESPACE" in service["environment"] for service in OURS.values())
    namespace = BrokerSettings.model_fields["namespace"].default
    assert {f"~{{{namespace}}}:*", f"~{namespace}.subagents.*"} <= set(users()[username])


# ------------------------------------------------------------------ the worker and its image


@pytest.mark.parametrize(
    ("service", "expected"),
    [
        ("worker", {"app": "agents:app", "concurrency": 1000}),
        ("demo", {"app": "agents:app", "tool": "subagent_small", "session_id": None}),
    ],
)
def test_the_command_of_a_service_is_one_of_our_command_line(service: str, expected: dict[str, object]) -> None:
    """design §4: parsed by the command itself, which does not run."""
    name, *arguments = OURS[service]["command"]
    context = cli.make_context("subagent-tasks", [name, *arguments])
    command = cli.get_command(context, name)
    assert command is not None
    parsed = command.make_context(name, arguments, parent=context)
    assert expected.items() <= parsed.params.items()


def test_host_and_workers_share_one_declaration_mounted_where_they_start() -> None:
    """`module:attribute` is looked for in the current directory first."""
    assert mounted_at(WORKER, "agents.py") == mounted_at(DEMO, "agents.py")
    assert isinstance(declared(), SubagentApp)


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


# ------------------------------------------------------------------ the demo


def test_a_plain_up_starts_redis_and_workers_alone() -> None:
    """The demo's services have a profile, and nothing without one needs them."""
    plain = {name: service for name, service in SERVICES.items() if "profiles" not in service}
    assert set(plain) == {"redis", "worker"}
    assert all(set(service.get("depends_on", {})) <= set(plain) for service in plain.values())
    assert DEMO["profiles"] == MODEL["profiles"], "naming the one starts the other only within one profile"


def test_the_demo_runs_once() -> None:
    """Compose restarts nothing unless told to."""
    assert "restart" not in DEMO


def test_the_demo_needs_no_key() -> None:
    """The key is the worker's alone, handed on from the operator's shell and absent where there is none."""
    assert [name for name, service in SERVICES.items() if "OPENAI_API_KEY" in service.get("environment", {})] == [
        "worker"
    ]
    assert WORKER["environment"]["OPENAI_API_KEY"] is None


def test_the_worker_finds_the_demos_model() -> None:
    """One port: where the declaration looks, where the model listens, where its health is asked for."""
    address = urlsplit(str(runpy.run_path(str(mounted_at(WORKER, "agents.py")))["MODEL_URL"]))
    [port] = MODEL["command"]
    assert SERVICES[str(address.hostname)] is MODEL
    assert str(address.port) == port
    assert f"http://127.0.0.1:{port}/health" in MODEL["healthcheck"]["test"][-1]


@pytest.fixture(scope="module")
def composed() -> Iterator[dict[str, str]]:
    """The environment of a host beside a server with the users of `users.acl`, a worker and a model's stub."""
    with (
        stub_llm() as model,
        EmbeddedServer(options={"aclfile": str(ACL_FILE)}) as server,
        mock.patch.dict(os.environ),
    ):
        os.environ.pop("OPENAI_API_KEY", None)
        model.on("message queue", reply("Messages in a row."))
        address = urlsplit(server.url).netloc
        variables = {
            **{name: value.replace("redis:6379", address) for name, value in environment(WORKER).items()},
            "MODEL_URL": model.url,
            "PYTHONWARNINGS": "ignore",
        }
        with WorkerProcess("agents", directory=mounted_at(WORKER, "agents.py").parent, env=variables) as worker:
            worker.wait_ready()
            yield variables


def run_in_demo(composed: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    """What `docker compose run demo …` does, as a process of this machine."""
    return subprocess.run(
        [sys.executable, "-m", "subagent_tasks", *command],
        cwd=mounted_at(DEMO, "agents.py").parent,
        env={**os.environ, **composed},
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_the_demo_delegates_and_prints_the_answer(composed: dict[str, str]) -> None:
    """P1, users.acl: its own command, through the server's users and a worker of the same declaration."""
    done = run_in_demo(composed, *DEMO["command"])
    assert (done.returncode, done.stdout) == (0, "Messages in a row.\n"), done.stderr


def test_without_a_key_the_other_tool_says_what_is_missing(composed: dict[str, str]) -> None:
    """P13: to whoever goes on from the demo to the tool with the large model."""
    failed = run_in_demo(composed, "run", "agents:app", "hello")
    assert failed.returncode == 1
    assert "OPENAI_API_KEY in the environment of the worker" in failed.stderr


def test_the_demos_model_answers_until_it_is_stopped() -> None:
    """The script of the service `model`, with the real weights."""
    program, script = cast("list[str]", MODEL["entrypoint"])
    assert program == "python"
    with subprocess.Popen(
        [sys.executable, str(mounted_at(MODEL, script)), "0"],
        env={**os.environ, **environment(MODEL)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            line = cast("IO[str]", process.stdout).readline()
            url = line.split()[-1].replace("0.0.0.0", "127.0.0.1") + "/v1/chat/completions"
            body = {"model": "smollm2", "max_tokens": 5, "messages": [{"role": "user", "content": "Say hello."}]}
            headers = {"Content-Type": "application/json"}
            with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=30) as response:
                assert json.load(response)["choices"][0]["message"]["content"]
            process.terminate()
            assert process.wait(10) == 0
        finally:
            process.kill()
