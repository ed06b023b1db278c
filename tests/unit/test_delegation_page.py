"""docs/delegation.md and docs/providers.md say what is so: options, codes, settings, and code that runs."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from broker_config import BrokerSettings, EmbeddedServer, SettingsError, load_settings
from subagent_tasks import DelegationToolConfig, JobToolsConfig, errors, providers
from subagent_tasks.attempt import CANCEL_SECONDS, DISPOSE_SECONDS
from subagent_tasks.protocol.outcomes import HEADLINES
from subagent_tasks.testing import ScriptedModel, fake_app, reply

ROOT = Path(__file__).resolve().parents[2]
DELEGATION = (ROOT / "docs" / "delegation.md").read_text(encoding="utf-8")
PROVIDERS = (ROOT / "docs" / "providers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PROVIDERS, re.DOTALL)
SHOWN = {name: block for block in BLOCKS for name in re.findall(r"async def (test_\w+)", block)}


def rows(section: str) -> dict[str, str]:
    """The first two cells of the table under a heading."""
    _, _, rest = DELEGATION.partition(f"## {section}\n")
    table = rest.partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", table, re.MULTILINE))


@pytest.mark.parametrize(
    ("section", "model"),
    [
        ("Options of `app.add_delegation_tool(…)`", DelegationToolConfig),
        ("Options of `app.add_job_tools(…)`", JobToolsConfig),
    ],
)
def test_every_option_is_listed_with_its_default(section: str, model: type[Any]) -> None:
    """An option that nobody finds is none."""
    listed = rows(section)
    assert listed.keys() == model.model_fields.keys()
    for name, field in model.model_fields.items():
        if not field.is_required() and field.default is not None:
            assert listed[name].strip("`").strip('"') == str(field.default), name


def test_every_code_is_listed() -> None:
    """Those of the error classes, and those given where an error is made."""
    families = [kind for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "code")]
    codes = {str(kind.__dict__["code"]) for kind in families if "code" in kind.__dict__}
    for path in (ROOT / "subagent_tasks").rglob("*.py"):
        if "testing" not in path.parts:
            codes |= set(re.findall(r"""\bcode(?:"\s*:|=)\s*"([A-Z_]+)\"""", path.read_text(encoding="utf-8")))
    assert {code for code in codes if f"`{code}`" not in DELEGATION} == set()


def test_the_settings_it_names_exist() -> None:
    """They are written without their prefix."""
    _, _, section = DELEGATION.partition("## Settings that belong together")
    named = set(re.findall(r"`([A-Z_]+)`", section))
    assert {name.lower() for name in named} <= set(BrokerSettings.model_fields)


RELATIONS = re.findall(r"`([A-Z_]+)` (?=[≤<] `([A-Z_]+)`)", DELEGATION)


def test_the_page_lists_relations() -> None:
    assert len(RELATIONS) == 6


@pytest.mark.parametrize(("low", "high"), RELATIONS)
def test_a_relation_it_lists_is_checked(low: str, high: str) -> None:
    """Settings that belong together: the error names both."""
    above = BrokerSettings.model_fields[high.lower()].default + 1
    with pytest.raises(SettingsError, match=f"{low}.*{high}"):
        load_settings(**{low.lower(): above})


async def test_a_plain_celery_app_reads_a_job() -> None:
    """Reading a job with plain Celery: the code as printed, at another address. Waiting needs a real server."""
    shown = re.search(r"<!-- plain celery -->\n```python\n(.*?)```", DELEGATION, re.DOTALL)
    assert shown is not None
    model = ScriptedModel()
    model.on("hello", reply("hi there"))
    printed: list[object] = []
    with EmbeddedServer() as server:
        code = shown[1].replace("redis://127.0.0.1:6379/0", server.url)
        async with fake_app(model, url=server.url) as kit:
            job = {"description": "greet", "prompt": "say hello", "run_in_background": True}
            started = await kit.session.call("subagent", job)
            value: Any = started.value
            names: dict[str, Any] = {"job_id": value["jobId"], "print": printed.append}
            await asyncio.to_thread(exec, compile(code, "docs/delegation.md", "exec"), names)
            names["celery"].close()
    assert printed == [[{"type": "text", "text": "hi there"}]]


@pytest.mark.parametrize("name", SHOWN)
async def test_a_shown_provider_test_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/providers.md: the provider and its tests, as they are printed."""
    module = ModuleType("command_provider")
    exec(compile(BLOCKS[0], "docs/providers.md", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "command_provider", module)
    names: dict[str, Any] = {}
    exec(compile(SHOWN[name], "docs/providers.md", "exec"), names)
    await names[name]()


def test_the_page_shows_two_tests() -> None:
    assert len(SHOWN) == 2


def test_the_providers_page_states_the_bounds_and_members_of_the_code() -> None:
    """A provider's author builds on these numbers."""
    assert f"{CANCEL_SECONDS:g} s after a cancel" in PROVIDERS
    assert f"{DISPOSE_SECONDS:g} s, then the release counts as failed" in PROVIDERS
    assert [reason for reason in HEADLINES if f"`{reason}`" not in PROVIDERS] == []
    members = {name for name in vars(providers.Drive) if not name.startswith("_")}
    assert [name for name in members if f"`{name}`" not in PROVIDERS and f"`await {name}(" not in PROVIDERS] == []
