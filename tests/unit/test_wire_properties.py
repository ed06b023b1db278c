"""Any valid value crosses the wire unharmed; any other text is refused with an error of ours."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import wire_values
from hypothesis import given
from hypothesis import strategies as st
from wire_values import WIRE_VALUES, any_texts, ids, json_objects, json_values, records, refusal

from subagent_tasks.protocol.models import Outcome, Wire
from subagent_tasks.protocol.records import LISTED, read_record, read_snapshot
from subagent_tasks.queue.message import activation_message, task_of


def test_every_wire_model_is_tried() -> None:
    """A model without a strategy, here or inside another, would go untested."""
    inside = {"AgentOptions", "ToolFilter", "Usage"}
    # Of a provider's declaration: it is never sent.
    named = {model.__name__ for model in _models(Wire) if model.__module__.startswith("subagent_tasks.protocol")}
    assert named - {"Capabilities"} == {*WIRE_VALUES, *inside}


@pytest.mark.parametrize("name", WIRE_VALUES)
@given(data=st.data())
def test_what_is_written_is_read(name: str, data: st.DataObject) -> None:
    """style.md: one JSON per wire model; whatever a valid value holds."""
    value = data.draw(WIRE_VALUES[name])
    assert _exact(type(value).model_validate_json(value.to_json())) == _exact(value)


@given(wire_values.outcomes(any_texts))
def test_what_no_store_takes_is_replaced_once(outcome: Outcome) -> None:
    """models: lone surrogates become `?`, and what was read is written the same again."""
    written = outcome.to_json()
    assert Outcome.model_validate_json(written.encode("utf-8")).to_json() == written


@given(records())
def test_a_record_is_read_as_it_was_written(fields: dict[str, str]) -> None:
    """Every field, and the listing's view of it is the record's."""
    record = read_record(fields)
    shown = ("id", "owner", "root", "mode", "token", "seq", "attempt", "depth", "created_at", "state")
    assert {name: str(getattr(record, name)) for name in shown} == {name: fields[name] for name in shown}
    optional = ("worker", "driver", "caller", "episode", "kill", "kill_reason", "digest", "started_at", "finished_at")
    assert {name: str(getattr(record, name)) for name in optional if name in fields} == {
        name: fields[name] for name in optional if name in fields
    }
    assert record.spec.to_json() == fields["spec"]
    assert (record.outcome.to_json() if record.outcome else None) == fields.get("outcome")
    listed = read_snapshot({name: value for name, value in fields.items() if name in LISTED})
    # An empty detail is none.
    assert listed == record.snapshot().model_copy(update={"detail": record.snapshot().detail or None})


@given(records(), st.data())
def test_a_broken_record_is_refused_as_such(fields: dict[str, str], data: st.DataObject) -> None:
    """P13: one field is missing, or holds anything."""
    name = data.draw(st.sampled_from(sorted(fields)))
    broken = any_texts | json_values(any_texts).map(json.dumps)
    if data.draw(st.booleans()):
        fields[name] = data.draw(broken)
    else:
        del fields[name]
    for read in (lambda: read_record(fields), lambda: read_record(fields).snapshot(), lambda: read_snapshot(fields)):
        refused = refusal(read)
        assert refused is None or refused.code in ("UNREADABLE_RECORD", "UNSUPPORTED_VERSION")


@given(ids, ids, ids, ids)
def test_an_activation_names_run_and_queue_whatever_they_are(task: str, task_id: str, run_id: str, queue: str) -> None:
    """Ids come from callers."""
    text = activation_message(task=task, task_id=task_id, run_id=run_id, queue=queue)
    assert json.loads(json.loads(text)["body"])[0] == [run_id, queue]
    assert task_of(text) == task


@given(
    any_texts
    | (json_values(any_texts) | st.fixed_dictionaries({"headers": json_values() | json_objects()})).map(json.dumps)
    | st.integers(1, 200_000).map("[".__mul__)
)
def test_whatever_lies_in_a_queue_calls_something_or_nothing(text: str) -> None:
    """queue.message: anybody may push into a list."""
    assert isinstance(task_of(text), str)


def _models(root: type[Wire]) -> Iterator[type[Wire]]:
    for model in root.__subclasses__():
        yield model
        yield from _models(model)


def _exact(value: Wire) -> str:
    """To be compared without taking 1, 1.0 and True for the same."""
    return repr(value)
