"""Run an agent's child agents on Celery workers, behind the same delegation tool."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from subagent_tasks.errors import (
    BrokerUnavailable,
    CallerError,
    ConfigurationError,
    Conflict,
    SubagentError,
    SubagentFailed,
    Unauthorized,
    UnknownJob,
)
from subagent_tasks.events import RunEnded, RunStarted
from subagent_tasks.protocol.models import (
    AgentOptions,
    Capabilities,
    ChildRequest,
    ChildResult,
    Notice,
    ToolCall,
    ToolDefinition,
    ToolFilter,
    ToolResult,
    TranscriptEvent,
    Usage,
)
from subagent_tasks.tools.config import DelegationToolConfig, JobToolsConfig

if TYPE_CHECKING:
    from subagent_tasks.app import SubagentApp
    from subagent_tasks.host import Host, Session
    from subagent_tasks.notice_inbox import NoticeInbox
    from subagent_tasks.sync_host import SyncHost, SyncSession

__all__ = [
    "AgentOptions",
    "BrokerUnavailable",
    "CallerError",
    "Capabilities",
    "ChildRequest",
    "ChildResult",
    "ConfigurationError",
    "Conflict",
    "DelegationToolConfig",
    "Host",
    "JobToolsConfig",
    "Notice",
    "NoticeInbox",
    "RunEnded",
    "RunStarted",
    "Session",
    "SubagentApp",
    "SubagentError",
    "SubagentFailed",
    "SyncHost",
    "SyncSession",
    "ToolCall",
    "ToolDefinition",
    "ToolFilter",
    "ToolResult",
    "TranscriptEvent",
    "Unauthorized",
    "UnknownJob",
    "Usage",
]

_LOADED_WHEN_USED = {
    "Host": "subagent_tasks.host",
    "NoticeInbox": "subagent_tasks.notice_inbox",
    "Session": "subagent_tasks.host",
    "SubagentApp": "subagent_tasks.app",
    "SyncHost": "subagent_tasks.sync_host",
    "SyncSession": "subagent_tasks.sync_host",
}


def __getattr__(name: str) -> object:
    # Celery, Redis and the agent loop take a second to import: the command line's help does not wait for them, nor does
    # a Celery client that only reads a failed result.
    if name not in _LOADED_WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LOADED_WHEN_USED[name]), name)
