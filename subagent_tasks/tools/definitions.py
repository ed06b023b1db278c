"""What the model reads about the delegation and job tools: definitions and prompt sections.

The bytes are a function of the configuration (and, for a delegation tool, of whether its provider inherits the
parent's context): no clock, no catalogue, no registry (P12, behaviour §8). `tests/golden` holds them. Defaults are told
in words, never as schema defaults or enums, and undeclared keys stay legal (behaviour §2.2); `arguments` enforces the
rest.
"""

from __future__ import annotations

from pydantic import JsonValue

from subagent_tasks.protocol.models import ToolDefinition
from subagent_tasks.tools.config import DelegationToolConfig, JobToolsConfig

JOBS_SECTION = """\
# Background jobs

Keep track of the id of every job you start. You will be told when one finishes: do not poll and do not sleep. \
Meanwhile carry on with steps that do not depend on it, and do not redo the work of a running job yourself. Before \
your final answer, collect every job that matters with job_output; wait only when nothing else is left to do. Stop \
jobs that no longer matter with job_kill."""


def delegation_tool(
    config: DelegationToolConfig, *, inherits_parent_context: bool, session_selects_model: bool = False
) -> ToolDefinition:
    """The delegation tool of one instance (behaviour §2.2, §2.3).

    `session_selects_model` is the session's own decision, read only in settings mode (behaviour §6.6).
    """
    selects_model = config.selects_model(session_selects_model=session_selects_model)
    sentences = [_INHERITING if inherits_parent_context else _FRESH, _ROUTE[_route(config)]]
    if selects_model:
        sentences.append(_SELECTION)
        if inherits_parent_context:
            sentences.append(_SELECTION_LOSES_PREFIX)
    properties: dict[str, JsonValue] = {
        "description": _field("string", "A label of 3 to 5 words for this task, shown to people."),
        "prompt": _field("string", _PROMPT_INHERITING if inherits_parent_context else _PROMPT_FRESH),
    }
    if selects_model:
        properties["provider"] = _field("string", _PAIR.format(this="LLM provider", other="model"))
        properties["model"] = _field("string", _PAIR.format(this="LLM model", other="provider"))
        properties["reasoning_effort"] = _field(
            "string",
            "Reasoning effort, one that the chosen model offers. Leave it out to inherit a compatible one, or to take"
            " the default of a newly chosen model.",
        )
    if config.enable_run_in_background:
        properties["run_in_background"] = _field("boolean", _RUN_IN_BACKGROUND[config.background_mode])
    return ToolDefinition(
        name=config.tool_name,
        description=" ".join(sentences),
        parameters=_object(properties, required=["description", "prompt"]),
    )


def delegation_section(config: DelegationToolConfig) -> str:
    """The prompt section `tool:<toolName>`; empty unless background is on and continuable (behaviour §8)."""
    if not config.runs_in_background_by_default():
        return ""
    name = config.tool_name
    return (
        f"# Delegating with {name}\n\n"
        f"Use {name} in the background, its default. Start independent delegations together, in one message, and carry"
        " on with useful work of your own while they run. Pass run_in_background: false only when your very next action"
        " depends on the result. When a subagent finishes, a notice brings you the outcome and its final message; there"
        " is no need to ask for it."
    )


def job_tools(config: JobToolsConfig) -> tuple[ToolDefinition, ...]:
    """`job_output`, `job_list`, `job_kill`, in that order (behaviour §3.5)."""
    job_id = _field("string", "The id of a background job, as given when it was started.")
    return (
        ToolDefinition(
            name="job_output",
            description=(
                "Read the output and status of a background job. A subagent's output is there once it has finished, and"
                " can be read again. Returns at once unless wait is true; a wait that runs out returns the current"
                " status and leaves the job running."
            ),
            parameters=_object(
                {
                    "job_id": job_id,
                    "wait": _field("boolean", "Wait for the job to finish. Defaults to false."),
                    "timeout_ms": _field(
                        "number",
                        f"With wait: the longest wait in milliseconds. Defaults to {config.wait_timeout_ms}, at most"
                        f" {config.max_wait_timeout_ms}.",
                    ),
                },
                required=["job_id"],
            ),
        ),
        ToolDefinition(
            name="job_list",
            description="List your background jobs with their status, in the order they were started.",
            parameters=_object({}),
        ),
        ToolDefinition(
            name="job_kill",
            description=(
                "Stop a background job that is no longer needed. Returns at once; the job may take a moment to end, and"
                " a job that had already finished keeps its result."
            ),
            parameters=_object(
                {"job_id": job_id, "reason": _field("string", "Why, in a few words; recorded with the job.")},
                required=["job_id"],
            ),
        ),
    )


_FRESH = (
    "Delegate a self-contained task to a separate agent that works in its own context, so that what it reads and tries"
    " does not fill yours. You receive its result, not its steps. It cannot see this conversation and cannot ask"
    " questions, so the prompt must be complete. A task of one or two steps is quicker done yourself."
)
_INHERITING = (
    "Delegate a task to a separate agent that starts from this conversation: it knows every completed turn, but not the"
    " turn in progress. Suited to follow-ups, reviews and continuations of what was discussed. You receive its result,"
    " not its steps, and it cannot ask questions. A task of one or two steps is quicker done yourself."
)
_ROUTE = {
    "foreground": "The call waits for the agent and returns its result.",
    "one-shot": (
        "By default the call waits for the result. With run_in_background: true it returns a job id at once; collect"
        " the result with job_output, stop the job with job_kill."
    ),
    "continuable": (
        "By default it runs in the background: the call returns a durable subagent id at once, and the subagent keeps"
        " its conversation for later turns. You will be notified of the outcome, with its final message if there is"
        " one; send_message starts another turn. Pass run_in_background: false only if your next action needs the"
        " result."
    ),
}
_SELECTION = (
    "Choosing the agent's model is optional: leave out provider, model and reasoning_effort to use the configured"
    " defaults and inherit compatible values for the rest. To choose, ask list_subagent_models first and give provider"
    " and model together; a changed route without an effort uses the chosen model's default effort."
)
_SELECTION_LOSES_PREFIX = (
    "Changing the route here may keep the provider from reusing its cache of the inherited conversation."
)
_PROMPT_FRESH = (
    "The whole task: goal, background, relevant paths and facts, constraints, and what to report. The agent sees"
    " nothing else."
)
_PROMPT_INHERITING = "The task. Build on what the agent has already seen and state only what is new."
_PAIR = "{this} for the agent, given together with {other}. Leave both out to use the configured defaults or inherit."
_RUN_IN_BACKGROUND = {
    "one-shot": ("Defaults to false: wait for the result. True returns a job id at once, for job_output and job_kill."),
    "continuable": "Defaults to true: return a subagent id at once. False waits for the result.",
}


def _route(config: DelegationToolConfig) -> str:
    return config.background_mode if config.enable_run_in_background else "foreground"


def _field(kind: str, description: str) -> dict[str, JsonValue]:
    return {"type": kind, "description": description}


def _object(properties: dict[str, JsonValue], *, required: list[JsonValue] | None = None) -> dict[str, JsonValue]:
    schema: dict[str, JsonValue] = {"type": "object", "properties": properties}
    # Older JSON Schema drafts refuse an empty list.
    return {**schema, "required": required} if required else schema
