"""P13: bad input is refused clearly before anything starts: whatever it is, whichever edge it comes in by."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic.alias_generators import to_camel
from stage import MakeStage, Stage, arguments, start_job

from broker_config import BrokerSettings, SettingsError, load_settings
from subagent_tasks import ConfigurationError, SubagentApp
from subagent_tasks.protocol.models import ToolResult
from subagent_tasks.queue.message import activation_message
from subagent_tasks.queue.publisher import ACTIVATE
from subagent_tasks.sync_host import SyncSession
from subagent_tasks.testing import reply, wait_until

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
NO_TEXT = ANYTHING.filter(lambda value: not isinstance(value, str))
NO_FLAG = ANYTHING.filter(lambda value: value is not None and not isinstance(value, bool))
BLANK_OR_UNCLEAN = st.sampled_from(["", " \n", "a\x00", "\ud800"])
JOB = arguments("a task", background=True)
WRONG: dict[tuple[str, str], tuple[dict[str, Any], st.SearchStrategy[Any]]] = {
    ("subagent", "prompt"): (JOB, NO_TEXT | BLANK_OR_UNCLEAN),
    ("subagent", "description"): (JOB, NO_TEXT),
    ("subagent", "run_in_background"): (JOB, NO_FLAG),
    ("job_output", "job_id"): ({"job_id": "a"}, NO_TEXT),
    ("job_output", "wait"): ({"job_id": "a"}, NO_FLAG),
    ("job_output", "timeout_ms"): ({"job_id": "a", "wait": True}, st.text() | st.booleans() | st.just(float("nan"))),
    ("job_kill", "job_id"): ({"job_id": "a"}, NO_TEXT),
    ("job_kill", "reason"): ({"job_id": "a"}, st.integers() | st.lists(st.text())),
}
"""By tool and field: good arguments, and values that are wrong in that field."""

fuzzed = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def session(stage: Stage) -> Iterator[SyncSession]:
    """A host's session, with no worker anywhere."""
    with stage.app.sync_host() as host:
        yield host.open_session("p13")


@pytest.mark.parametrize(("tool", "field"), WRONG)
def test_a_wrong_field_is_named_and_nothing_starts(stage: Stage, session: SyncSession, tool: str, field: str) -> None:
    """P13: whatever else is right."""
    good, wrong = WRONG[tool, field]

    @fuzzed
    @given(wrong)
    def refused(value: Any) -> None:
        result = session.call(tool, {**good, field: value})
        assert_refused(result)
        assert field in result.text or "wait timeout" in result.text

    refused()
    assert stage.states() == []


@pytest.mark.parametrize("tool", ["subagent", "job_output", "job_kill"])
def test_arguments_of_no_kind_are_refused(stage: Stage, session: SyncSession, tool: str) -> None:
    """P13: what a model wrote instead of an object, and JSON text that is none."""

    @fuzzed
    @given(ANYTHING.filter(lambda value: not isinstance(value, dict)))
    def refused(value: Any) -> None:
        assert_refused(session.call(tool, value))

    refused()
    assert stage.states() == []


def assert_refused(result: ToolResult) -> None:
    """In one bounded line that a model can act on."""
    assert (result.is_error, result.code) == (True, "INVALID_ARGS"), result
    assert result.text.startswith("Error: invalid ")
    assert len(result.text) < 1000


@fuzzed
@given(
    st.sampled_from(["provider", "tool_name", "max_depth", "recovery", "tool_filter", "run_limit_seconds"]), ANYTHING
)
def test_a_declaration_works_or_is_refused_by_its_key(key: str, value: Any) -> None:
    """P13: at the line that declares, not at the first call."""
    app = SubagentApp(BrokerSettings())
    refusal = ""
    try:
        app.add_delegation_tool(**{"provider": "spawn", key: value})
    except ConfigurationError as error:
        refusal = str(error)
    assert not refusal or key in refusal or to_camel(key) in refusal


@fuzzed
@given(st.sampled_from(sorted(BrokerSettings.model_fields)), ANYTHING)
def test_a_setting_works_or_is_refused_by_its_variable(name: str, value: Any) -> None:
    """P13: with the variable an operator sets, and no traceback of the library that checks."""
    refusal = ""
    try:
        load_settings(**{name: value})
    except SettingsError as error:
        refusal = str(error)
    assert not refusal or f"SUBAGENT_TASKS_{name.upper()}" in refusal
    assert "pydantic" not in refusal


def test_a_worker_does_not_start_with_timeouts_in_the_wrong_order(make_stage: MakeStage) -> None:
    """Field fault 2: a run would be delivered again while it still runs; the names of both settings are told."""
    stage = make_stage()
    stage.environment["SUBAGENT_TASKS_RUN_LIMIT_SECONDS"] = "7200"
    worker = stage.worker()
    assert worker.wait(20) != 0
    assert "SUBAGENT_TASKS_RUN_LIMIT_SECONDS=7200 must be below SUBAGENT_TASKS_VISIBILITY_TIMEOUT_SECONDS" in worker.log


async def test_messages_that_nobody_here_wrote_start_nothing_and_stop_no_worker(stage: Stage) -> None:
    """P13, field fault 26: a forged envelope names runs that are not there, calls wrongly, or calls something else."""
    [worker] = stage.ensure(1)
    stage.model.on("p13-after", reply("still here"))
    queue = stage.queue()

    def forged(task: str = ACTIVATE, args: Any = ("run", queue)) -> str:
        message = json.loads(activation_message(task=task, task_id="forged", run_id="forged", queue=queue))
        message["body"] = json.dumps([args, {}, {}])
        return json.dumps(message)

    everything = [forged(), forged(args=[]), forged(args=[1, 2, 3]), forged(args={"a": 1}), forged("os.system")]
    stage.redis.lpush(queue, *everything)
    async with stage.session() as session:
        job_id = await start_job(session, "p13-after")
        await wait_until(lambda: stage.state(job_id) == "settled", description="a run behind them ended")
    assert worker.is_running
    assert stage.states() == ["settled"]
