"""Whatever a model passes to a tool is carried out or refused with a code of ours; a refusal starts nothing (P13)."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from subagent_tasks import SubagentError, ToolResult
from subagent_tasks import errors as families
from subagent_tasks.testing import Kit, ScriptedModel, fake_app, reply
from tests.behaviour.bench import job_id_of

CODES = {
    kind.code for kind in vars(families).values() if isinstance(kind, type) and issubclass(kind, SubagentError)
} | {"UNKNOWN_TOOL"}  # fmt: skip
TOOLS = ("subagent", "job_output", "job_list", "job_kill")
FIELDS = ("description", "prompt", "provider", "model", "reasoning_effort", "run_in_background", "job_id", "wait",
          "timeout_ms", "reason")  # fmt: skip

texts = st.text(max_size=20) | st.text(st.sampled_from("a \ud800\x00\u2028é😀:{}"), max_size=20)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.sampled_from((2**63, 10**400, "", " "))
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4))
# Fields that fit, so that a call comes further than its first flaw.
sound = st.fixed_dictionaries(
    {},
    optional={
        "description": st.just("a task"),
        "prompt": st.just("do it"),
        "run_in_background": st.booleans(),
        "job_id": st.sampled_from(("nobody's", "theirs", "ours")),
        "wait": st.booleans(),
        "timeout_ms": st.sampled_from((0, -1, 1, 1.5, 10**400, float("nan"), float("inf"), True)),
    },
)
other = st.dictionaries(st.sampled_from(FIELDS) | texts, values, max_size=2)
arguments = st.tuples(sound, other).map(lambda both: {**both[0], **both[1]})
anything = arguments | arguments.map(json.dumps) | values | values.map(json.dumps) | texts


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kit() -> AsyncIterator[Kit]:
    model = ScriptedModel()
    model.on("", reply("done"))
    async with fake_app(model, settings={"max_active_jobs": 1_000_000}) as kit:
        yield kit


@pytest.fixture(scope="module")
def others() -> dict[str, str]:
    """Stand-ins in the arguments -> ids of jobs, once there are some."""
    return {}


@asynccontextmanager
async def nothing_starts_if_refused(kit: Kit) -> AsyncGenerator[list[ToolResult]]:
    """Put the result in the list: of a refused call no record may be left."""
    records = "*:session:*"
    before = set(await kit.redis.keys(records))
    results: list[ToolResult] = []
    yield results
    (result,) = results
    if result.is_error:
        assert set(await kit.redis.keys(records)) == before, result


async def make_jobs(kit: Kit, others: dict[str, str]) -> None:
    """One that has ended for this session and one for another."""
    if others:
        return
    for name, session in (("ours", kit.session), ("theirs", await kit.host.open_session("another"))):
        started = await session.call("subagent", {"description": "d", "prompt": "p", "run_in_background": True})
        others[name] = job_id_of(started)
        await session.call("job_output", {"job_id": others[name], "wait": True})


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("tool", TOOLS)
@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(given_arguments=anything)
@example(given_arguments="[" * 100_000)
@example(given_arguments='{"description": ' * 100_000)
@example(given_arguments='{"timeout_ms": ' + "1" * 5_000 + "}")
@example(given_arguments='{"job_id": "x", "timeout_ms": NaN}')
@example(given_arguments={"job_id": "ours", "timeout_ms": float("-inf")})
@example(given_arguments={"job_id": "ours", "wait": True, "timeout_ms": 10**400})
async def test_any_arguments_are_carried_out_or_refused(
    kit: Kit, others: dict[str, str], tool: str, given_arguments: Any
) -> None:
    """P13; behaviour §2.7, §3.5."""
    await check(kit, others, tool, given_arguments)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("tool", TOOLS)
async def test_arguments_without_a_bottom_are_refused(kit: Kit, tool: str) -> None:
    """P13: deeper than Python itself can go; not an example of the above, for it cannot be printed."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    refused = await kit.session.call(tool, {"description": deep, "prompt": "do it", "job_id": "x"})
    assert refused.code == "INVALID_ARGS"


async def check(kit: Kit, others: dict[str, str], tool: str, given_arguments: Any) -> None:
    await make_jobs(kit, others)
    if isinstance(given_arguments, dict):
        fields = cast("dict[str, Any]", given_arguments)
        job_id = next((others[name] for name in others if fields.get("job_id") == name), None)
        given_arguments = {**fields, "job_id": job_id} if job_id else fields
    async with nothing_starts_if_refused(kit) as results:
        result = await kit.session.call(tool, given_arguments)
        results.append(result)
    result.text.encode("utf-8")
    json.dumps(result.value)
    assert result.code in CODES if result.is_error else result.code is None
    if result.is_error:
        assert len(result.text) < 4096


@pytest.mark.asyncio(loop_scope="module")
@settings(max_examples=60)
@given(name=texts.filter(lambda name: name not in TOOLS), given_arguments=anything)
async def test_any_other_tool_is_unknown(kit: Kit, name: str, given_arguments: Any) -> None:
    """P13: whatever it is called, and with whatever."""
    result = await kit.session.call(name, given_arguments)
    assert (result.is_error, result.code) == (True, "UNKNOWN_TOOL")
    result.text.encode("utf-8")


@pytest.mark.asyncio(loop_scope="module")
@settings(max_examples=60)
@given(call_id=st.text(min_size=1, max_size=250) | texts | values)
async def test_any_call_id_is_taken_or_refused(kit: Kit, call_id: Any) -> None:
    """P13: it becomes part of a key. Misuse by the host raises."""
    refused: SubagentError | None = None
    result: ToolResult | None = None
    try:
        result = await kit.session.call("job_list", {}, call_id=call_id)
    except SubagentError as error:
        refused = error
    if result is not None:
        assert result.call_id == call_id
        assert call_id is None or (isinstance(call_id, str) and call_id.isprintable() and 0 < len(call_id) <= 200)
    if refused is not None:
        assert refused.code == "INVALID_ARGS"
        str(refused).encode("utf-8")
