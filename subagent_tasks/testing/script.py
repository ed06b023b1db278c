"""What a scripted model answers, and to whom: the rules shared by `ScriptedModel` and `stub_llm`.

Decides which rule a request meets and which of its steps comes next. Where a conversation stands is read off the
conversation itself, never kept here, so parallel children do not interfere and a run that another process takes over
goes on at the right step. It does not decide how an answer looks to a model API: that is the model's and the stub's.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, TypeAlias, cast

from pydantic import Field, JsonValue, ValidationError

from subagent_tasks.errors import ConfigurationError, SubagentError
from subagent_tasks.protocol.models import Wire

Finish = Literal["stop", "length", "content_filter", "refusal", "error"]
UsageKey = Literal["input_tokens", "output_tokens"]

# Enough deltas to tell streaming from not, few enough that a long answer stays cheap.
_MAX_DELTAS = 16
# pydantic-ai shows its own retry feedback and notes in the user's voice, inside these marks: no user's words.
_HARNESS_TEXT = re.compile(r"<pyai:|\A\s*<system\b")


class UnscriptedRequest(SubagentError):
    """A model was asked something that no rule of its script matches."""

    code = "UNSCRIPTED"


class Reply(Wire):
    """A final text. Built by `reply`."""

    kind: Literal["reply"] = "reply"
    text: str
    finish: Finish = "stop"
    reasoning: str | None = None
    usage: dict[UsageKey, Annotated[int, Field(ge=0)]] | None = None


class ScriptedCall(Wire):
    """One tool call; `arguments` is an object, or text sent as it is (also text that is not JSON)."""

    name: str = Field(min_length=1)
    arguments: dict[str, JsonValue] | str
    call_id: str | None = Field(default=None, min_length=1)

    @property
    def arguments_json(self) -> str:
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments)


class ToolCalls(Wire):
    """One message with tool calls. Built by `call_tool` and `call_tools`."""

    kind: Literal["tool_calls"] = "tool_calls"
    calls: tuple[ScriptedCall, ...] = Field(min_length=1)
    text: str | None = None


class Failure(Wire):
    """An HTTP error. Built by `fail`."""

    kind: Literal["fail"] = "fail"
    status: int = Field(ge=400, le=599)
    retry_after: float | None = Field(default=None, ge=0)
    message: str | None = None
    error_code: str | None = None


class Disconnect(Wire):
    """A connection that breaks. Built by `disconnect`."""

    kind: Literal["disconnect"] = "disconnect"
    after: str | None = None
    clean: bool = False


class Stall(Wire):
    """An answer that never comes. Built by `stall`."""

    kind: Literal["stall"] = "stall"
    after: str | None = None


Answer: TypeAlias = Annotated[Reply | ToolCalls | Failure | Disconnect | Stall, Field(discriminator="kind")]


class EventLike(Protocol):
    """`threading.Event`, `multiprocessing.Event`, `asyncio.Event`, and what behaves like one of them."""

    def is_set(self) -> bool: ...
    def wait(self) -> object: ...


class WaitFor:
    """Holds the model until an event is set. Built by `wait_for`.

    The model may run in another thread or event loop than the one that sets the event.
    """

    def __init__(self, event: EventLike) -> None:
        self.event = event
        self._is_async = inspect.iscoroutinefunction(event.wait)
        # An asyncio.Event may be waited for only in its own loop: the one this step is written in, if there is one.
        self._home: asyncio.AbstractEventLoop | None = None
        if self._is_async:
            try:
                self._home = asyncio.get_running_loop()
            except RuntimeError:
                self._home = None

    async def passed(self) -> None:
        """Return once the event is set. Cancellable."""
        if self.event.is_set():
            return
        if not self._is_async:
            await self._passed_in_thread()
        elif self._home is asyncio.get_running_loop():
            await cast("asyncio.Event", self.event).wait()
        elif self._home is not None and self._home.is_running():
            waiting = asyncio.run_coroutine_threadsafe(cast("asyncio.Event", self.event).wait(), self._home)
            await asyncio.wrap_future(waiting)
        else:
            while not self.event.is_set():  # noqa: ASYNC110  # the event's loop is unknown: nothing to await there
                await asyncio.sleep(0.01)

    def passed_blocking(self, *, stopping: threading.Event) -> bool:
        """The same for a plain thread; False if `stopping` was set first."""
        while not self.event.is_set():
            if stopping.is_set():
                return False
            if self._is_async:
                stopping.wait(0.02)
            else:
                cast("threading.Event", self.event).wait(0.05)
        return True

    async def _passed_in_thread(self) -> None:
        loop = asyncio.get_running_loop()
        passed = asyncio.Event()
        abandoned = threading.Event()

        def watch() -> None:
            # Awake now and then only to notice that the waiter was cancelled; an event that is set wakes it at once.
            while not cast("threading.Event", self.event).wait(0.2):
                if abandoned.is_set():
                    return
            if not abandoned.is_set() and not loop.is_closed():
                loop.call_soon_threadsafe(passed.set)

        # Not the loop's executor: it has few threads, and asyncio.run would wait for those that wait here.
        threading.Thread(target=watch, name="scripted-wait-for", daemon=True).start()
        try:
            await passed.wait()
        finally:
            abandoned.set()


Step: TypeAlias = Reply | ToolCalls | Failure | Disconnect | Stall | WaitFor


def reply(
    text: str,
    *,
    finish: Finish = "stop",
    reasoning: str | None = None,
    usage: Mapping[UsageKey, int] | None = None,
) -> Reply:
    """Answer with `text`.

    `finish` is how the answer ends: `length` cuts it at the token limit, `content_filter` keeps the partial text,
    `refusal` makes `text` the reason for refusing, `error` breaks it off on the model's side. `usage` fixes
    `input_tokens` and `output_tokens`, which are estimated otherwise and never 0.
    """
    return Reply(text=text, finish=finish, reasoning=reasoning, usage=None if usage is None else dict(usage))


def call_tool(
    name: str, arguments: Mapping[str, Any] | str | None = None, *, call_id: str | None = None, text: str | None = None
) -> ToolCalls:
    """Call one tool, after saying `text`.

    Without `call_id` the id says where the call stands in its conversation, so that a request sent again gets the
    same one.
    """
    given = arguments if isinstance(arguments, str) else dict(arguments or {})
    return ToolCalls(calls=(ScriptedCall(name=name, arguments=given, call_id=call_id),), text=text)


def call_tools(*steps: ToolCalls, text: str | None = None) -> ToolCalls:
    """Call several tools in one message: `call_tools(call_tool("a", {}), call_tool("b", {}))`."""
    if not steps:
        raise ConfigurationError("call_tools needs at least one call: call_tools(call_tool(name, arguments), ...).")
    said = text if text is not None else "".join(step.text or "" for step in steps) or None
    return ToolCalls(calls=tuple(call for step in steps for call in step.calls), text=said)


def fail(
    status: int, *, retry_after: float | None = None, message: str | None = None, error_code: str | None = None
) -> Failure:
    """Answer with the HTTP error `status`. `retry_after` is in seconds.

    `error_code` is the API's own name for the error, such as `context_length_exceeded` or `insufficient_quota`.
    """
    return Failure(status=status, retry_after=retry_after, message=message, error_code=error_code)


def wait_for(event: EventLike) -> WaitFor:
    """Hold the model until `event` is set, then go on with the next step; as the last one, repeat the last reply.

    Takes a `threading.Event`, or an `asyncio.Event` that this is called in the loop of.
    """
    return WaitFor(event)


def disconnect(*, after: str | None = None, clean: bool = False) -> Disconnect:
    """Break the connection: before any answer, or, where the answer is streamed, once the text `after` was sent.

    `clean` ends such a stream as if it were complete, but without its last events.
    """
    if clean and after is None:
        raise ConfigurationError("disconnect(clean=True) ends a stream early: say after which text, after='...'.")
    return Disconnect(after=after, clean=clean)


def stall(*, after: str | None = None) -> Stall:
    """Never answer; where the answer is streamed, after the text `after`."""
    return Stall(after=after)


@dataclass(frozen=True, slots=True)
class SeenCall:
    """A tool call in the history of a request. `arguments` is JSON text."""

    name: str
    arguments: str
    call_id: str


@dataclass(frozen=True, slots=True)
class SeenMessage:
    """One message of a request, the same for every model API. `call_id` is set for `tool`: the call it answers."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    calls: tuple[SeenCall, ...] = ()
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """What one model request carried, for assertions.

    `tools` holds the names in the order sent, `raw` the request as it came: pydantic-ai messages, or a JSON body.
    """

    model: str
    messages: tuple[SeenMessage, ...]
    instructions: str | None = None
    tools: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    conversation_id: str | None = None
    raw: object = field(default=None, repr=False)

    @property
    def prompt(self) -> str:
        """The newest user message."""
        return next((text for text, _ in _open_prompts(self.messages)), "")


@dataclass(frozen=True, slots=True)
class Beat:
    """What a request gets: the events it is held by, and then its answer."""

    waits: tuple[WaitFor, ...]
    answer: Reply | ToolCalls | Failure | Disconnect | Stall


class Script:
    """Rules by what the newest user message contains; the first that matches wins. Safe to use from any thread.

    A list of steps is played one per model request of a conversation. An answer that leaves no trace in the
    conversation (`fail`, `disconnect`, `stall`) is given once before the step behind it, counted per conversation in
    this process. Past the end the last reply is repeated.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._seen: list[SeenRequest] = []
        self._traceless: Counter[str] = Counter()

    def on(self, contains: str, steps: Step | Sequence[Step]) -> None:
        """Answer a newest user message that contains `contains` (the empty text: any) with `steps`.

        Raises `ConfigurationError` for an empty list, or for something that is no step.
        """
        rule = _Rule.of(contains, [steps] if isinstance(steps, Step) else list(steps))
        with self._lock:
            self._rules.append(rule)

    @property
    def requests(self) -> int:
        """How many requests arrived, those that are held or failed among them."""
        with self._lock:
            return len(self._seen)

    @property
    def seen(self) -> list[SeenRequest]:
        """The requests in the order of their arrival."""
        with self._lock:
            return list(self._seen)

    def play(self, request: SeenRequest) -> Beat:
        """Write down `request` and say what it gets. Raises `UnscriptedRequest` if no rule matches."""
        with self._lock:
            self._seen.append(request)
            rule, answered, place = self._choose(request)
            beats = rule.at(answered)
            index = 0
            if len(beats) > 1:
                index = min(self._traceless[place], len(beats) - 1)
                self._traceless[place] += 1
        return Beat(beats[index].waits, _with_call_ids(beats[index].answer, request))

    def to_json(self) -> str:
        """The rules as JSON, for a stub in another process. Raises `ConfigurationError` if one waits for an event."""
        with self._lock:
            rules = list(self._rules)
        entries: list[_RuleEntry] = []
        for rule in rules:
            answers = tuple(step for step in rule.steps if not isinstance(step, WaitFor))
            if len(answers) != len(rule.steps):
                raise ConfigurationError(
                    f"The rule for {rule.contains!r} waits for an event, and events cannot leave their process: "
                    "remove wait_for, or run the stub in this process."
                )
            entries.append(_RuleEntry(contains=rule.contains, steps=answers))
        return _ScriptFile(rules=tuple(entries)).to_json()

    @classmethod
    def from_json(cls, text: str | bytes) -> Script:
        """The script that `to_json` wrote. Raises `ConfigurationError` naming what is wrong with it."""
        try:
            file = _ScriptFile.model_validate_json(text)
        except ValidationError as error:
            raise ConfigurationError(f"This is no script as Script.to_json writes it: {error}") from error
        script = cls()
        for entry in file.rules:
            script.on(entry.contains, entry.steps)
        return script

    def _choose(self, request: SeenRequest) -> tuple[_Rule, int, str]:
        for text, answered in _open_prompts(request.messages):
            for number, rule in enumerate(self._rules):
                if rule.contains in text:
                    return rule, answered, _place(request, number)
        known = ", ".join(repr(rule.contains) for rule in self._rules) or "none"
        raise UnscriptedRequest(
            f"No rule of the script matches the newest user message {_shortened(request.prompt)!r} (rules, in order: "
            f"{known}). Add one with .on(part_of_the_message, step), or .on('', step) for anything."
        )


def deltas(text: str) -> list[str]:
    """`text` in the pieces it is streamed in."""
    words: list[str] = re.findall(r"\s*\S+\s*|\s+", text)
    size = -(-len(words) // _MAX_DELTAS) or 1
    return ["".join(words[start : start + size]) for start in range(0, len(words), size)]


def usage_of(answer: Reply | ToolCalls, request: SeenRequest) -> tuple[int, int]:
    """Input and output tokens of an exchange: the script's numbers, or an estimate of at least 1."""
    given = (answer.usage or {}) if isinstance(answer, Reply) else {}
    said = answer.text or ""
    if isinstance(answer, ToolCalls):
        said += "".join(call.name + call.arguments_json for call in answer.calls)
    heard = (request.instructions or "") + "".join(message.text for message in request.messages)
    return given.get("input_tokens", 1 + len(heard) // 4), given.get("output_tokens", 1 + len(said) // 4)


@dataclass(frozen=True, slots=True)
class _Rule:
    contains: str
    steps: tuple[Step, ...]
    groups: tuple[tuple[Beat, ...], ...]
    """One per assistant message: the answers that leave no trace, then the one that does."""

    @classmethod
    def of(cls, contains: str, steps: Sequence[Step]) -> _Rule:
        for step in steps:
            if not isinstance(step, Step):  # pyright: ignore[reportUnnecessaryIsInstance]  # tests are often untyped
                raise ConfigurationError(
                    f"{step!r} is no step for the rule {contains!r}: use reply, call_tool, call_tools, fail, "
                    "wait_for, disconnect or stall."
                )
        if not steps:
            raise ConfigurationError(f"The rule for {contains!r} has no steps: give at least one, such as reply('…').")
        groups: list[tuple[Beat, ...]] = []
        group: list[Beat] = []
        for beat in _beats(steps):
            group.append(beat)
            if isinstance(beat.answer, Reply | ToolCalls):
                groups.append(tuple(group))
                group = []
        if group:
            groups.append(tuple(group))
        return cls(contains, tuple(steps), tuple(groups))

    def at(self, answered: int) -> tuple[Beat, ...]:
        """The answers for a conversation with `answered` assistant messages since the prompt."""
        if answered < len(self.groups):
            return self.groups[answered]
        return (Beat((), _last_reply(self.steps) or self.groups[-1][-1].answer),)


class _RuleEntry(Wire):
    contains: str
    steps: tuple[Answer, ...]


class _ScriptFile(Wire):
    rules: tuple[_RuleEntry, ...]


def _beats(steps: Sequence[Step]) -> Iterator[Beat]:
    waits: list[WaitFor] = []
    for step in steps:
        if isinstance(step, WaitFor):
            waits.append(step)
            continue
        yield Beat(tuple(waits), step)
        waits = []
    if waits:
        yield Beat(tuple(waits), _last_reply(steps) or Reply(text="done"))


def _last_reply(steps: Sequence[Step]) -> Reply | None:
    return next((step for step in reversed(steps) if isinstance(step, Reply)), None)


def _open_prompts(messages: Sequence[SeenMessage]) -> Iterator[tuple[str, int]]:
    """The user messages of the turn in progress, newest first, each with the assistant messages that followed it.

    More than one where a message came in while the turn ran (behaviour §1.7); older turns are closed.
    """
    answered = 0
    found = False
    for message in reversed(messages):
        if message.role == "assistant":
            if found and not message.calls:
                return
            answered += 1
        elif message.role == "user" and not _HARNESS_TEXT.search(message.text):
            found = True
            yield message.text, answered


def _place(request: SeenRequest, rule_number: int) -> str:
    history = [
        (message.role, message.text, [(call.name, call.arguments) for call in message.calls])
        for message in request.messages
    ]
    return hashlib.sha256(json.dumps([request.conversation_id, rule_number, history]).encode()).hexdigest()


def _with_call_ids(
    answer: Reply | ToolCalls | Failure | Disconnect | Stall, request: SeenRequest
) -> Reply | ToolCalls | Failure | Disconnect | Stall:
    if not isinstance(answer, ToolCalls):
        return answer
    turn = 1 + sum(message.role == "assistant" for message in request.messages)
    named = tuple(
        call if call.call_id else call.model_copy(update={"call_id": f"call_{turn}_{number}"})
        for number, call in enumerate(answer.calls, start=1)
    )
    return answer.model_copy(update={"calls": named})


def _shortened(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else text[:limit] + "…"
