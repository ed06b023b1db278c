"""P5 for trees: a kill reaches all descendants, whoever asks for it, wherever they are, and whoever is left to do it.

All workers here serve `spawn` alone: children of `apart` stay in their queue.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from stage import LEASE_SECONDS, MakeStage, Stage, arguments, delegate, notices_of, start_job

from subagent_tasks.host import Session
from subagent_tasks.protocol.ids import run_id_for_call
from subagent_tasks.testing import call_tool, call_tools, reply, wait_for, wait_until
from subagent_tasks.testing.processes import WorkerProcess
from subagent_tasks.testing.script import ToolCalls

THREE_LEASES_SECONDS = 3 * LEASE_SECONDS
SLOTS = 13
"""Three workers have room for the whole tree of forty."""


@pytest.fixture(scope="module")
def three_workers(stage: Stage) -> list[WorkerProcess]:
    return stage.ensure(3, concurrency=SLOTS, providers=("spawn",))


@pytest.fixture(autouse=True)
def workers(stage: Stage, three_workers: list[WorkerProcess]) -> list[WorkerProcess]:
    """The two that one test leaves to the next; the first test ends the third."""
    return stage.ensure(2, concurrency=SLOTS, providers=("spawn",))


async def test_forty_descendants_end_with_their_root_while_a_worker_dies(
    stage: Stage, three_workers: list[WorkerProcess]
) -> None:
    """P5: foreground and background; suspended, or driven in a tool or a model request; within three leases.

    All are held when the kill comes, and not one of them asks its model again.
    """
    [victim, _, _] = three_workers
    gate = threading.Event()
    in_model = [wait_for(gate), reply("never")]
    in_tool = [call_tool("hold", {"text": "p5-forty"}), reply("never")]
    stage.model.on("p5-forty leaf in a model", in_model)
    stage.model.on("p5-forty leaf in a tool", in_tool)
    stage.model.on("p5-forty waits", [leaves(foreground=9), reply("never")])
    stage.model.on("p5-forty mixed", [leaves(foreground=5, background=4), reply("never")])
    stage.model.on("p5-forty asks", [leaves(background=9), *in_model])
    stage.model.on("p5-forty works", [leaves(background=9), *in_tool])
    children = [delegate(f"p5-forty {name}") for name in ("waits", "asks")]
    children += [delegate(f"p5-forty {name}", background=True) for name in ("mixed", "works")]
    stage.model.on("p5-forty root", [call_tools(*children), reply("never")])

    def held() -> int:
        asking = len(stage.asked("p5-forty leaf in a model")) + (len(stage.asked("p5-forty asks")) == 2)
        return asking + len(stage.notes("p5-forty begun"))

    def states() -> Counter[str]:
        return Counter(run["state"] for run in stage.tree(session.id))

    async with stage.session() as session:
        root = await start_job(session, "p5-forty root")
        await wait_until(lambda: len(stage.tree(session.id)) == 1 + 4 + 36, description="the tree is there")
        await wait_until(lambda: held() == 36 + 2, description="models and tools hold all that do not wait")
        await wait_until(lambda: states() == {"suspended": 3, "driven": 38}, description="the others wait")
        asked = stage.model.requests
        await asyncio.gather(session.kill(root), asyncio.to_thread(victim.kill))
        await wait_until(
            lambda: states() == {"settled": 41}, description="all ended", timeout_seconds=THREE_LEASES_SECONDS
        )
        gate.set()
        stage.open_gate("p5-forty")
        await receive_what_waits(stage)
        # The one that came after.
        assert stage.model.requests == asked + 1
        assert stage.notes("p5-forty ended") == []
        assert {run["status"] for run in stage.tree(session.id)} == {"killed"}
        assert await told(stage, session) == [root]
    await stage.assert_clean()


async def test_forty_descendants_that_mostly_queue_end_with_their_root_while_a_worker_dies(
    make_stage: MakeStage,
) -> None:
    """P5: slots that the kill frees go to descendants that it has not reached yet: they end without asking."""
    stage = make_stage()
    [victim, *_] = stage.ensure(3, concurrency=2, providers=("spawn",))
    gate = threading.Event()
    stage.model.on("p5-queue leaf", [wait_for(gate), reply("never")])
    leaf = delegate("p5-queue leaf", background=True)
    stage.model.on("p5-queue branch", [call_tools(*[leaf] * 9), wait_for(gate), reply("never")])
    branch = delegate("p5-queue branch", background=True)
    stage.model.on("p5-queue root", [call_tools(*[branch] * 4), wait_for(gate), reply("never")])

    def states() -> Counter[str]:
        return Counter(run["state"] for run in stage.tree(session.id))

    async with stage.session() as session:
        root = await start_job(session, "p5-queue root")
        asked = 2 + 4 * 2 + 1
        await wait_until(lambda: stage.model.requests == asked, description="the model holds six")
        await wait_until(lambda: states() == {"driven": 6, "queued": 35}, description="the others queue")
        await asyncio.gather(session.kill(root), asyncio.to_thread(victim.kill))
        await wait_until(
            lambda: states() == {"settled": 41}, description="all ended", timeout_seconds=THREE_LEASES_SECONDS
        )
        gate.set()
        await receive_what_waits(stage)
        # The one that came after.
        assert stage.model.requests == asked + 1
        assert {run["status"] for run in stage.tree(session.id)} == {"killed"}
        assert await told(stage, session) == [root]
    await stage.assert_clean()


async def by_its_host(stage: Stage, session: Session, root: str) -> None:
    await session.kill(root, "no longer needed")


async def by_its_owner_s_model(stage: Stage, session: Session, root: str) -> None:
    assert not (await session.call("job_kill", {"job_id": root})).is_error


async def by_the_command_line(stage: Stage, session: Session, root: str) -> None:
    await asyncio.to_thread(stage.run, "-m", "subagent_tasks", "kill", root)


async def by_celery_s_revoke(stage: Stage, session: Session, root: str) -> None:
    stage.app.celery.control.revoke(root)


@pytest.mark.parametrize(
    ("kill", "notices"),
    [(by_its_host, 1), (by_its_owner_s_model, 0), (by_the_command_line, 1), (by_celery_s_revoke, 1)],
)
async def test_whoever_kills_a_root_ends_the_tree(
    stage: Stage, kill: Callable[[Stage, Session, str], Awaitable[None]], notices: int
) -> None:
    """P5, protocol §5: all below it end too; its ending is told unless its owner's model asked, theirs to nobody."""
    name = f"p5-{kill.__name__}"
    grow(stage, name)
    async with stage.session() as session:
        root = await start_job(session, f"{name} root")
        await is_grown(stage, name, session.id)
        await kill(stage, session, root)
        await wait_until(lambda: set(stage.states()) == {"settled"}, description="all ended")
        stage.open_gate(name)
        assert {run["status"] for run in stage.tree(session.id)} == {"killed"}
        assert stage.notes(f"{name} ended") == []
        assert len(await told(stage, session)) == notices
    await stage.assert_clean()


async def test_a_child_s_model_kills_its_job_and_goes_on(stage: Stage) -> None:
    """P5: the tree below the job ends, its owner does not, and needs no notice of what it asked for."""
    gate = threading.Event()
    async with stage.session() as session:
        top = run_id_for_call(namespace=stage.namespace, session_id=session.id, call_id="top")
        job_id = run_id_for_call(namespace=stage.namespace, session_id=top, call_id="1:job")
        grow(stage, "p5-own")
        started = delegate("p5-own root", background=True, call_id="job")
        stage.model.on("p5-own top", [started, wait_for(gate), call_tool("job_kill", {"job_id": job_id}), reply("on")])
        call = asyncio.ensure_future(session.call("subagent", arguments("p5-own top"), call_id="top", timeout=10))
        await is_grown(stage, "p5-own", session.id, above=1)
        gate.set()
        result = await call
        assert result.text == "on"
        await wait_until(lambda: set(stage.states()) == {"settled"}, description="all ended")
        tree = {run["id"]: run["status"] for run in stage.tree(session.id)}
        assert (tree.pop(top), tree.pop(job_id), set(tree.values())) == ("completed", "killed", {"killed"})
        # Its last request: no more user messages than the prompt.
        assert [message.role for message in stage.asked("p5-own top")[-1].messages].count("user") == 1
    await stage.assert_clean()


async def test_what_is_above_a_killed_child_goes_on(stage: Stage) -> None:
    """P5: an operator ends one in the middle; what is below ends with it, the one above reads so and answers."""
    grow(stage, "p5-middle")
    stage.model.on("p5-middle top", [delegate("p5-middle root"), reply("without it")])
    async with stage.session() as session:
        call = asyncio.ensure_future(session.call("subagent", arguments("p5-middle top"), timeout=10))
        await is_grown(stage, "p5-middle", session.id, above=1)
        top, middle, *_ = stage.tree(session.id)
        stage.app.celery.control.revoke(middle["id"])
        assert (await call).text == "without it"
        assert "subagent run was cancelled" in stage.asked("p5-middle top")[-1].messages[-1].text
        await wait_until(lambda: set(stage.states()) == {"settled"}, description="all ended")
        statuses = [run["status"] for run in stage.tree(session.id)]
        assert (statuses, top["id"]) == (["completed"] + ["killed"] * 5, stage.tree(session.id)[0]["id"])
        assert await told(stage, session) == []
    await stage.assert_clean()


async def test_a_kill_while_the_tree_grows_leaves_nothing_behind(stage: Stage) -> None:
    """P5: six trees that would end by themselves, each killed once so many of its children had asked their model."""
    kinds = (False, True, False)
    trees = [f"p5-grows-{number}" for number in range(6)]
    for name in trees:
        branches = [delegate(f"{name} branch", background=kind) for kind in kinds]
        stage.model.on(f"{name} root", [call_tools(*branches), reply("done")])
        leaves = [delegate(f"{name} leaf", background=kind) for kind in kinds[:2]]
        stage.model.on(f"{name} branch", [call_tools(*leaves), reply("done")])
        stage.model.on(f"{name} leaf", reply("quick"))
    async with stage.session() as session:

        async def race(name: str, asked: int) -> str:
            root = await start_job(session, f"{name} root")
            await wait_until(lambda: len(stage.heard(name)) >= asked, description="it has grown so far")
            await session.kill(root)
            return root

        roots = await asyncio.gather(*(race(name, number) for number, name in enumerate(trees, 1)))
        await wait_until(lambda: set(stage.states()) == {"settled"}, description="all ended")
        assert sorted(await told(stage, session)) == sorted(roots)
    await stage.assert_clean()


async def test_with_no_worker_left_the_host_ends_the_tree(stage: Stage) -> None:
    """P5, P6: the host that kills walks the tree: suspended and queued ones end; what the dead drove, its sweeper."""
    apart = delegate("p5-alone queued", tool="subagent_apart")
    stage.model.on(
        "p5-alone root",
        [call_tools(delegate("p5-alone leaf"), delegate("p5-alone branch", background=True), apart), reply("never")],
    )
    stage.model.on("p5-alone branch", [apart, reply("never")])
    stage.model.on("p5-alone leaf", [call_tool("hold", {"text": "p5-alone"}), reply("never")])
    async with stage.session() as session:
        root = await start_job(session, "p5-alone root")
        await stage.noted("p5-alone begun")

        def states() -> Counter[str]:
            return Counter(run["state"] for run in stage.tree(session.id))

        expected = {"suspended": 2, "driven": 1, "queued": 2}
        await wait_until(lambda: states() == expected, description="the tree is held")
        for worker in stage.living:
            worker.kill()
        await session.kill(root)
        assert states() == {"settled": 4, "driven": 1}
        await wait_until(
            lambda: states() == {"settled": 5}, description="all ended", timeout_seconds=THREE_LEASES_SECONDS
        )
        assert await told(stage, session) == [root]
        await stage.assert_clean()


def leaves(*, foreground: int = 0, background: int = 0) -> ToolCalls:
    """A message that starts so many children, held in turn by a model and by a tool."""
    kinds = [False] * foreground + [True] * background
    places = ("a model", "a tool")
    return call_tools(
        *(delegate(f"p5-forty leaf in {places[number % 2]}", background=kind) for number, kind in enumerate(kinds))
    )


def grow(stage: Stage, name: str) -> None:
    """A root with a foreground and a background child and a child of each: five runs, of which the leaves hold."""
    stage.model.on(
        f"{name} root",
        [call_tools(delegate(f"{name} waits"), delegate(f"{name} asks", background=True)), reply("never")],
    )
    stage.model.on(f"{name} waits", [delegate(f"{name} leaf", tool="subagent_deep"), reply("never")])
    leaf = delegate(f"{name} leaf", tool="subagent_deep", background=True)
    stage.model.on(f"{name} asks", [leaf, call_tool("hold", {"text": name})])
    stage.model.on(f"{name} leaf", [call_tool("hold", {"text": name}), reply("never")])


async def is_grown(stage: Stage, name: str, session_id: str, *, above: int = 0) -> None:
    """The tree is whole and held: by three tools, with two suspended, and `above` more runs over it."""
    await wait_until(lambda: len(stage.notes(f"{name} begun")) == 3, description="three tools hold the tree")
    await wait_until(
        lambda: Counter(run["state"] for run in stage.tree(session_id))["suspended"] >= 2, description="two wait"
    )
    assert len(stage.tree(session_id)) == 5 + above


async def receive_what_waits(stage: Stage) -> None:
    """Queues are first in, first out: once a later run has ended, all messages before its own were received."""
    stage.model.on("p5-after", reply("after"))
    async with stage.session() as session:
        assert (await session.call("subagent", arguments("p5-after"), timeout=10)).text == "after"


async def told(stage: Stage, session: Session) -> list[str]:
    """Whose endings the session was told of."""
    count = int(str(stage.redis.xlen(stage.keys.notices(session.id))))
    return [notice.sender_id for notice in await notices_of(session, count)] if count else []
