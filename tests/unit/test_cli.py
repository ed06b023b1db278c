"""The command line without a server: its help, what it refuses, and what it tells a person."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from broker_config import BrokerSettings
from subagent_tasks import ConfigurationError, SubagentApp, TranscriptEvent
from subagent_tasks.cli import COMMANDS, cli
from subagent_tasks.commands.loading import load_app
from subagent_tasks.commands.progress import event_lines
from subagent_tasks.commands.worker import chosen_queues
from subagent_tasks.providers import SpawnProvider
from subagent_tasks.terminal import brief
from subagent_tasks.testing import ScriptedModel

_numbers = itertools.count()


class Module:
    """A module in the current directory, under a name of its own."""

    def __init__(self, directory: Path, source: str) -> None:
        self.name = f"cli_test_{next(_numbers)}"
        self.path = directory / f"{self.name}.py"
        self.path.write_text(source)

    @property
    def app(self) -> str:
        return f"{self.name}:app"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory; what is put on the module path is taken off again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_the_help_names_every_command_and_loads_none() -> None:
    """A second of imports before each help text would be felt; Celery, Redis and the agent loop stay out."""
    watch = "import sys; from subagent_tasks.cli import cli; cli(['--help'], standalone_mode=False)"
    heavy = "print('loaded:', [name for name in ('celery', 'redis', 'pydantic_ai', 'rich') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", f"{watch}; {heavy}"], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in COMMANDS)
    assert "loaded: []" in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_itself(name: str) -> None:
    """Every name in the overview leads to a command."""
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_a_reference_that_is_none_is_a_usage_error() -> None:
    """Exit code 2, as for every wrong usage."""
    result = CliRunner().invoke(cli, ["worker", "agents"])
    assert result.exit_code == 2
    assert "'agents' is not module:attribute" in result.output


def test_an_app_of_the_current_directory_is_found(here: Path) -> None:
    """As uvicorn has it."""
    module = Module(here, "from subagent_tasks import SubagentApp\nclass box:\n    app = SubagentApp()\n")
    assert isinstance(load_app(f"{module.name}:box.app"), SubagentApp)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\ny = x / 0\n", ".py:2: ZeroDivisionError: division by zero"),
        ("def f(:\n", ".py:1: SyntaxError: invalid syntax"),
        ("import a_package_nobody_has\n", ".py:1: ModuleNotFoundError: No module named 'a_package_nobody_has'"),
        ("import sys\nsys.exit(3)\n", ".py:2: SystemExit: 3"),
        (
            "import subagent_tasks\napp = subagent_tasks.SubagentApp()\napp.add_job_tools(wait_timeout=1)\n",
            ".py:3: tool-jobs: wait_timeout: unknown key; did you mean wait_timeout_ms?",
        ),
        ("other = 1\n", "has no 'app': it declares no SubagentApp"),
        ("from subagent_tasks import SubagentApp\napplication = SubagentApp()\n", "did you mean"),
        ("app = 'text'\n", "is a str, not a SubagentApp"),
    ],
)
def test_an_app_that_cannot_be_loaded_is_one_line(here: Path, source: str, message: str) -> None:
    """P13: the place and the error of the user's own code, never a traceback; exit code 1."""
    result = CliRunner().invoke(cli, ["worker", Module(here, source).app])
    assert result.exit_code == 1
    assert message in result.output
    assert result.output.count("\n") == 1


@pytest.mark.usefixtures("here")
def test_a_module_that_does_not_exist_is_said_to_be_missing() -> None:
    """Also when only its package does not."""
    with pytest.raises(ConfigurationError, match="no module named 'cli_test_none'"):
        load_app("cli_test_none.agents:app")


def test_settings_that_cannot_be_used_are_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """P13, P14: the variable is named, its value is not shown."""
    monkeypatch.setenv("SUBAGENT_TASKS_BROKER_URL", "secret-without-scheme")
    result = CliRunner().invoke(cli, ["kill", "some-run"])
    assert result.exit_code == 1
    assert "SUBAGENT_TASKS_BROKER_URL" in result.output
    assert "secret" not in result.output


@pytest.mark.parametrize("session_id", ["", "  "])
def test_an_empty_session_is_refused(here: Path, session_id: str) -> None:
    """P13: `--session "$UNSET"` must not quietly open another one; nothing is connected for it."""
    module = Module(here, "raise SystemExit('imported')\n")
    result = CliRunner().invoke(cli, ["run", module.app, "a prompt", "--session", session_id])
    assert result.exit_code == 2
    assert "--session: the id is empty; leave the option out for a new session" in result.output


def declared() -> SubagentApp:
    app = SubagentApp(BrokerSettings(namespace="shop"))
    app.add_provider(SpawnProvider(model=ScriptedModel()))
    app.add_provider(SpawnProvider(model=ScriptedModel(), name="heavy"))
    return app


@pytest.mark.parametrize(
    ("names", "queues"),
    [
        ("", ["shop.subagents.heavy", "shop.subagents.spawn"]),
        ("heavy", ["shop.subagents.heavy"]),
        ("shop.subagents.heavy, spawn,heavy", ["shop.subagents.heavy", "shop.subagents.spawn"]),
    ],
)
def test_a_worker_serves_the_queues_it_is_told(names: str, queues: list[str]) -> None:
    """design §8: all declared ones by default; by their full or short names, each once."""
    assert chosen_queues(declared(), names) == queues


@pytest.mark.parametrize("names", ["heavier", "shop.subagents.other", "spawn,a b"])
def test_a_queue_nobody_declared_is_refused(names: str) -> None:
    """P13: the worker would wait on it for ever."""
    with pytest.raises(ConfigurationError, match="no declared provider has the queue"):
        chosen_queues(declared(), names)


def test_an_app_without_providers_has_no_worker() -> None:
    """P13."""
    with pytest.raises(ConfigurationError, match="declares no provider"):
        chosen_queues(SubagentApp(BrokerSettings()), "")


@pytest.mark.parametrize(
    ("event", "lines"),
    [
        (TranscriptEvent(seq=0, kind="input", data={"text": "a secret"}), ["· a worker has taken the prompt"]),
        (
            TranscriptEvent(
                seq=1,
                kind="response",
                data={
                    "message": {
                        "parts": [
                            {"part_kind": "text", "content": "I will\nlook"},
                            {"part_kind": "tool-call", "tool_name": "read_file", "args": {"path": "a"}},
                        ]
                    }
                },
            ),
            ["» I will look", '→ read_file({"path": "a"})'],
        ),
        (
            TranscriptEvent(seq=2, kind="tool_result", data={"tool_name": "read_file", "content": "text"}),
            ["← read_file: text"],
        ),
        (
            TranscriptEvent(seq=3, kind="tool_result", data={"tool_name": "rm", "content": "no", "outcome": "failed"}),
            ["✗ rm: no"],
        ),
        (
            TranscriptEvent(seq=4, kind="settled", data={"status": "failed", "stopReason": "error"}),
            ["· ended: failed (error)"],
        ),
        (TranscriptEvent(seq=5, kind="tool_call", data={"tool_name": "x"}), []),
        (TranscriptEvent(seq=6, kind="of a newer version"), []),
    ],
)
def test_progress_is_one_line_per_step(event: TranscriptEvent, lines: list[str]) -> None:
    """A tool call is told by the model's message; its announcement says nothing new."""
    assert event_lines(event) == lines


def test_a_brief_text_cannot_drive_the_terminal() -> None:
    """What a child says is printed: an escape sequence in it must not be obeyed."""
    assert brief("a\x1b[2Jb\n\nc", 20) == "a\N{REPLACEMENT CHARACTER}[2Jb c"
    assert brief("x" * 30, 10) == "x" * 9 + "…"
