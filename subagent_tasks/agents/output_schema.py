"""Which JSON Schema a child's structured output may have, and what is wrong with a value under it (behaviour §5.8).

Pure. The subset is what every model API takes as the parameters of a tool and what is checked in bounded time:

* draft 2020-12; `$schema`, where given, names it;
* the root is `"type": "object"`, with none of `$ref`, `allOf`, `anyOf`, `oneOf`, `not` and `enum` beside it;
* a `$ref` names an entry of the root's own `$defs` (`#/$defs/<name>`): nothing is fetched, nothing refers back to
  itself, and no `$id`, `$anchor`, `$dynamicAnchor` or `$dynamicRef` gives a reference another meaning;
* a `pattern` is a regular expression without look-around and back-references, matched in linear time: over one value of
  a model's Python's own engine could stand still, and the whole worker with it. So there is no `patternProperties`;
* at most 64 KiB of JSON, nested 64 deep, and 5000 schemas once every reference is written out.

What else the draft has is allowed, unknown keywords and `format` as remarks for the model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self, cast

import pydantic_core
from jsonschema import Draft202012Validator, validators
from jsonschema.exceptions import SchemaError, ValidationError
from pydantic import JsonValue

from subagent_tasks.errors import CallerError

DRAFT = "https://json-schema.org/draft/2020-12/schema"
MAX_SCHEMA_BYTES = 64 * 1024
MAX_NESTING = 64
MAX_SUBSCHEMAS = 5000
MAX_VIOLATIONS = 5
MAX_VIOLATION_CHARACTERS = 400

_NOT_AT_THE_ROOT = ("$ref", "allOf", "anyOf", "oneOf", "not", "enum")
_OTHER_REFERENCES = ("$id", "$anchor", "$dynamicAnchor", "$dynamicRef")
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_REFERENCE = re.compile(r"#/\$defs/([A-Za-z0-9._-]+)")

_ONE_SCHEMA = (
    *("items", "contains", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties"),
    *("not", "if", "then", "else", "contentSchema"),
)
_LIST_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAP_OF_SCHEMAS = ("properties", "dependentSchemas")

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class OutputSchema:
    """A schema of the subset. `parameters` is the schema itself, as plain JSON."""

    parameters: dict[str, JsonValue]

    @classmethod
    def of(cls, schema: object) -> Self:
        """Check a schema. Raises `CallerError` (`UNSUPPORTED_SCHEMA`) naming where and why."""
        text = _json_text(schema)
        _check(text)
        return cls(json.loads(text))

    def violations(self, value: object) -> list[str]:
        """What is wrong with a value, each with its path; empty when it fits."""
        flaws = [_at(path, flaw, nowhere="arguments") for path, flaw in _flaws(value)]
        if not flaws:
            validator = _VALIDATOR(self.parameters)
            flaws = [_violation(cast("ValidationError", error)) for error in validator.iter_errors(cast("Any", value))]
        more = len(flaws) - MAX_VIOLATIONS
        return [*flaws[:MAX_VIOLATIONS], *([f"and {more} more"] if more > 0 else [])]


@lru_cache(maxsize=256)
def _matcher(pattern: str) -> pydantic_core.SchemaValidator:
    """Raises `pydantic_core.SchemaError`."""
    return pydantic_core.SchemaValidator(
        pydantic_core.core_schema.str_schema(pattern=pattern, regex_engine="rust-regex")
    )


def _check_pattern(validator: object, pattern: str, value: object, schema: object) -> Iterator[ValidationError]:
    if isinstance(value, str) and not _matcher(pattern).isinstance_python(value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


_VALIDATOR: Any = cast("Any", validators).extend(Draft202012Validator, {"pattern": _check_pattern})


def _json_text(schema: object) -> str:
    if not isinstance(schema, Mapping):
        raise _unsupported((), f"expected a JSON object, got {_shown(schema)}")
    given = dict(cast("Mapping[str, JsonValue]", schema))
    for path, flaw in _flaws(given):
        raise _unsupported(path, flaw)
    text = json.dumps(given, ensure_ascii=False)
    size = len(text.encode())
    if size > MAX_SCHEMA_BYTES:
        raise _unsupported((), f"{size} bytes exceed the limit of {MAX_SCHEMA_BYTES}")
    return text


# The draft's own schema is slow to check against, some milliseconds, and an app has few schemas for many children.
@lru_cache(maxsize=64)
def _check(text: str) -> None:
    parameters: dict[str, JsonValue] = json.loads(text)
    root_type = parameters.get("type")
    if root_type != "object":
        raise _unsupported((), f'"type" must be "object", got {_shown(root_type)}: put other values in a property')
    for keyword in _NOT_AT_THE_ROOT:
        if keyword in parameters:
            raise _unsupported((), f'"{keyword}" may not stand here: put it in a property')
    if parameters.get("$schema", DRAFT) != DRAFT:
        raise _unsupported(("$schema",), f"must be {DRAFT}, got {_shown(parameters['$schema'])}: leave it out")
    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        raise _unsupported(_path_of(error), error.message) from error
    _References(cast("Mapping[str, JsonValue]", parameters.get("$defs", {}))).run(parameters)


class _References:
    """Visits every schema inside a valid one, what a reference names in the reference's place, and counts."""

    def __init__(self, definitions: Mapping[str, JsonValue]) -> None:
        self._definitions = definitions
        self._referred: set[str] = set()
        self._count = 0

    def run(self, root: JsonValue) -> None:
        self._visit(root, (), (), level=0)
        for name, definition in self._definitions.items():
            # What nothing refers to travels with every request all the same.
            if name not in self._referred:
                self._visit(definition, ("$defs", name), (name,), level=1)

    def _visit(self, schema: JsonValue, path: Path, open_names: tuple[str, ...], *, level: int) -> None:
        """`open_names` are the definitions that the schema stands in."""
        self._count += 1
        if self._count > MAX_SUBSCHEMAS:
            raise _unsupported((), f"more than {MAX_SUBSCHEMAS} schemas once every $ref is written out")
        if level > MAX_NESTING:
            raise _unsupported((), f"nested deeper than {MAX_NESTING} levels once every $ref is written out")
        if not isinstance(schema, dict):
            return
        for keyword in _OTHER_REFERENCES:
            if keyword in schema:
                raise _unsupported(path, f'"{keyword}" is not supported: refer to an entry of $defs with "$ref"')
        if "patternProperties" in schema:
            raise _unsupported(path, '"patternProperties" is not supported: name the properties')
        if "pattern" in schema:
            try:
                _matcher(str(schema["pattern"]))
            except pydantic_core.SchemaError:
                why = 'has look-around or a back-reference, or is too large: "pattern" supports neither'
                raise _unsupported((*path, "pattern"), f"{_shown(schema['pattern'])} {why}") from None
        if "$ref" in schema:
            name = self._name(schema["$ref"], path)
            if name in open_names:
                raise _unsupported(path, f'"#/$defs/{name}" refers back to itself: a schema may not be recursive')
            self._referred.add(name)
            self._visit(self._definitions[name], (*path, "$ref"), (*open_names, name), level=level + 1)
        for steps, inner in _inner_schemas(schema):
            self._visit(inner, (*path, *steps), open_names, level=level + 1)

    def _name(self, reference: JsonValue, path: Path) -> str:
        found = _REFERENCE.fullmatch(str(reference))
        if found is None:
            raise _unsupported(path, f'"$ref" must be "#/$defs/<name>", got {_shown(reference)}')
        if found[1] not in self._definitions:
            raise _unsupported(path, f'"$ref" names {_shown(reference)}, which is not there')
        return found[1]


def _inner_schemas(schema: Mapping[str, Any]) -> Iterator[tuple[Path, JsonValue]]:
    for keyword in _ONE_SCHEMA:
        if keyword in schema:
            yield (keyword,), schema[keyword]
    for keyword in _LIST_OF_SCHEMAS:
        for index, inner in enumerate(schema.get(keyword, ())):
            yield (keyword, index), inner
    for keyword in _MAP_OF_SCHEMAS:
        for name, inner in schema.get(keyword, {}).items():
            yield (keyword, name), inner


def _flaws(value: object) -> Iterator[tuple[Path, str]]:
    """What JSON text cannot carry, and so would be something else once it was written down."""
    level: list[tuple[Path, object]] = [((), value)]
    for _ in range(MAX_NESTING):
        inner: list[tuple[Path, object]] = []
        for path, found in level:
            match found:
                case dict():
                    items = cast("dict[object, object]", found).items()
                    yield from (
                        (path, f"the key {_shown(key)} is not a string") for key, _ in items if not _is_text(key)
                    )
                    inner += [((*path, str(key)), item) for key, item in items]
                case list():
                    inner += [((*path, index), item) for index, item in enumerate(cast("list[object]", found))]
                case float() if not math.isfinite(found):
                    yield path, "not a finite number"
                case str() if not _is_text(found):
                    yield path, "contains half of a surrogate pair"
                case None | bool() | int() | float() | str():
                    pass
                case _:
                    yield path, f"a value of type {type(found).__name__} is not JSON"
        if not inner:
            return
        level = inner
    yield (), f"nested deeper than {MAX_NESTING} levels"


def _is_text(value: object) -> bool:
    return isinstance(value, str) and not _HALF_PAIR.search(value)


def _violation(error: ValidationError) -> str:
    path, message = _path_of(error), error.message
    if error.context:
        # Fits none of several schemas: which was meant is for the model to know, so each says what is wrong.
        first = {inner.relative_schema_path[0]: _violation(inner) for inner in reversed(error.context)}
        message = f"fits none of {len(first)} alternatives ({' | '.join(reversed(first.values()))})"
    return _at(path, message, nowhere="arguments")


def _path_of(error: ValidationError | SchemaError) -> Path:
    return tuple(error.absolute_path)


def _unsupported(path: Path, why: str) -> CallerError:
    return CallerError(f"unsupported JSON schema: {_at(path, why, nowhere='the root')}", code="UNSUPPORTED_SCHEMA")


def _at(path: Path, what: str, *, nowhere: str) -> str:
    return f"{_spelled(path) or nowhere}: {_cut(what)}"


def _spelled(path: Path) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    return _cut(text.encode("utf-8", "replace").decode())


def _cut(text: str) -> str:
    """A message quotes the value first and says last what is wrong with it: both ends are kept."""
    half = MAX_VIOLATION_CHARACTERS // 2
    return text if len(text) <= MAX_VIOLATION_CHARACTERS else f"{text[:half]} … {text[-half:]}"


def _shown(value: object) -> str:
    try:
        return _cut(json.dumps(value, ensure_ascii=True))
    except (TypeError, ValueError, RecursionError):
        return f"a value of type {type(value).__name__}"
