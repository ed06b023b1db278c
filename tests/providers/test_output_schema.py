"""The subset of JSON Schema that a structured output may have, and what is said of what is outside it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from subagent_tasks.agents.output_schema import DRAFT, MAX_NESTING, MAX_SCHEMA_BYTES, OutputSchema
from subagent_tasks.errors import CallerError


def with_property(schema: Any, **root: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, **root}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def chain(length: int, *, width: int = 1) -> dict[str, Any]:
    """Definitions each of which refers to the next, `width` times."""
    links = {f"d{number}": {"allOf": [{"$ref": f"#/$defs/d{number + 1}"}] * width} for number in range(length)}
    return with_property({"$ref": "#/$defs/d0"}, **{"$defs": {**links, f"d{length}": {"type": "string"}}})


LOOP = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}


OUTSIDE: list[tuple[Any, str]] = [
    (None, "the root: expected a JSON object, got null"),
    ([], "the root: expected a JSON object, got []"),
    ("object", 'the root: expected a JSON object, got "object"'),
    ({}, 'the root: "type" must be "object", got null'),
    ({"type": "array"}, 'the root: "type" must be "object", got "array"'),
    ({"type": ["object"]}, 'the root: "type" must be "object", got ["object"]'),
    ({"type": "object", "$schema": "http://json-schema.org/draft-07/schema#"}, f"$schema: must be {DRAFT}"),
    (with_property({"type": "strin"}), "properties.a.type: 'strin' is not valid"),
    (with_property({"minimum": "1"}), "properties.a.minimum: '1' is not of type 'number'"),
    (with_property({"pattern": "("}), "properties.a.pattern: '(' is not a 'regex'"),
    (with_property({"pattern": "(?=a)"}), 'properties.a.pattern: "(?=a)" has look-around or a back-reference'),
    (with_property({"items": {"pattern": r"(a)\1"}}), "properties.a.items.pattern: "),
    (with_property({"patternProperties": {"^a": {}}}), 'properties.a: "patternProperties" is not supported'),
    (with_property({"items": [True]}), "properties.a.items: [True] is not of type"),
    (with_property(5), "properties.a: 5 is not of type"),
    (with_property({}, required="a"), "required: 'a' is not of type 'array'"),
    (
        with_property({"$ref": "https://example.org/s"}),
        'properties.a: "$ref" must be "#/$defs/<name>", got "https:',
    ),
    (with_property({"$ref": "#"}), 'properties.a: "$ref" must be "#/$defs/<name>", got "#"'),
    (with_property({"$ref": "#/properties/b"}), 'properties.a: "$ref" must be "#/$defs/<name>"'),
    (with_property({"$ref": "#/$defs/none"}), 'properties.a: "$ref" names "#/$defs/none", which is not there'),
    (with_property({"$id": "x"}), 'properties.a: "$id" is not supported'),
    (with_property({"anyOf": [{"$anchor": "x"}]}), 'properties.a.anyOf[0]: "$anchor" is not supported'),
    (with_property({}, **{"$dynamicAnchor": "x"}), 'the root: "$dynamicAnchor" is not supported'),
    (
        with_property({"$ref": "#/$defs/node"}, **{"$defs": {"node": LOOP}}),
        'properties.a.$ref.properties.next: "#/$defs/node" refers back to itself',
    ),
    (with_property({}, **{"$defs": {"node": LOOP}}), '$defs.node.properties.next: "#/$defs/node" refers back'),
    (with_property({}, **{"$defs": {"x": {"$ref": "#/$defs/x"}}}), '$defs.x: "#/$defs/x" refers back to itself'),
    (with_property({"default": math.nan}), "properties.a.default: not a finite number"),
    (with_property({"title": "\ud800"}), "properties.a.title: contains half of a surrogate pair"),
    (with_property({}, required=("a",)), "required: a value of type tuple is not JSON"),
    ({"type": "object", "properties": {1: {}}}, "properties: the key 1 is not a string"),
    (with_property({"title": "x" * MAX_SCHEMA_BYTES}), f"bytes exceed the limit of {MAX_SCHEMA_BYTES}"),
    (with_property(nested(MAX_NESTING)), f"the root: nested deeper than {MAX_NESTING} levels"),
    (chain(1000), f"nested deeper than {MAX_NESTING} levels once every $ref is written out"),
    (chain(20, width=3), "more than 5000 schemas once every $ref is written out"),
]

ROOT_KEYWORDS: dict[str, Any] = {
    "$ref": "#/$defs/x",
    "allOf": [{}],
    "anyOf": [{}],
    "oneOf": [{}],
    "not": {},
    "enum": [{}],
}


@pytest.mark.parametrize(("schema", "words"), OUTSIDE)
def test_what_is_outside_the_subset_is_refused(schema: object, words: str) -> None:
    """behaviour §5.8: the code, where, and why."""
    with pytest.raises(CallerError) as caught:
        OutputSchema.of(schema)
    assert caught.value.code == "UNSUPPORTED_SCHEMA"
    assert str(caught.value).startswith("unsupported JSON schema: ")
    assert words in str(caught.value)


@pytest.mark.parametrize("keyword", ROOT_KEYWORDS)
def test_what_model_apis_refuse_at_the_root_is_refused(keyword: str) -> None:
    """behaviour §5.8: as the parameters of a tool, they would fail with every request."""
    with pytest.raises(CallerError, match=re.escape(f'the root: "{keyword}" may not stand here: put it in a property')):
        OutputSchema.of({"type": "object", keyword: ROOT_KEYWORDS[keyword]})


def test_a_schema_that_contains_itself_is_refused() -> None:
    """P13: an object of the host's program need not be JSON at all."""
    schema = with_property({})
    schema["properties"]["a"] = schema
    with pytest.raises(CallerError, match="nested deeper"):
        OutputSchema.of(schema)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    tricks: list[str]


class Report(BaseModel):
    """What a user's model looks like."""

    title: str = Field(pattern=r"^\w+", max_length=80)
    colour: Colour
    pets: list[Cat | Dog]
    favourite: Cat | Dog | None = Field(default=None, discriminator="kind")
    scores: dict[str, float] = Field(default_factory=dict)
    pair: tuple[int, str]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        MappingProxyType({"type": "object"}),
        {"type": "object", "$schema": DRAFT, "title": "T", "x-ours": {"$ref": "not a schema"}},
        with_property({"format": "date", "anyOf": [{"type": "string"}, {"type": "null"}]}, additionalProperties=False),
        with_property({"type": "string"}, **{"if": {"required": ["a"]}, "then": {"required": ["b"]}}),
        {"type": "object", "properties": {"$ref": {"type": "string"}, "not": {"enum": [1]}, "名": {"const": None}}},
        with_property({"enum": [{"$ref": "data"}, {"$id": "data"}]}),
        with_property(nested(MAX_NESTING - 4)),
        chain(10),
        Report.model_json_schema(),
    ],
)
def test_what_is_inside_the_subset_is_kept_as_it_is(schema: Mapping[str, Any]) -> None:
    """behaviour §5.8: what a model is shown is what was asked for."""
    assert OutputSchema.of(schema).parameters == dict(schema)


def test_later_changes_to_what_was_given_change_nothing() -> None:
    """P12: the schema belongs to the request once it was checked."""
    schema = with_property({"type": "integer"})
    checked = OutputSchema.of(schema)
    schema["properties"]["a"]["type"] = "string"
    assert checked.violations({"a": 1}) == []


REPORT = OutputSchema.of(Report.model_json_schema())


def test_a_value_of_a_users_model_fits_its_schema() -> None:
    """behaviour §5.8: what validates here builds the model."""
    value = {"title": "Pets", "colour": "red", "pets": [{"kind": "cat", "lives": 9}], "pair": [1, "x"]}
    assert REPORT.violations(value) == []
    assert Report.model_validate(value).pets == [Cat(kind="cat", lives=9)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"title": ""}, "title: '' "),
        ({"colour": "green"}, "colour: 'green' is not one of ['red', 'blue']"),
        (
            {"pets": [{"kind": "cat", "lives": 10}]},
            "pets[0]: fits none of 2 alternatives (pets[0].lives: 10 is greater than the maximum of 9 | pets[0].kind",
        ),
        ({"pair": [1]}, "pair: [1] is too short"),
        ({"scores": {"odd key": "x"}}, "scores.odd key: 'x' is not of type 'number'"),
        ({"scores": {"a": math.inf}}, "scores.a: not a finite number"),
        ({"scores": {"\ud800": 1}}, "scores: the key"),
    ],
)
def test_a_violation_is_named_with_its_path(change: dict[str, Any], words: str) -> None:
    """behaviour §10.158: of a value that fits none of several schemas, what is wrong with each."""
    value = {"title": "Pets", "colour": "red", "pets": [], "pair": [1, "x"], **change}
    (violation,) = REPORT.violations(value)
    assert words in violation
    assert violation.isprintable()


def test_a_value_nested_beyond_all_bounds_is_a_violation() -> None:
    """P13: neither an error nor a value that no other JSON reader would take."""
    value: dict[str, Any] = {}
    for _ in range(5000):
        value = {"a": value}
    assert OutputSchema.of({"type": "object"}).violations(value) == ["arguments: nested deeper than 64 levels"]


def test_no_pattern_takes_long_over_any_value() -> None:
    """protocol §4: a value that Python's engine would try for hours would freeze the worker and all its children."""
    schema = OutputSchema.of(with_property({"type": "string", "pattern": "^(a+)+$"}))
    assert schema.violations({"a": "a" * 50_000}) == []
    (violation,) = schema.violations({"a": "a" * 40 + "!"})
    assert violation.endswith("does not match '^(a+)+$'")


def test_a_pattern_is_looked_for_anywhere() -> None:
    """JSON Schema: it is not anchored."""
    assert OutputSchema.of(with_property({"pattern": "b"})).violations({"a": "abc"}) == []


ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
KEYWORDS = st.sampled_from(
    [
        *(
            "type",
            "properties",
            "required",
            "items",
            "anyOf",
            "allOf",
            "not",
            "enum",
            "const",
            "pattern",
            "format",
            "if",
        ),
        *("$ref", "$defs", "$id", "minimum", "additionalProperties", "prefixItems", "patternProperties", "default"),
    ]
)
WORDS = st.sampled_from(["object", "array", "string", "integer", "null", "nonsense", "#/$defs/a", "("])
SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    st.booleans() | WORDS | ANYTHING | st.fixed_dictionaries({"type": WORDS}),
    lambda inner: st.dictionaries(
        KEYWORDS, inner | st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner), max_size=4
    ),
    max_leaves=15,
)


@given(schema=SCHEMAS, definition=SCHEMAS, value=ANYTHING)
def test_any_schema_is_refused_clearly_or_works(schema: Any, definition: Any, value: Any) -> None:
    """P13: never another error, neither here nor when a value is checked."""
    whole = with_property(schema, **{"$defs": {"a": definition}})
    try:
        checked = OutputSchema.of(whole)
    except CallerError as error:
        refusal = error
    else:
        assert checked.parameters == whole
        assert all(": " in violation for violation in checked.violations({"a": value}))
        return
    assert refusal.code == "UNSUPPORTED_SCHEMA"
    assert str(refusal).startswith("unsupported JSON schema: ")


@given(ANYTHING)
def test_anything_at_all_is_refused_clearly(schema: Any) -> None:
    """P13: what has no object root, whatever else it is."""
    with pytest.raises(CallerError, match=r"^unsupported JSON schema: "):
        OutputSchema.of(schema)
