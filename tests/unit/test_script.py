"""The rules of a script: which one a request meets, and which of its steps comes next (design §4)."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from subagent_tasks.errors import ConfigurationError
from subagent_tasks.testing.script import (
    Failure,
    Reply,
    Script,
    SeenCall,
    SeenMessage,
    SeenRequest,
    ToolCalls,
    UnscriptedRequest,
    call_tool,
    call_tools,
    deltas,
    disconnect,
    fail,
    reply,
    stall,
    usage_of,
    wait_for,
)


def user(text: str) -> SeenMessage:
    return SeenMessage("user", text)


def said(text: str) -> SeenMessage:
    return SeenMessage("assistant", text)


CALLED = SeenMessage("assistant", "", (SeenCall("read_file", "{}", "call_1_1"),))
RETURNED = SeenMessage("tool", "content", call_id="call_1_1")


def asked(*messages: SeenMessage, conversation_id: str | None = None) -> SeenRequest:
    return SeenRequest(model="m", messages=messages, conversation_id=conversation_id)


def answer_to(script: Script, *messages: SeenMessage) -> str:
    answer = script.play(asked(*messages)).answer
    match answer:
        case Reply():
            return answer.text
        case ToolCalls():
            return answer.calls[0].name
        case Failure():
            return str(answer.status)
        case _:
            return answer.kind


def test_first_matching_rule_wins() -> None:
    """Rules are tried in the order they were given (design §4)."""
    script = Script()
    script.on("hello", reply("first"))
    script.on("hello world", reply("second"))
    assert answer_to(script, user("say hello world")) == "first"


def test_only_the_newest_user_message_is_matched() -> None:
    """An older turn's rule does not answer the next turn (design §4)."""
    script = Script()
    script.on("one", reply("1"))
    script.on("two", reply("2"))
    assert answer_to(script, user("one"), said("1"), user("two")) == "2"


def test_unmatched_request_names_what_was_asked() -> None:
    """A test author must see which message had no rule."""
    script = Script()
    script.on("hello", reply("hi"))
    with pytest.raises(UnscriptedRequest, match=r"'goodbye'.*'hello'"):
        answer_to(script, user("hello"), said("hi"), user("goodbye"))


def test_empty_rule_matches_anything() -> None:
    """`on("")` is the fallback."""
    script = Script()
    script.on("", reply("whatever"))
    assert answer_to(script, user("anything")) == "whatever"


def test_list_is_played_by_place_in_conversation() -> None:
    """The step follows from the conversation, so another process goes on at the right one (P6)."""
    script = Script()
    script.on("search", [call_tool("read_file", {"path": "a"}), reply("found it")])
    assert answer_to(script, user("search"), CALLED, RETURNED) == "found it"
    assert answer_to(script, user("search")) == "read_file"


def test_past_the_end_the_last_reply_is_repeated() -> None:
    """A conversation that goes on longer than its script still gets an answer."""
    script = Script()
    script.on("search", [reply("found it"), call_tool("read_file", {})])
    assert answer_to(script, user("search"), CALLED, RETURNED, CALLED, RETURNED) == "found it"


def test_unscripted_message_that_comes_in_during_a_turn_does_not_disturb_it() -> None:
    """A `next-step` message without a rule leaves the running list where it was (behaviour §1.7)."""
    script = Script()
    script.on("search", [call_tool("read_file", {}), reply("found it")])
    assert answer_to(script, user("search"), CALLED, RETURNED, user("hurry up")) == "found it"


def test_scripted_message_that_comes_in_during_a_turn_takes_over() -> None:
    """The newest message that has a rule wins."""
    script = Script()
    script.on("search", [call_tool("read_file", {}), reply("found it")])
    script.on("stop", reply("stopped"))
    assert answer_to(script, user("search"), CALLED, RETURNED, user("stop")) == "stopped"


def test_retry_feedback_is_no_user_message() -> None:
    """Feedback that pydantic-ai words as the user's must not be taken for a prompt."""
    script = Script()
    script.on("", [reply("bad"), reply("good")])
    feedback = user("Application note:\n<pyai:retry_feedback>bad</pyai:retry_feedback>")
    assert answer_to(script, user("json please"), said("bad"), feedback) == "good"


def test_failure_is_given_once_before_the_next_step() -> None:
    """A failed request leaves no message behind, yet the list must move on."""
    script = Script()
    script.on("x", [fail(429), reply("ok")])
    assert [answer_to(script, user("x")) for _ in range(3)] == ["429", "ok", "ok"]


def test_failure_alone_is_given_every_time() -> None:
    """A rule that ends in a failure keeps failing."""
    script = Script()
    script.on("x", fail(401))
    assert [answer_to(script, user("x")) for _ in range(2)] == ["401", "401"]


def test_failures_after_a_reply_belong_to_the_next_request() -> None:
    """Failures are counted per place in the conversation."""
    script = Script()
    script.on("x", [fail(500), call_tool("t", {}), disconnect(), stall(), reply("ok")])
    assert [answer_to(script, user("x")) for _ in range(2)] == ["500", "t"]
    assert [answer_to(script, user("x"), CALLED, RETURNED) for _ in range(3)] == ["disconnect", "stall", "ok"]


def test_conversations_do_not_share_failures() -> None:
    """Two children with the same prompt each get the failure."""
    script = Script()
    script.on("x", [fail(429), reply("ok")])
    answers = [script.play(asked(user("x"), conversation_id=name)).answer for name in ("a", "b")]
    assert [type(answer) for answer in answers] == [Failure, Failure]


def test_wait_is_consumed_with_the_step_behind_it() -> None:
    """`wait_for` takes no place in the list of its own (design §4)."""
    script = Script()
    script.on("x", [wait_for(threading.Event()), reply("a"), reply("b")])
    beat = script.play(asked(user("x")))
    assert len(beat.waits) == 1
    assert isinstance(beat.answer, Reply)
    assert beat.answer.text == "a"
    assert answer_to(script, user("x"), said("a"), user("x")) == "a"


def test_wait_at_the_end_goes_on_with_the_last_reply() -> None:
    """A rule may end in, or be, a wait."""
    script = Script()
    script.on("x", [call_tool("t", {}), wait_for(threading.Event())])
    script.on("y", [call_tool("t", {}), reply("mine"), wait_for(threading.Event())])
    assert answer_to(script, user("x"), CALLED, RETURNED) == "done"
    assert answer_to(script, user("y"), CALLED, RETURNED, CALLED, RETURNED) == "mine"


def test_several_calls_in_one_message() -> None:
    """`call_tools` joins calls, and what is said before them."""
    step = call_tools(call_tool("a", {"n": 1}, text="Both."), call_tool("b", {}))
    assert [call.name for call in step.calls] == ["a", "b"]
    assert step.text == "Both."


def test_call_ids_follow_from_the_conversation() -> None:
    """A request that is sent again gets the same ids, a later one others (P7)."""
    script = Script()
    script.on("x", call_tools(call_tool("a", {}), call_tool("b", {}, call_id="mine")))

    def ids(*messages: SeenMessage) -> list[str | None]:
        answer = script.play(asked(*messages)).answer
        assert isinstance(answer, ToolCalls)
        return [call.call_id for call in answer.calls]

    assert ids(user("x")) == ids(user("x")) == ["call_1_1", "mine"]
    assert ids(user("x"), CALLED, RETURNED) == ["call_2_1", "mine"]


def test_requests_are_counted_from_any_thread() -> None:
    """No request is lost between threads."""
    script = Script()
    script.on("", reply("ok"))
    with ThreadPoolExecutor(8) as pool:
        for number in range(200):
            pool.submit(answer_to, script, user(str(number)))
    assert script.requests == 200
    assert {request.prompt for request in script.seen} == {str(n) for n in range(200)}


def test_script_survives_json() -> None:
    """A stub in another process plays the same script."""
    script = Script()
    script.on("a", [fail(429, retry_after=1.5, error_code="rate_limit_exceeded"), reply("x", finish="length")])
    script.on("b", call_tools(call_tool("t", {"path": None, "n": [1]}, call_id="c"), call_tool("u", "not json")))
    script.on("c", [disconnect(after="par", clean=True), stall(), reply("", reasoning="hm", usage={"input_tokens": 9})])
    copy = Script.from_json(script.to_json())
    assert copy.to_json() == script.to_json()
    assert copy.play(asked(user("b"))) == script.play(asked(user("b")))


def test_script_with_an_event_is_not_written() -> None:
    """An event cannot leave its process, and the refusal says which rule has one."""
    script = Script()
    script.on("slow", [wait_for(threading.Event()), reply("x")])
    with pytest.raises(ConfigurationError, match="'slow' waits for an event"):
        script.to_json()


@pytest.mark.parametrize("text", ["", "[]", '{"rules":[{"contains":"a","steps":[{"kind":"replay"}]}]}'])
def test_text_that_is_no_script_is_refused(text: str) -> None:
    """Refused before the server starts (P13)."""
    with pytest.raises(ConfigurationError, match="no script"):
        Script.from_json(text)


@pytest.mark.parametrize("steps", [[], ["hello"], [None]])
def test_rule_without_usable_steps_is_refused(steps: list[object]) -> None:
    """Refused where the rule is written (P13)."""
    with pytest.raises(ConfigurationError, match="'x'"):
        Script().on("x", steps)  # pyright: ignore[reportArgumentType]  # the point of the test


@pytest.mark.parametrize("text", ["", "one", " a  b\nc ", "w " * 500])
def test_deltas_join_to_the_text(text: str) -> None:
    """Streaming changes no character and stays bounded."""
    assert "".join(deltas(text)) == text
    assert len(deltas(text)) <= 16


def test_usage_is_never_zero_unless_asked_for() -> None:
    """A client that sums tokens sees something."""
    assert min(usage_of(reply(""), asked())) >= 1
    assert usage_of(reply("x", usage={"input_tokens": 7, "output_tokens": 0}), asked()) == (7, 0)


async def test_threading_event_set_elsewhere_releases_the_wait() -> None:
    """The model may wait for a thread that is not the loop's."""
    event = threading.Event()
    waiting = asyncio.create_task(wait_for(event).passed())
    await asyncio.to_thread(event.set)
    await asyncio.wait_for(waiting, 5)


async def test_asyncio_event_of_another_loop_releases_the_wait() -> None:
    """A worker's loop may wait for an event of the test's."""
    event = asyncio.Event()
    step = wait_for(event)
    waiting = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(step.passed())))
    event.set()
    await asyncio.wait_for(waiting, 5)


def test_asyncio_event_of_an_unknown_loop_releases_the_wait() -> None:
    """A script written outside any loop works too."""
    event = asyncio.Event()
    step = wait_for(event)

    async def play() -> None:
        waiting = asyncio.create_task(step.passed())
        event.set()
        await asyncio.wait_for(waiting, 5)

    asyncio.run(play())


async def test_cancelled_wait_leaves_no_thread() -> None:
    """A killed child must not keep a thread for an event that nobody sets."""
    waiting = asyncio.create_task(wait_for(threading.Event()).passed())
    await asyncio.sleep(0)
    watchers = [thread for thread in threading.enumerate() if thread.name == "scripted-wait-for"]
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.to_thread(watchers[0].join, 5)
    assert not watchers[0].is_alive()


def test_blocking_wait_ends_when_its_owner_stops() -> None:
    """A stub that stops does not hang on an event that nobody sets."""
    stopping = threading.Event()
    stopping.set()
    assert not wait_for(threading.Event()).passed_blocking(stopping=stopping)
