"""The declarations of the Lua scripts: one per atomic move, with the names of its keys and arguments.

The `.lua` file holds the move, this file its signature; a test compares both. Each script is completed here by a
prelude that names KEYS and ARGV, and by the states the lifecycle table lets the move leave (`departs`; `wakes` for an
owner that an ending queues again): a script knows no rule of its own about states.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources

from subagent_tasks.protocol.lifecycle import Move, departs


@dataclass(frozen=True)
class Script:
    """One move: its file, the names of KEYS and ARGV in order, whether more arguments follow, and what it includes."""

    name: str
    keys: tuple[str, ...]
    args: tuple[str, ...]
    rest: bool = False
    move: Move | None = None
    includes: tuple[str, ...] = ("_now",)

    @cached_property
    def source(self) -> str:
        """The complete Lua text."""
        parts = [_prelude(self), *(_read(name) for name in self.includes), _read(self.name)]
        return "\n".join(parts)

    @cached_property
    def sha(self) -> str:
        return hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()

    def key_list(self, keys: Mapping[str, str]) -> list[str]:
        return [keys[name] for name in self.keys]

    def arg_list(self, args: Mapping[str, str | int], rest: Sequence[str | int] = ()) -> list[str | int]:
        if rest and not self.rest:
            raise TypeError(f"script {self.name!r} takes no further arguments")
        return [*(args[name] for name in self.args), *rest]


_ENDING = (
    "settle_id", "status", "detail", "outcome", "event", "result", "notice", "caller", "owner_id",
    "owner_channel", "announcement", "expiry", "wake_message", "retention_ms", "max_notices",
)  # fmt: skip
_OWNER = ("owner", "jobs", "active", "unsettled", "notices", "cursors")
_ENDED = (
    "own_jobs", "own_unsettled", "own_awaited", "alarms", "cascade", "held", "owner", "jobs", "active", "unsettled",
    "awaited", "notices", "cursors", "owner_queued", "owner_queue", "expiring",
)  # fmt: skip

OPEN = Script("open", keys=("record", "unsettled"), args=("id", "version", "retention_ms"))
ADMIT = Script(
    "admit",
    keys=("record", "inbox", *_OWNER, "held", "cascade", "queued", "queue"),
    args=(
        "id",
        "owner_id",
        "token",
        "caller",
        "version",
        "digest",
        "mode",
        "max_active_jobs",
        "max_depth",
        "entry",
        "message",
    ),
    rest=True,
    includes=("_now", "_enqueue", "_accept", "_above"),
)
REQUEUE = Script(
    "requeue",
    keys=("record", "transcript", "source", "source_transcript", *_OWNER, "queued", "queue"),
    args=(
        "id",
        "source_id",
        "owner_id",
        "version",
        "digest",
        "mode",
        "caller",
        "max_active_jobs",
        "keep",
        "message",
    ),
    rest=True,
    includes=("_now", "_enqueue", "_accept"),
)
CLAIM = Script(
    "claim",
    keys=("record", "result", "processes", "driven", "queued", "overtaken", "cascade"),
    args=("id", "worker", "claim_id", "version", "started", "slack_ms"),
    move=Move.CLAIM,
    includes=("_now", "_beats", "_above"),
)
TAKE = Script(
    "take",
    keys=("record", "inbox", "transcript", "cascade"),
    args=("token", "seq", "step"),
    includes=("_now", "_above"),
)
APPEND = Script(
    "append",
    keys=("record", "transcript", "cascade"),
    args=("token", "seq", "purpose"),
    rest=True,
    includes=("_now", "_above"),
)
SETTLE = Script(
    "settle",
    keys=("record", "inbox", "transcript", "result", "processes", "driven", "queued", "flagged", *_ENDED),
    args=("id", "token", "worker", "on_behalf", *_ENDING),
    move=Move.SETTLE,
    includes=("_now", "_beats", "_enqueue", "_finish"),
)
KILL = Script(
    "kill",
    keys=("record", "inbox", "transcript", "result", "processes", "queued", "flagged", *_ENDED),
    args=("id", "kill_id", "reason", "authority", "told", "lost_caller", "lease_ms", "ring_prefix", *_ENDING),
    move=Move.KILL,
    includes=("_now", "_beats", "_enqueue", "_finish"),
)
SUSPEND = Script(
    "suspend",
    keys=("record", "transcript", "driven", "own_unsettled", "own_awaited", "alarms"),
    args=("id", "token", "seq", "wake_at", "alarm"),
    rest=True,
    move=Move.SUSPEND,
)
WAKE = Script(
    "wake",
    keys=("record", "own_awaited", "alarms", "queued", "queue"),
    args=("id", "alarm", "message"),
    move=Move.WAKE,
    includes=("_now", "_enqueue"),
)
UNHOLD = Script("unhold", keys=("record", "held"), args=("id", "caller"), includes=())
CASCADED = Script("cascaded", keys=("cascade", "own_unsettled"), args=("id",), includes=())
RELEASE = Script(
    "release",
    keys=("record", "driven", "queued", "queue"),
    args=("id", "token", "resting", "message"),
    move=Move.RELEASE,
    includes=("_now", "_enqueue"),
)
RECLAIM = Script(
    "reclaim",
    keys=("record", "processes", "driven", "queued", "queue"),
    args=("id", "worker", "token", "message"),
    move=Move.RECLAIM,
    includes=("_now", "_beats", "_enqueue"),
)
REPUBLISH = Script(
    "republish", keys=("record", "queued", "queue"), args=("id", "since_ms", "message"), includes=("_now", "_enqueue")
)
BEAT = Script("beat", keys=("processes", "driven", "flagged", "clock"), args=("process", "lease_ms"))
RETIRE = Script(
    "retire", keys=("processes", "driven", "held"), args=("process", "on_behalf"), includes=("_now", "_beats")
)
GUARD = Script(
    "guard",
    keys=("sweeper", "clock", "processes", "expiring", "cascade", "alarms"),
    args=("process", "hold_ms", "lease_ms"),
)
FORGET = Script("forget", keys=("record", "expiring", "jobs"), args=("id", "expiry"), includes=())
COLLECT = Script("collect", keys=("record", "notices"), args=("authority",), includes=())
ACK_NOTICE = Script("ack_notice", keys=("cursors", "record"), args=("reader", "cursor", "retention_ms"), includes=())

ALL = (
    OPEN, ADMIT, REQUEUE, CLAIM, TAKE, APPEND, SUSPEND, WAKE, SETTLE, KILL, UNHOLD, CASCADED, RELEASE, RECLAIM,
    REPUBLISH, BEAT, RETIRE, GUARD, FORGET, COLLECT, ACK_NOTICE,
)  # fmt: skip


def _read(name: str) -> str:
    return resources.files("subagent_tasks.protocol").joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")


def _table(move: Move) -> str:
    return ", ".join(f"{state} = true" for state in sorted(departs(move)))


def _prelude(script: Script) -> str:
    keys = ", ".join(f"{name} = KEYS[{position}]" for position, name in enumerate(script.keys, 1))
    args = ", ".join(f"{name} = ARGV[{position}]" for position, name in enumerate(script.args, 1))
    states = _table(script.move) if script.move else ""
    return f"""local K = {{ {keys} }}
local A = {{ {args} }}
local REST = {len(script.args) + 1}
local departs = {{ {states} }}
local wakes = {{ {_table(Move.WAKE)} }}
-- record(field, ...): those fields of K.record by name; an absent one is nil.
local function record(...)
  local values, fields = redis.call('HMGET', K.record, ...), {{}}
  for i, name in ipairs({{ ... }}) do fields[name] = values[i] or nil end
  return fields
end
"""
