"""Arbitrary valid values of the wire models, and arbitrary JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import strategies as st

from subagent_tasks.errors import SubagentError
from subagent_tasks.protocol.lifecycle import State
from subagent_tasks.protocol.models import (
    MAX_SAFE_INTEGER,
    AgentOptions,
    Block,
    ChildRequest,
    ChildResult,
    InboxEntry,
    JobSnapshot,
    Notice,
    Outcome,
    ToolCall,
    ToolDefinition,
    ToolFilter,
    ToolResult,
    TranscriptEvent,
    Usage,
    Wire,
    text_block,
)
from subagent_tasks.protocol.records import RECORD_VERSION, RunSpec

W = TypeVar("W", bound=Wire)

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
"""Every character that UTF-8 can encode."""
any_texts = st.text(max_size=30) | st.text(st.sampled_from("a\ud800\udfff\x00\u2028é😀\n"), max_size=30)
"""Lone surrogates and NUL among them: what broken model output and file names hold."""
names = texts.filter(bool)
counts = st.integers(0, MAX_SAFE_INTEGER)
times = st.integers(1, MAX_SAFE_INTEGER).map(str)
ids = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=200)


def json_values(text: st.SearchStrategy[str] = texts) -> st.SearchStrategy[Any]:
    """Any JSON value whose texts are those."""
    leaves = (
        st.none()
        | st.booleans()
        | st.integers(-(2**70), 2**70)
        | st.floats(allow_nan=False, allow_infinity=False)
        | text
    )
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4), max_leaves=8
    )


def json_objects(text: st.SearchStrategy[str] = texts) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(text, json_values(text), max_size=4)


def _built(model: type[W], /, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[W]:
    # `st.builds` would go by the models' signatures, which name the wire's spelling.
    return st.fixed_dictionaries(fields).map(lambda values: model(**values))


def _maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def blocks(text: st.SearchStrategy[str] = texts) -> st.SearchStrategy[tuple[Block, ...]]:
    of_text = text.map(text_block)
    return st.lists(of_text | json_objects(text), max_size=3).map(tuple)


usages = _built(Usage, requests=counts, input_tokens=counts, output_tokens=counts, tool_calls=counts)
requests = _built(
    ChildRequest,
    label=texts,
    prompt=texts,
    agent_options=_maybe(
        _built(
            AgentOptions,
            provider=_maybe(names),
            model=_maybe(names),
            reasoning_effort=_maybe(names),
            max_tokens=_maybe(st.integers(1, MAX_SAFE_INTEGER)),
        )
    ),
    persona=_maybe(texts),
    tool_filter=_maybe(
        _built(
            ToolFilter,
            allow=_maybe(st.lists(texts, max_size=3).map(tuple)),
            deny=_maybe(st.lists(texts, max_size=3).map(tuple)),
        )
    ),
    max_depth=_maybe(counts),
    output_schema=_maybe(json_objects()),
)
specs = _built(
    RunSpec,
    provider=names,
    tool=texts,
    queue=names,
    label=texts,
    call_id=_maybe(ids),
    request=requests,
    may_resume=st.booleans(),
    run_limit_seconds=st.floats(0, 1e9),
    owner_queue=_maybe(names),
)


def results(text: st.SearchStrategy[str] = texts) -> st.SearchStrategy[ChildResult]:
    return _built(
        ChildResult,
        stop_reason=st.sampled_from(("completed", "aborted", "error", "max-tokens", "refusal")) | text,
        output=blocks(text),
        diagnostic=_maybe(text),
        structured=json_values(text),
        usage=_maybe(usages),
    )


def outcomes(text: st.SearchStrategy[str] = texts) -> st.SearchStrategy[Outcome]:
    return _built(
        Outcome,
        status=st.sampled_from(("completed", "killed", "failed")),
        stop_reason=text,
        output=blocks(text),
        diagnostic=_maybe(text),
        structured=json_values(text),
        usage=_maybe(usages),
        error=_maybe(text),
        dispose_error=_maybe(text),
        detail=_maybe(text),
    )


def jobs(text: st.SearchStrategy[str] = texts) -> st.SearchStrategy[JobSnapshot]:
    return _built(
        JobSnapshot,
        id=ids,
        label=text,
        status=st.sampled_from(("queued", "running", "stopping", "completed", "killed", "failed")),
        detail=_maybe(text),
        started_at=counts,
        finished_at=_maybe(counts),
    )


entries = _built(InboxEntry, message_id=ids, lane=st.sampled_from(("next-turn", "next-step")), text=texts, source=texts)
events = _built(TranscriptEvent, seq=counts, at_ms=counts, kind=texts, data=json_objects())
notices = _built(
    Notice,
    id=ids,
    kind=texts,
    session_id=ids,
    sender_id=ids,
    text=texts,
    blocks=blocks(),
    summary=texts,
    source=texts,
    usage=_maybe(usages),
)
calls = _built(ToolCall, call_id=_maybe(ids), name=texts, arguments=json_objects() | texts)
tool_results = _built(
    ToolResult, call_id=_maybe(ids), text=texts, value=json_values(), is_error=st.booleans(), code=_maybe(texts)
)
definitions = _built(ToolDefinition, name=texts, description=texts, parameters=json_objects())

WIRE_VALUES = {
    "ChildRequest": requests,
    "RunSpec": specs,
    "ChildResult": results(),
    "Outcome": outcomes(),
    "InboxEntry": entries,
    "TranscriptEvent": events,
    "JobSnapshot": jobs(),
    "ToolCall": calls,
    "ToolResult": tool_results,
    "ToolDefinition": definitions,
    "Notice": notices,
}
"""One strategy for each model that crosses the wire."""


def refusal(work: Callable[[], object]) -> SubagentError | None:
    """What the work is refused with, if it is; any other error is raised."""
    try:
        work()
    except SubagentError as refused:
        return refused
    return None


@st.composite
def records(draw: st.DrawFn) -> dict[str, str]:
    """A record's fields as the scripts write them."""
    state = draw(st.sampled_from(State))
    numbers = {name: str(draw(counts)) for name in ("depth", "token", "seq", "attempt")}
    fields = {
        "version": str(draw(st.integers(0, RECORD_VERSION))),
        "id": draw(ids),
        "owner": draw(ids),
        "root": draw(ids),
        "mode": draw(st.sampled_from(("foreground", "background"))),
        "state": state.value,
        "spec": draw(specs).to_json(),
        "created_at": draw(times),
        **numbers,
    }
    optional = {
        **dict.fromkeys(("worker", "driver", "caller", "episode", "kill", "kill_reason", "digest"), texts),
        **dict.fromkeys(("started_at", "claimed_at", "finished_at"), times),
    }
    fields |= {name: draw(value) for name, value in optional.items() if draw(st.booleans())}
    if state is State.SETTLED:
        outcome = draw(outcomes())
        fields |= {"outcome": outcome.to_json(), "status": outcome.status, "detail": outcome.detail or ""}
    return fields
