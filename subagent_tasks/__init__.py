"""Run an agent's child agents on Celery workers, behind the same delegation tool."""

from __future__ import annotations

from subagent_tasks.app import SubagentApp
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
from subagent_tasks.host import Host, Session, SyncHost, SyncSession
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
