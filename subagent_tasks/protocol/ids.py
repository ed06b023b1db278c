"""Ids that are a function of what they name.

A call that is repeated gives the same run and never a second one, because its id is computed from the session and the
call id; the namespace keeps two deployments on one server apart.
"""

from __future__ import annotations

import uuid

from subagent_tasks.errors import CallerError

MAX_ID_LENGTH = 200


def run_id_for_call(*, namespace: str, session_id: str, call_id: str) -> str:
    """The id of the run that a call starts: its Celery task id, job id and session id."""
    # With the lengths: ids hold colons, and `user` with call `42:c` must not name the run of `user:42` with call `c`.
    named = f"subagent-tasks:{len(namespace)}:{namespace}:{len(session_id)}:{session_id}:{call_id}"
    return str(uuid.uuid5(uuid.NAMESPACE_URL, named))


def checked_id(value: object, *, name: str) -> str:
    """An id from outside that becomes part of a key: 1 to 200 printable characters, no surrogates."""
    if not isinstance(value, str):
        raise CallerError(f"{name} must be a string, got {type(value).__name__}: pass the id as text")
    if not value or len(value) > MAX_ID_LENGTH or not value.isprintable():
        shown = ascii(value[:40])
        raise CallerError(
            f"{name} must be 1 to {MAX_ID_LENGTH} printable characters, got {len(value)} characters: {shown}; "
            "choose a plain id of letters and digits"
        )
    return value
