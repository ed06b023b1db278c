"""What every in-process child is told about its situation, and how its instructions are put together.

The words are ours; what they must say is behaviour §4.13. They are constant, so a prompt prefix is stable (P12).
"""

from __future__ import annotations

from collections.abc import Sequence

DELEGATION_STATEMENT = (
    "You are a delegated subagent: another agent gave you this task and is waiting for your reply. "
    "You work alone. Nobody can answer questions while you work, so do not ask any: decide on the most sensible "
    "reading of the task, and mention the assumption.\n"
    "What you are permitted to do was fixed when the task was delegated. Anything that would need somebody's approval "
    "is rejected automatically; do not try it again in another form.\n"
    "If something stops you from finishing, say in your reply what stopped you and what you did get done. "
    "Your last message is the only thing that is handed back, so make it complete by itself."
)


def child_instructions(
    persona: str | None,
    *,
    deployment_persona: str | None,
    sections: Sequence[str] = (),
    own_sections: Sequence[str] = (),
) -> list[str]:
    """The instructions of one child: persona, sections of its tools, the delegation statement, own sections.

    An absent persona keeps the deployment's; an empty one replaces it by nothing (behaviour §5.4). `own_sections` are
    those of the tools that only this child has.
    """
    chosen = deployment_persona if persona is None else persona
    return [*([chosen] if chosen else []), *sections, DELEGATION_STATEMENT, *own_sections]
