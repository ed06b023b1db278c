"""Parent sessions and their notices in Redis."""

from __future__ import annotations

import json
from typing import Any, cast

from subagent_tasks.errors import CallerError, UnreadableRecord, UnsupportedVersion
from subagent_tasks.protocol import scripts
from subagent_tasks.protocol.keys import Keys
from subagent_tasks.protocol.models import Notice, text_block
from subagent_tasks.protocol.records import RECORD_VERSION, refusing_broken
from subagent_tasks.store.connection import Moves


class SessionStore:
    """Moves on parent sessions of one namespace."""

    def __init__(self, moves: Moves, keys: Keys, *, retention_ms: int) -> None:
        self._moves = moves
        self._keys = keys
        self._retention_ms = retention_ms

    async def open(self, session_id: str) -> None:
        """Create or reopen a parent session."""
        word, *details = await self._moves.run(
            scripts.OPEN,
            keys={"record": self._keys.session(session_id), "unsettled": self._keys.unsettled(session_id)},
            args={"id": session_id, "version": RECORD_VERSION, "retention_ms": self._retention_ms},
        )
        if word == "not_a_parent":
            raise CallerError(
                f"session {session_id!r} is a child's: open your own session and act on the child through it"
            )
        if word == "unsupported":
            raise UnsupportedVersion(
                f"session {session_id!r} was written with record version {details[0]}, this process reads up to "
                f"{RECORD_VERSION}: upgrade subagent-tasks here, nothing was changed"
            )

    async def cursor(self, session_id: str, reader: str) -> str:
        """The newest notice the reader is done with; `0-0` before the first."""
        held = cast("str | None", await self._moves.read(
            cast("Any", self._moves.client.hget(self._keys.cursors(session_id), reader))
        ))  # fmt: skip
        return held or "0-0"

    async def notices(self, session_id: str, *, after: str, count: int = 100) -> list[Notice]:
        """Up to `count` notices behind the one named, in order; first of all one that tells of dropped ones.

        One that is broken, or of a newer version, is told of by a stand-in: readers get past it, and know of it.
        """
        pipeline = self._moves.client.pipeline(transaction=False)
        pipeline.xrange(self._keys.notices(session_id), f"({after}", "+", count=count)
        pipeline.hmget(self._keys.session(session_id), "dropped", "dropped_upto")
        entries, (dropped, upto) = cast(
            "tuple[list[tuple[str, dict[str, str]]], tuple[str | None, str | None]]",
            await self._moves.read(pipeline.execute()),
        )
        notices = [_notice(session_id, entry_id, fields) for entry_id, fields in entries]
        if dropped and upto and _place(upto) > _place(after):
            return [_of_dropped(session_id, int(dropped), upto)]
        return notices

    async def acknowledge(self, session_id: str, reader: str, cursor: str) -> None:
        """Move the reader's cursor to that notice; never back. Cumulative."""
        await self._moves.run(
            scripts.ACK_NOTICE,
            keys={"cursors": self._keys.cursors(session_id), "record": self._keys.session(session_id)},
            args={"reader": reader, "cursor": cursor, "retention_ms": self._retention_ms},
        )


def _place(notice_id: str) -> tuple[int, int]:
    milliseconds, _, number = notice_id.partition("-")
    return int(milliseconds), int(number)


def _notice(session_id: str, notice_id: str, fields: dict[str, str]) -> Notice:
    try:
        with refusing_broken(f"a notice of session {session_id!r}"):
            return Notice.model_validate({**json.loads(fields["n"]), "id": notice_id})
    except UnreadableRecord:
        text = "a notice of this session cannot be read by this version; job_list shows which jobs have ended."
        return _of_ours(session_id, notice_id, "notice-unreadable", text)


def _of_dropped(session_id: str, count: int, upto: str) -> Notice:
    """Stands in the place of the newest dropped notice, so that acknowledging it is acknowledging them all."""
    text = f"{count} older notices of this session made room for newer ones; job_list lists the jobs they told of."
    return _of_ours(session_id, upto, "notices-dropped", text)


def _of_ours(session_id: str, notice_id: str, kind: str, text: str) -> Notice:
    return Notice(
        id=notice_id,
        kind=kind,
        session_id=session_id,
        sender_id=session_id,
        text=text,
        blocks=(text_block(text),),
        summary=text[:120],
        source=kind,
    )
