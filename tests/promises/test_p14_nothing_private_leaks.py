"""P14: what a run is about stands in its record and in its model's requests, and nowhere an operator's tools look."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import pytest
from stage import MakeStage, Stage, job, notices_of, start_job

from subagent_tasks.testing import call_tool, fail, reply, wait_until

SECRETS = {
    "prompt": "zebra-prompt",
    "output": "zebra-output",
    "tool input": "zebra-input",
    "tool error": "tripped over zebra",
    "start error": "cannot start: zebra",
    "model error": "zebra-model-error",
    "kill reason": "zebra-reason",
    "credential": "zebra-api-key",
}
PLACES = ("log", "events", "inspected", "host_log", "status", "doctor")


@dataclass(frozen=True)
class Traces:
    """Where a secret must not be, read once every run that knew one has ended."""

    log: str
    events: str
    inspected: str
    host_log: str
    status: str
    doctor: str
    diagnostics: list[str]


@pytest.fixture(scope="module")
def traces(make_stage: MakeStage) -> Traces:
    """Runs that complete, fail in a tool, in the model and at their start, and are killed; everything is watched."""
    stage = make_stage(environment={"OPENAI_API_KEY": SECRETS["credential"]})
    worker = stage.worker(options=("-E",), log_level="DEBUG").wait_ready()
    with _celery_events(stage) as events, _logged() as lines:
        inspected, diagnostics = asyncio.run(_run_everything(stage))
        asyncio.run(
            wait_until(
                lambda: sum(event["type"] == "task-succeeded" for event in events) == 5, description="all events came"
            )
        )
    assert any(event["type"] == "task-received" for event in events)
    status = stage.run("-m", "subagent_tasks", "status", "--json")
    doctor = stage.run("-m", "subagent_tasks", "doctor", "agents:app")
    return Traces(worker.log, json.dumps(events), inspected, "\n".join(lines), status, doctor, diagnostics)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("what", SECRETS)
def test_no_secret_is_seen(traces: Traces, place: str, what: str) -> None:
    """P14: the worker's log, Celery's events, `inspect active`, what the host logs, `status` and the doctor."""
    text = getattr(traces, place)
    at = text.find(SECRETS[what])
    assert at < 0, text[max(0, at - 300) : at + 100]


def test_diagnostics_hold_no_words_of_a_model_or_a_tool(traces: Traces) -> None:
    """P14: what a job's status and its notice say of a failure; at most 4096 bytes."""
    for text in traces.diagnostics:
        assert len(text.encode()) <= 4096
        assert not [secret for secret in SECRETS.values() if secret in text], text


async def _run_everything(stage: Stage) -> tuple[str, list[str]]:
    prompt = SECRETS["prompt"]
    stage.model.on(f"{prompt} good", [call_tool("note", {"text": SECRETS["tool input"]}), reply(SECRETS["output"])])
    stage.model.on(f"{prompt} trip", [call_tool("trip", {"text": "zebra"}), reply(SECRETS["output"])])
    stage.model.on(f"{prompt} bad", fail(400, message=SECRETS["model error"]))
    stage.model.on(f"{prompt} long", [call_tool("hold", {"text": SECRETS["tool input"]}), reply("never")])
    async with stage.session() as session:
        jobs = [await start_job(session, f"{prompt} {word}") for word in ("good", "trip", "bad", "long")]
        broken = await start_job(session, "zebra", tool="subagent_broken")
        await stage.noted(f"{SECRETS['tool input']} begun")
        inspected = await asyncio.to_thread(stage.run, "-m", "celery", "-A", "agents", "inspect", "active", "--json")
        assert jobs[3] in inspected
        await session.kill(jobs[3], SECRETS["kill reason"])
        notices = await notices_of(session, 5)
        bad = await job(session, jobs[2])
    # The provider's own error text is its author's, and is told to the parent as it is (behaviour §2.10).
    told = [notice.text for notice in notices if notice.sender_id != broken]
    return inspected, [str(bad["job"]["detail"]), *told]


@contextmanager
def _celery_events(stage: Stage) -> Generator[list[dict[str, Any]]]:
    """What Flower would receive."""
    events: list[dict[str, Any]] = []
    ready = threading.Event()
    celery = cast("Any", stage.app.celery)
    with celery.connection_for_read() as connection:
        receiver: Any = celery.events.Receiver(connection, handlers={"*": events.append})

        def say_ready(*_: object, **__: object) -> None:
            ready.set()

        def capture() -> None:
            receiver.capture(limit=None, timeout=None, wakeup=False)

        receiver.on_consume_ready = say_ready
        thread = threading.Thread(target=capture, daemon=True)
        thread.start()
        assert ready.wait(5)
        yield events
        receiver.should_stop = True
        thread.join(5)
        assert not thread.is_alive()


@contextmanager
def _logged() -> Generator[list[str]]:
    """Every line this process, which is the host, logs under our name at any level, with its fields."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.getMessage()} {record.__dict__}")

    ours, handler = logging.getLogger("subagent_tasks"), Keep()
    level = ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.DEBUG)
    try:
        yield lines
    finally:
        ours.removeHandler(handler)
        ours.setLevel(level)
