"""The providers that ship, and the base class of others. One file each."""

from __future__ import annotations

from subagent_tasks.protocol.interfaces import Provider
from subagent_tasks.providers.spawn import SpawnProvider

__all__ = ["Provider", "SpawnProvider"]
