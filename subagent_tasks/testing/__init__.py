"""The test kit: a user's own tests of delegation need nothing else (docs/testing.md)."""

from __future__ import annotations

from subagent_tasks.testing.checks import assert_no_leaked_keys, assert_settled
from subagent_tasks.testing.fake_server import FakeServer
from subagent_tasks.testing.faults import (
    FaultyServer,
    age_lease,
    cut,
    end_outage,
    freeze_server,
    lose_reply,
    refuse,
    restart_server,
)
from subagent_tasks.testing.kit import Kit, fake_app
from subagent_tasks.testing.processes import WorkerProcess, kill_worker
from subagent_tasks.testing.script import (
    Script,
    call_tool,
    call_tools,
    disconnect,
    fail,
    reply,
    stall,
    wait_for,
)
from subagent_tasks.testing.scripted_model import ScriptedModel
from subagent_tasks.testing.stub_llm import StubLLM, stub_llm
from subagent_tasks.testing.waiting import wait_until
from subagent_tasks.testing.worker_thread import WorkerThread

__all__ = [
    "FakeServer",
    "FaultyServer",
    "Kit",
    "Script",
    "ScriptedModel",
    "StubLLM",
    "WorkerProcess",
    "WorkerThread",
    "age_lease",
    "assert_no_leaked_keys",
    "assert_settled",
    "call_tool",
    "call_tools",
    "cut",
    "disconnect",
    "end_outage",
    "fail",
    "fake_app",
    "freeze_server",
    "kill_worker",
    "lose_reply",
    "refuse",
    "reply",
    "restart_server",
    "stall",
    "stub_llm",
    "wait_for",
    "wait_until",
]
