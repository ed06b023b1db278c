"""Which declarations of the delegation and job tools load, and with which words the others are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from subagent_tasks.errors import ConfigurationError, UnsupportedCapability
from subagent_tasks.protocol.models import AgentOptions, Capabilities
from subagent_tasks.tools.config import (
    DelegationToolConfig,
    JobToolsConfig,
    check_provider,
    display_value,
    load_delegation_config,
    load_job_tools_config,
)

DEPTH_TEXT = "subagent maxDepth must be a non-negative safe integer"
EVERYTHING = Capabilities(
    output_schema=True,
    depth_limit=True,
    tool_filter=True,
    persona=True,
    agent_options=True,
    prepare_continuable=True,
)


def refusal(**values: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_delegation_config(**values)
    return str(caught.value)


def jobs_refusal(**values: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_job_tools_config(**values)
    return str(caught.value)


def test_defaults_are_those_of_the_seed() -> None:
    """behaviour §2.1, scenario 13"""
    config = load_delegation_config(provider="spawn")
    assert config == DelegationToolConfig(
        provider="spawn",
        tool_name="subagent",
        enable_model_selection=False,
        model_selection_settings=False,
        enable_run_in_background=True,
        background_mode="one-shot",
        agent_options=None,
        persona=None,
        tool_filter=None,
        max_depth=3,
        recovery=None,
        run_limit_seconds=None,
    )
    assert config.depth_cap == 3


def test_a_seed_configuration_loads_unchanged() -> None:
    """design §4: the seed's camelCase names are aliases."""
    seed: dict[str, Any] = {
        "provider": "spawn",
        "toolName": "helper",
        "enableModelSelection": True,
        "modelSelectionSettings": False,
        "enableRunInBackground": True,
        "backgroundMode": "continuable",
        "agentOptions": {"provider": "p", "model": "m", "reasoningEffort": "low", "maxTokens": 100},
        "persona": "terse",
        "toolFilter": {"allow": ["read"], "deny": ["write"]},
        "maxDepth": 2,
    }
    snake = load_delegation_config(
        provider="spawn",
        tool_name="helper",
        enable_model_selection=True,
        background_mode="continuable",
        agent_options={"provider": "p", "model": "m", "reasoning_effort": "low", "max_tokens": 100},
        persona="terse",
        tool_filter={"allow": ["read"], "deny": ["write"]},
        max_depth=2,
    )
    assert load_delegation_config(**seed) == snake


def test_both_spellings_of_one_key_are_refused() -> None:
    """P13: silently preferring one would hide a mistake."""
    text = refusal(provider="s", toolName="a", tool_name="b")
    assert text == "tool-subagent: tool_name is also given as toolName; keep one of them"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"toolNam": "x"}, "tool-subagent: toolNam: unknown key; did you mean tool_name?"),
        ({"max_dept": 1}, "tool-subagent: max_dept: unknown key; did you mean max_depth?"),
        ({"agentOptions": {"modle": "x"}}, "tool-subagent: agentOptions.modle: unknown key; did you mean model?"),
        ({"tool_filter": {"alow": []}}, "tool-subagent: tool_filter.alow: unknown key; did you mean allow?"),
    ],
)
def test_an_unknown_key_is_refused_with_a_suggestion(values: dict[str, Any], text: str) -> None:
    """P13"""
    assert refusal(provider="s", **values) == text


def test_an_unknown_key_like_no_other_lists_the_known_ones() -> None:
    """P13"""
    assert "known keys: provider, tool_name" in refusal(provider="s", zork=1)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, "tool-subagent: provider: required, but not given"),
        ({"provider": 5}, "tool-subagent: provider: input should be a valid string, got 5"),
        ({"provider": "s", "backgroundMode": "later"}, "backgroundMode: input should be 'one-shot' or 'continuable'"),
        ({"provider": "s", "enable_run_in_background": "true"}, 'enable_run_in_background: .*, got "true"'),
        ({"provider": "s", "tool_name": "a b"}, 'tool_name: string should match .*, got "a b"'),
        ({"provider": "s", "run_limit_seconds": 0}, "run_limit_seconds: input should be greater than 0, got 0"),
        ({"provider": "s", "run_limit_seconds": math.inf}, "run_limit_seconds: .* finite number, got Infinity"),
        ({"provider": "s", "run_limit_seconds": True}, "run_limit_seconds: .*, got true"),
        ({"provider": "s", "recovery": "retry"}, "recovery: input should be 'resume' or 'fail', got \"retry\""),
        ({"provider": "s", "agentOptions": {"maxTokens": 0}}, "agentOptions.maxTokens: .* equal to 1, got 0"),
        ({"provider": "s", "agentOptions": {"maxTokens": True}}, "agent_options.maxTokens: .*, got true"),
        ({"provider": "s", "agentOptions": {"reasoningEffort": ""}}, "agentOptions.reasoningEffort: .* at least 1"),
        ({"provider": "s", "agentOptions": {"model": ["a:b"]}}, "agent_options.model: expected a string, got a list"),
        ({"provider": "s", "tool_filter": {"allow": "read"}}, 'tool_filter.allow: input should be a list, got "read"'),
        ({"provider": "s", "persona": "a\ud800"}, "persona: contains half of a surrogate pair at position 1"),
        ({"provider": "s", "tool_filter": {"deny": ["a\x00"]}}, "tool_filter.deny: contains a NUL character"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line_naming_key_and_value(values: dict[str, Any], text: str) -> None:
    """P13"""
    with pytest.raises(ConfigurationError, match=text) as caught:
        load_delegation_config(**values)
    assert "\n" not in str(caught.value)


def test_every_wrong_key_is_named_at_once() -> None:
    """P13"""
    text = refusal(provider=5, recovery="x")
    assert "provider:" in text
    assert "recovery:" in text


def test_a_persona_of_the_wrong_type_is_not_shown() -> None:
    """P14"""
    assert "secret" not in refusal(provider="s", persona=["secret"])


def test_direct_construction_refuses_with_the_same_error() -> None:
    """P13: one error class, however the model is built."""
    with pytest.raises(ConfigurationError, match="did you mean tool_name"):
        DelegationToolConfig(provider="s", toolname="x")  # pyright: ignore[reportCallIssue]  # the mistake under test


def test_both_selection_switches_are_mutually_exclusive() -> None:
    """behaviour §2.6, scenario 170"""
    text = refusal(provider="s", enableModelSelection=True, modelSelectionSettings=True)
    assert "mutually exclusive" in text
    assert "enableModelSelection" in text
    assert "modelSelectionSettings" in text


@pytest.mark.parametrize(
    "value", ["3", math.nan, math.inf, -math.inf, -1, 1.5, -0.0, 2**53, True, None, 2**99999], ids=display_value
)
def test_an_invalid_max_depth_is_refused_with_the_fixed_text(value: object) -> None:
    """behaviour §2.6, scenario 12"""
    assert refusal(provider="s", maxDepth=value) == DEPTH_TEXT


def test_the_note_of_an_invalid_max_depth_names_the_value_and_the_fix() -> None:
    """P13: the fixed text names neither."""
    with pytest.raises(ConfigurationError) as caught:
        load_delegation_config(provider="s", max_depth=1.5)
    assert caught.value.__notes__ == ["max_depth was 1.5; give 0 to 9007199254740991, or 'provider-managed'"]


@pytest.mark.parametrize("value", [0, 1, 2**53 - 1])
def test_a_whole_max_depth_is_the_cap_of_requests(value: int) -> None:
    """behaviour §2.1"""
    assert load_delegation_config(provider="s", max_depth=value).depth_cap == value


def test_provider_managed_depth_sends_no_cap() -> None:
    """behaviour §2.7, scenario 11"""
    assert load_delegation_config(provider="s", maxDepth="provider-managed").depth_cap is None


@pytest.mark.parametrize("value", [{}, {"allow": None}, {"allow": None, "deny": None}])
def test_a_filter_that_names_neither_key_is_refused_at_load(value: dict[str, Any]) -> None:
    """behaviour §2.6, scenario 14"""
    assert refusal(provider="s", tool_filter=value) == (
        "tool-subagent: `toolFilter` is configured but names neither `allow` nor `deny`"
        " — remove the key or fill the filter"
    )


def test_a_deny_only_filter_grows_no_allow_list() -> None:
    """behaviour §2.1, scenario 15"""
    config = load_delegation_config(provider="s", tool_filter={"deny": ["write"]})
    assert config.tool_filter is not None
    assert config.tool_filter.model_dump(exclude_none=True) == {"deny": ("write",)}


def test_an_empty_allow_list_is_a_filter() -> None:
    """behaviour §5.5: it hides every global tool."""
    config = load_delegation_config(provider="s", tool_filter={"allow": []})
    assert config.tool_filter is not None
    assert not config.tool_filter.admits("read")


def test_absent_options_stay_absent() -> None:
    """behaviour §2.1, scenario 16"""
    dumped = load_delegation_config(provider="s").model_dump(exclude_none=True, by_alias=False)
    assert not {"agent_options", "persona", "tool_filter"} & dumped.keys()


def test_agent_options_may_be_given_as_a_model() -> None:
    """design §4"""
    options = AgentOptions(model="openai:gpt-5-mini")
    assert load_delegation_config(provider="s", agent_options=options).agent_options == options


def provider_refusal(capabilities: Capabilities, **values: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        check_provider(load_delegation_config(provider="p", **values), provider_name="p", capabilities=capabilities)
    return str(caught.value)


@pytest.mark.parametrize(
    ("lacks", "values", "text"),
    [
        (
            "depth_limit",
            {},
            'tool-subagent: provider "p" cannot enforce maxDepth (no depthLimit capability)'
            " — set maxDepth: 'provider-managed' to leave the recursion budget to the provider",
        ),
        (
            "agent_options",
            {"agent_options": {"model": "m"}},
            'tool-subagent: provider "p" does not support child agentOptions',
        ),
        (
            "agent_options",
            {"enable_model_selection": True},
            'tool-subagent: provider "p" does not support child model selection',
        ),
        (
            "agent_options",
            {"model_selection_settings": True},
            'tool-subagent: provider "p" does not support child model selection',
        ),
        (
            "prepare_continuable",
            {"background_mode": "continuable"},
            'tool-subagent: provider "p" does not support `backgroundMode: continuable`',
        ),
        (
            "tool_filter",
            {"tool_filter": {"deny": ["x"]}},
            'subagent provider "p" does not support the "toolFilter" capability',
        ),
        ("persona", {"persona": ""}, 'subagent provider "p" does not support the "persona" capability'),
    ],
)
def test_a_provider_that_cannot_honour_the_configuration_is_refused(
    lacks: str, values: dict[str, Any], text: str
) -> None:
    """behaviour §2.6, scenarios 10, 11, 170"""
    assert provider_refusal(EVERYTHING.model_copy(update={lacks: False}), **values) == text


def test_provider_checks_run_in_the_order_of_the_contract() -> None:
    """behaviour §2.6: depthLimit, agentOptions, model selection, continuable; then filter and persona."""
    everything: dict[str, Any] = {
        "agent_options": {"model": "m"},
        "enable_model_selection": True,
        "background_mode": "continuable",
        "tool_filter": {"deny": ["x"]},
        "persona": "p",
    }
    fixes: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("maxDepth", {"depth_limit": True}, {}),
        ("agentOptions", {}, {"agent_options": None}),
        ("model selection", {}, {"enable_model_selection": False}),
        ("continuable", {"prepare_continuable": True}, {}),
        ("toolFilter", {"tool_filter": True}, {}),
        ("persona", {}, {}),
    ]
    capabilities = Capabilities()
    for word, gained, dropped in fixes:
        assert word in provider_refusal(capabilities, **everything)
        capabilities = capabilities.model_copy(update=gained)
        everything |= dropped


def test_a_missing_persona_capability_carries_the_seed_code() -> None:
    """behaviour §4.14"""
    with pytest.raises(UnsupportedCapability) as caught:
        check_provider(
            load_delegation_config(provider="p", persona="x", max_depth="provider-managed"),
            provider_name="p",
            capabilities=Capabilities(),
        )
    assert caught.value.code == "UNSUPPORTED_CAPABILITY"


def test_a_capable_provider_is_accepted() -> None:
    """behaviour §2.6, scenario 17"""
    config = load_delegation_config(
        provider="p",
        agent_options={"model": "m"},
        enable_model_selection=True,
        background_mode="continuable",
        tool_filter={"deny": ["x"]},
        persona="x",
    )
    check_provider(config, provider_name="p", capabilities=EVERYTHING)


def test_a_bare_provider_is_accepted_when_it_manages_depth_itself() -> None:
    """behaviour §5.1"""
    config = load_delegation_config(provider="acp", max_depth="provider-managed")
    check_provider(config, provider_name="acp", capabilities=Capabilities())


def test_job_tools_default_to_the_limits_of_the_contract() -> None:
    """behaviour §3.5, §3.7"""
    assert load_job_tools_config() == JobToolsConfig(
        wait_timeout_ms=30_000, max_wait_timeout_ms=600_000, completion_delivery="wakeup", max_consecutive_wakes=3
    )


def test_a_default_wait_above_the_cap_is_refused() -> None:
    """behaviour §3.5, scenario 66"""
    text = jobs_refusal(waitTimeoutMs=700_000)
    assert text == "tool-jobs: waitTimeoutMs (700000) exceeds maxWaitTimeoutMs (600000)"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1.5, "1.5"), (-1, "-1"), (math.nan, "NaN"), (math.inf, "Infinity"), ("3", "3"), (True, "true"), (2**53, 2**53)],
)
def test_a_wake_budget_that_is_no_whole_number_is_refused(value: object, shown: object) -> None:
    """behaviour §3.7, scenario 66"""
    text = jobs_refusal(maxConsecutiveWakes=value)
    assert text == f"tool-jobs: maxConsecutiveWakes ({shown}) must be a whole number of turns"


def test_a_wake_budget_of_none_at_all_is_allowed() -> None:
    """behaviour §3.7"""
    assert load_job_tools_config(max_consecutive_wakes=0).max_consecutive_wakes == 0


@pytest.mark.parametrize("value", [0, -5, 1.5, "30000", True])
def test_a_wait_that_is_no_positive_whole_number_is_refused(value: object) -> None:
    """P13"""
    assert jobs_refusal(wait_timeout_ms=value).startswith("tool-jobs: wait_timeout_ms: ")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "true"),
        (3, "3"),
        (-0.0, "-0"),
        (30000.0, "30000"),
        pytest.param(10**5000, "an integer of 16610 bits", id="enormous"),
        ("a\nb", '"a\\nb"'),
        ("x" * 100, f'"{"x" * 39}…"'),
        ("\ud800", '"\\ud800"'),
        ({"a": 1}, "an object"),
        ([1, 2], "a list of 2"),
        (object(), "a value of type object"),
    ],
)
def test_values_are_shown_short_and_on_one_line(value: object, shown: str) -> None:
    """P13"""
    assert display_value(value) == shown


def test_hidden_text_is_shown_by_its_length_alone() -> None:
    """P14"""
    assert display_value("secret", hide_text=True) == "text of 6 characters"
