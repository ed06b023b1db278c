"""Which arguments of a tool call are accepted, which route they take, and how the others are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from subagent_tasks.errors import InvalidArguments, ToolError
from subagent_tasks.tools.arguments import (
    MAX_NESTING,
    DelegationArguments,
    JobKillArguments,
    JobOutputArguments,
    check_job_label,
    foreground_or_background,
    parse_delegation,
    parse_job_kill,
    parse_job_list,
    parse_job_output,
    wait_ms,
)
from subagent_tasks.tools.config import load_delegation_config, load_job_tools_config


def delegation(**extra: Any) -> dict[str, Any]:
    return {"description": "greet", "prompt": "say hello", **extra}


def refusal(arguments: dict[str, Any] | str, **limits: Any) -> str:
    with pytest.raises(InvalidArguments) as caught:
        parse_delegation(arguments, **limits)
    assert caught.value.code == "INVALID_ARGS"
    text = str(caught.value)
    assert text.startswith("invalid arguments: ")
    return text.removeprefix("invalid arguments: ")


def nested(levels: int) -> dict[str, Any]:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return {"value": value}


# --- the delegation tool ----------------------------------------------------------------------------------


def test_plain_arguments_are_read() -> None:
    """behaviour §2.2"""
    assert parse_delegation(delegation()) == DelegationArguments(description="greet", prompt="say hello")


def test_every_declared_field_is_read() -> None:
    """behaviour §2.2"""
    parsed = parse_delegation(delegation(provider="p", model="m", reasoning_effort="low", run_in_background=True))
    assert parsed == DelegationArguments(
        description="greet",
        prompt="say hello",
        provider="p",
        model="m",
        reasoning_effort="low",
        run_in_background=True,
    )


def test_undeclared_keys_are_accepted_and_ignored() -> None:
    """behaviour §2.2"""
    assert parse_delegation(delegation(max_tokens=5, depth={"a": 1})) == parse_delegation(delegation())


@pytest.mark.parametrize(
    ("change", "violation"),
    [
        ({"description": 5}, "description: expected a string, got 5"),
        ({"prompt": None}, "prompt: expected a string, got null"),
        ({"prompt": {"text": "secret"}}, "prompt: expected a string, got an object"),
        ({"provider": None}, "provider: expected a string, got null"),
        ({"model": ["m"]}, "model: expected a string, got a list of 1"),
        ({"reasoning_effort": True}, "reasoning_effort: expected a string, got true"),
        ({"run_in_background": "true"}, 'run_in_background: expected true or false, got "true"'),
        ({"run_in_background": 1}, "run_in_background: expected true or false, got 1"),
        ({"run_in_background": None}, "run_in_background: expected true or false, got null"),
        ({"prompt": "a\x00b"}, "prompt: contains a NUL character at position 1; remove it"),
        ({"prompt": "ab\ud83d"}, "prompt: contains half of a surrogate pair at position 2; remove it"),
        ({"description": "\x00"}, "description: contains a NUL character at position 0; remove it"),
        ({"prompt": ""}, "prompt: empty; say what the agent is to do"),
        ({"prompt": " \n\t"}, "prompt: empty; say what the agent is to do"),
        ({"description": "é" * 2049}, "description: 4098 bytes of UTF-8 exceed the limit of 4096; shorten it"),
    ],
)
def test_a_violation_names_field_value_and_fix(change: dict[str, Any], violation: str) -> None:
    """behaviour §2.7, P13"""
    text = refusal(delegation(**change))
    assert text.startswith(violation)
    assert "secret" not in text


def test_all_violations_are_told_at_once() -> None:
    """behaviour §2.7"""
    assert refusal({"prompt": 5, "run_in_background": "no"}) == (
        "description: required, but missing; give a string; prompt: expected a string, got 5;"
        ' run_in_background: expected true or false, got "no"; give a boolean or leave it out'
    )


@pytest.mark.parametrize("text", ["", "{not json", "null", '["a"]', "secret prompt"])
def test_arguments_that_are_no_object_are_refused_without_showing_them(text: str) -> None:
    """behaviour §7.13, P14"""
    assert refusal(text) == (
        f"arguments: expected a JSON object, got text of {len(text)} characters; send one object with the named fields"
    )


def test_an_empty_description_is_fine_outside_one_shot_background() -> None:
    """behaviour §3.3, §11.3"""
    assert parse_delegation(delegation(description="")).description == ""


@pytest.mark.parametrize("label", ["", "  "])
def test_a_job_without_a_label_is_refused(label: str) -> None:
    """behaviour §3.3"""
    with pytest.raises(InvalidArguments, match=r"^invalid job label: expected a non-empty string$"):
        check_job_label(label)


def test_a_prompt_over_the_limit_is_refused_with_both_sizes() -> None:
    """P13, protocol §6"""
    text = refusal(delegation(prompt="é" * 6), max_prompt_bytes=11)
    assert text == "prompt: 12 bytes of UTF-8 exceed the limit of 11; shorten it"


def test_a_prompt_at_the_limit_is_accepted() -> None:
    """protocol §6: the limit counts UTF-8 bytes."""
    assert parse_delegation(delegation(prompt="é" * 6), max_prompt_bytes=12).prompt == "é" * 6


def test_ordinary_unicode_is_accepted() -> None:
    """P13: astral characters are whole in Python."""
    assert parse_delegation(delegation(prompt="你好 😀 \n\t")).prompt == "你好 😀 \n\t"


def test_bottomless_arguments_are_refused() -> None:
    """P13: they would overflow whoever hashes or stores the call."""
    assert refusal(delegation(extra=nested(100_000))).startswith(f"arguments: nested deeper than {MAX_NESTING} levels")


def test_arguments_that_hold_themselves_are_refused() -> None:
    """P13"""
    arguments = delegation()
    arguments["self"] = arguments
    assert "nested deeper" in refusal(arguments)


def test_a_wide_web_of_shared_objects_is_walked_once_a_level() -> None:
    """P13: 2**50 paths, 50 objects."""
    value: Any = 1
    for _ in range(50):
        value = [value, value]
    assert parse_delegation(delegation(extra=value)).prompt == "say hello"


@pytest.mark.parametrize(
    ("values", "argument", "route"),
    [
        ({}, None, "foreground"),
        ({}, True, "background"),
        ({}, False, "foreground"),
        ({"background_mode": "continuable"}, None, "background"),
        ({"background_mode": "continuable"}, True, "background"),
        ({"background_mode": "continuable"}, False, "foreground"),
        ({"enable_run_in_background": False}, None, "foreground"),
        ({"enable_run_in_background": False}, False, "foreground"),
        ({"enable_run_in_background": False, "background_mode": "continuable"}, None, "foreground"),
    ],
)
def test_the_route_follows_argument_then_mode(values: dict[str, Any], argument: bool | None, route: str) -> None:
    """behaviour §2.7 step 9, scenarios 38, 78, 79"""
    arguments = DelegationArguments(description="d", prompt="p", run_in_background=argument)
    assert foreground_or_background(arguments, load_delegation_config(provider="s", **values)) == route


def test_a_forced_background_call_is_refused_when_background_is_off() -> None:
    """behaviour §2.7 step 8, scenario 3"""
    config = load_delegation_config(provider="s", enable_run_in_background=False)
    with pytest.raises(ToolError) as caught:
        foreground_or_background(parse_delegation(delegation(run_in_background=True)), config)
    assert str(caught.value) == ("run_in_background is disabled for this tool instance (enableRunInBackground: false)")


@pytest.mark.parametrize("field", ["provider", "model", "reasoning_effort"])
@pytest.mark.parametrize("value", ["x", ""])
@pytest.mark.parametrize("settings", [{}, {"model_selection_settings": True}], ids=["off", "undecided"])
def test_a_forced_selection_is_refused_when_selection_is_off(field: str, value: str, settings: dict[str, Any]) -> None:
    """behaviour §6.1, scenario 169"""
    arguments = parse_delegation(delegation(**{field: value}))
    with pytest.raises(ToolError, match=r"^child model selection is disabled for this tool instance$"):
        foreground_or_background(arguments, load_delegation_config(provider="s", **settings))


def test_selection_is_checked_before_background() -> None:
    """behaviour §2.7: step 5 before step 8."""
    config = load_delegation_config(provider="s", enable_run_in_background=False)
    with pytest.raises(ToolError, match="model selection"):
        foreground_or_background(parse_delegation(delegation(model="m", run_in_background=True)), config)


@pytest.mark.parametrize(
    ("values", "decided"), [({"enable_model_selection": True}, False), ({"model_selection_settings": True}, True)]
)
def test_an_open_selection_passes(values: dict[str, Any], decided: bool) -> None:
    """behaviour §6.1"""
    config = load_delegation_config(provider="s", **values)
    arguments = parse_delegation(delegation(model="m"))
    assert foreground_or_background(arguments, config, session_selects_model=decided) == "foreground"


# --- the job tools ----------------------------------------------------------------------------------------


def test_job_output_arguments_are_read() -> None:
    """behaviour §3.5"""
    parsed = parse_job_output({"job_id": "j", "wait": True, "timeout_ms": 1.5, "more": 1})
    assert parsed == JobOutputArguments(job_id="j", wait=True, timeout_ms=1.5)


def test_job_output_does_not_wait_by_default() -> None:
    """behaviour §3.5"""
    assert parse_job_output({"job_id": "j"}) == JobOutputArguments(job_id="j", wait=False, timeout_ms=None)


def test_job_kill_arguments_are_read() -> None:
    """behaviour §3.5"""
    assert parse_job_kill({"job_id": "j", "reason": "r"}) == JobKillArguments(job_id="j", reason="r")


@pytest.mark.parametrize("parse", [parse_job_output, parse_job_kill])
def test_an_empty_job_id_is_refused_with_the_fixed_text(parse: Any) -> None:
    """behaviour §3.5, scenario 69"""
    with pytest.raises(InvalidArguments) as caught:
        parse({"job_id": ""})
    assert str(caught.value) == 'invalid job_id: expected a non-empty string, got ""'


@pytest.mark.parametrize("parse", [parse_job_output, parse_job_kill])
def test_a_missing_job_id_is_an_argument_violation(parse: Any) -> None:
    """behaviour §3.5"""
    with pytest.raises(InvalidArguments, match=r"^invalid arguments: job_id: required, but missing; give a string$"):
        parse({})


@pytest.mark.parametrize(
    ("timeout_ms", "shown"),
    [(0, "0"), (-5, "-5"), (-0.5, "-0.5"), (math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")],
)
def test_a_wait_of_no_positive_length_is_refused(timeout_ms: float, shown: str) -> None:
    """behaviour §3.5"""
    with pytest.raises(InvalidArguments) as caught:
        parse_job_output({"job_id": "j", "wait": True, "timeout_ms": timeout_ms})
    assert str(caught.value) == (f"invalid wait timeout: expected a positive number of milliseconds, got {shown}")


def test_a_timeout_without_a_wait_means_nothing() -> None:
    """behaviour §3.5: models fill unused fields with 0."""
    assert parse_job_output({"job_id": "j", "wait": False, "timeout_ms": 0}).wait is False


@pytest.mark.parametrize(("field", "value"), [("timeout_ms", "5"), ("timeout_ms", True), ("wait", 1), ("wait", "true")])
def test_job_output_types_are_strict(field: str, value: object) -> None:
    """P13"""
    with pytest.raises(InvalidArguments, match=f"^invalid arguments: {field}: expected"):
        parse_job_output({"job_id": "j", field: value})


@pytest.mark.parametrize(
    ("timeout_ms", "waited"),
    [
        (None, 30_000),
        (5, 5),
        (0.2, 1),
        (1.5, 2),
        (600_000, 600_000),
        (10**9, 600_000),
        pytest.param(10**400, 600_000, id="enormous"),
    ],
)
def test_the_wait_is_what_was_asked_or_the_default_under_the_cap(timeout_ms: float | None, waited: int) -> None:
    """behaviour §3.5, scenario 68"""
    arguments = JobOutputArguments(job_id="j", wait=True, timeout_ms=timeout_ms)
    assert wait_ms(arguments, load_job_tools_config()) == waited


def test_a_kill_reason_is_not_shown_in_a_refusal() -> None:
    """P14"""
    with pytest.raises(InvalidArguments) as caught:
        parse_job_kill({"job_id": "j", "reason": "secret\x00"})
    assert "secret" not in str(caught.value)


def test_job_list_ignores_what_it_is_given() -> None:
    """behaviour §3.5"""
    parse_job_list({"anything": 1})


def test_job_list_still_wants_an_object() -> None:
    """behaviour §7.13"""
    with pytest.raises(InvalidArguments, match="expected a JSON object"):
        parse_job_list("[")
