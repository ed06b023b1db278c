"""What the model reads about the tools, byte for byte.

The golden files are never written by a test run. After a deliberate change of wording, run
`python -m tests.unit.test_tool_definitions` and read the diff: every such change costs every running session its cache.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from subagent_tasks.protocol.models import ToolDefinition
from subagent_tasks.tools.config import load_delegation_config, load_job_tools_config
from subagent_tasks.tools.definitions import JOBS_SECTION, delegation_section, delegation_tool, job_tools

GOLDEN = Path(__file__).parents[1] / "golden"


def golden_text(tools: tuple[ToolDefinition, ...], section: str) -> str:
    dumped = {"tools": [tool.model_dump(mode="json") for tool in tools], "section": section}
    return json.dumps(dumped, indent=2, ensure_ascii=False) + "\n"


def delegation(inherits_parent_context: bool = False, **values: Any) -> str:
    config = load_delegation_config(**{"provider": "spawn", **values})
    return golden_text(
        (delegation_tool(config, inherits_parent_context=inherits_parent_context),), delegation_section(config)
    )


def jobs(**values: Any) -> str:
    return golden_text(job_tools(load_job_tools_config(**values)), JOBS_SECTION)


def cases() -> dict[str, str]:
    return {
        "tool-one-shot-fresh": delegation(),
        "tool-one-shot-inheriting": delegation(True, provider="fork", tool_name="subagent_fork"),
        "tool-background-off": delegation(enable_run_in_background=False),
        "tool-continuable-fresh": delegation(background_mode="continuable"),
        "tool-continuable-inheriting-selection": delegation(
            True, background_mode="continuable", enable_model_selection=True
        ),
        "tool-one-shot-selection": delegation(enable_model_selection=True),
        "tool-jobs": jobs(),
        "tool-jobs-other-waits": jobs(wait_timeout_ms=5_000, max_wait_timeout_ms=60_000),
    }


@pytest.mark.parametrize("name", list(cases()))
def test_definitions_are_byte_identical_to_their_golden_file(name: str) -> None:
    """P12, scenario 183"""
    assert cases()[name].encode() == (GOLDEN / f"{name}.json").read_bytes()


def tool(inherits_parent_context: bool = False, **values: Any) -> ToolDefinition:
    config = load_delegation_config(**{"provider": "spawn", **values})
    return delegation_tool(config, inherits_parent_context=inherits_parent_context)


def fields(definition: ToolDefinition) -> list[str]:
    return list(cast("dict[str, Any]", definition.parameters["properties"]))


def described(definition: ToolDefinition, field: str) -> str:
    return cast("dict[str, Any]", definition.parameters["properties"])[field]["description"]


def test_the_default_tool_has_three_fields_and_no_transport() -> None:
    """behaviour §2.2, scenario 1"""
    definition = tool()
    assert definition.name == "subagent"
    assert fields(definition) == ["description", "prompt", "run_in_background"]
    assert definition.parameters["required"] == ["description", "prompt"]


def test_without_background_the_field_is_gone_and_the_description_says_it_waits() -> None:
    """behaviour §2.3, scenario 2"""
    definition = tool(enable_run_in_background=False)
    assert fields(definition) == ["description", "prompt"]
    assert "waits for the agent" in definition.description


def test_fresh_and_inheriting_providers_differ_in_description_and_prompt() -> None:
    """behaviour §2.3, scenario 9"""
    fresh, inheriting = tool(), tool(True)
    assert fresh.description != inheriting.description
    assert described(fresh, "prompt") != described(inheriting, "prompt")


def test_selection_adds_three_fields_and_points_to_the_discovery_tool() -> None:
    """behaviour §2.2, §2.3, scenario 169"""
    definition = tool(enable_model_selection=True)
    assert fields(definition)[2:5] == ["provider", "model", "reasoning_effort"]
    assert "list_subagent_models" in definition.description


def test_selection_on_an_inheriting_provider_warns_about_the_cache() -> None:
    """behaviour §2.3"""
    warning = "cache of the inherited conversation"
    assert warning in tool(True, enable_model_selection=True).description
    assert warning not in tool(enable_model_selection=True).description


@pytest.mark.parametrize("decided", [True, False])
def test_in_settings_mode_the_session_decides(decided: bool) -> None:
    """behaviour §6.6"""
    config = load_delegation_config(provider="s", model_selection_settings=True)
    definition = delegation_tool(config, inherits_parent_context=False, session_selects_model=decided)
    assert ("reasoning_effort" in fields(definition)) is decided


def test_one_shot_names_the_job_tools_and_its_default() -> None:
    """behaviour §2.3"""
    text = tool().description + described(tool(), "run_in_background")
    for word in ("job_output", "job_kill", "Defaults to false"):
        assert word in text


def test_continuable_names_its_default_the_notice_and_the_follow_up() -> None:
    """behaviour §2.3"""
    definition = tool(background_mode="continuable")
    text = definition.description + described(definition, "run_in_background")
    for word in ("subagent id", "notified", "send_message", "Defaults to true", "run_in_background: false"):
        assert word in text
    assert "job" not in text


def test_schemas_hold_no_default_no_enum_and_accept_undeclared_keys() -> None:
    """behaviour §2.2"""
    for text in cases().values():
        for definition in json.loads(text)["tools"]:
            schema = json.dumps(definition["parameters"])
            for keyword in ('"default"', '"enum"', '"additionalProperties"'):
                assert keyword not in schema


@pytest.mark.parametrize(
    "values", [{}, {"enable_run_in_background": False, "background_mode": "continuable"}], ids=["one-shot", "off"]
)
def test_the_section_is_empty_unless_background_is_on_and_continuable(values: dict[str, Any]) -> None:
    """behaviour §8, scenario 18"""
    assert delegation_section(load_delegation_config(provider="s", **values)) == ""


def test_the_section_names_the_tool_as_the_model_knows_it() -> None:
    """behaviour §8"""
    config = load_delegation_config(provider="s", tool_name="helper", background_mode="continuable")
    assert "Use helper in the background" in delegation_section(config)


def test_job_tools_come_in_a_fixed_order() -> None:
    """behaviour §3.5"""
    assert [tool.name for tool in job_tools(load_job_tools_config())] == ["job_output", "job_list", "job_kill"]


def test_a_definition_does_not_share_state_with_the_next() -> None:
    """P12: what one reader does to a schema must not reach another's bytes."""
    first = tool()
    cast("dict[str, Any]", first.parameters["properties"]).clear()
    assert fields(tool()) == ["description", "prompt", "run_in_background"]


if __name__ == "__main__":
    for name, text in cases().items():
        (GOLDEN / f"{name}.json").write_text(text, encoding="utf-8")
