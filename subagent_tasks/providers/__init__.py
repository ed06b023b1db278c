"""The providers that ship, and what a provider of your own is made of. One file each."""

from __future__ import annotations

from subagent_tasks.protocol.interfaces import ChildTools, Drive, NewEvent, Provider, Run
from subagent_tasks.protocol.models import InboxEntry
from subagent_tasks.providers.spawn import SpawnProvider

__all__ = ["ChildTools", "Drive", "InboxEntry", "NewEvent", "Provider", "Run", "SpawnProvider"]
