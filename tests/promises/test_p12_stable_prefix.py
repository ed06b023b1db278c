"""P12: what a model reads first is the same to the byte in every process, and what it has read once stays as it was."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from stage import Stage, delegate, start_job

from subagent_tasks.testing import call_tool, call_tools, reply, wait_until

# What a host hands to its model, as one line. Each process hashes strings in a way of its own.
SHOWN = """
import asyncio, json
from agents import app
async def main():
    async with app.host() as host:
        session = await host.open_session("p12")
        tools = [tool.for_openai() for tool in session.tools]
        print(json.dumps([tools, session.system_prompt]))
asyncio.run(main())
"""


async def test_hosts_show_their_models_the_same_bytes(stage: Stage) -> None:
    """P12: two processes of one declaration; definitions and prompt sections, in their order."""
    async with stage.session("p12") as session:
        here = json.dumps([[tool.for_openai() for tool in session.tools], session.system_prompt])
    assert stage.run("-c", SHOWN).strip() == here


async def test_children_of_two_workers_begin_with_the_same_bytes(stage: Stage) -> None:
    """P12: tools, instructions and prompt of the first request, whichever process sends it."""
    first, second = stage.ensure(2, concurrency=1)
    stage.model.on("p12-begin", reply("done"))
    async with stage.session() as session:
        pids = set[int]()
        for idle in (first, second):
            idle.freeze()
            job_id = await start_job(session, "p12-begin")
            await wait_until(lambda id=job_id: stage.state(id) == "settled", description="it ended")
            pids.add(stage.driver_pid(job_id))
            idle.thaw()
    one, two = asked(stage, "p12-begin")
    assert pids == {first.pid, second.pid}
    assert json.dumps(one) == json.dumps(two)


async def test_a_conversation_only_grows_wherever_it_goes_on(stage: Stage) -> None:
    """P12, P7: over a suspension and the death of a worker each request begins with the whole one before it."""
    stage.ensure(2)
    both = call_tools(call_tool("note", {"text": "p12-grow"}), delegate("p12-own"))
    held = call_tool("hold", {"text": "p12-grow held"})
    stage.model.on("p12-grow", [both, held, call_tool("note", {"text": "p12-grow again"}), reply("grown")])
    stage.model.on("p12-own", reply("found"))
    async with stage.session() as session:
        job_id = await start_job(session, "p12-grow")
        stage.by_pid(await stage.noted("p12-grow held begun")).kill()
        await wait_until(lambda: stage.state(job_id) == "settled", description="another worker finished it")
    bodies = asked(stage, "p12-grow")
    assert len(bodies) == 4
    for before, after in pairwise(bodies):
        told = before["messages"]
        assert json.dumps(after["messages"][: len(told)]) == json.dumps(told)
        assert json.dumps(after["tools"]) == json.dumps(before["tools"])


def asked(stage: Stage, prompt: str) -> list[dict[str, Any]]:
    """The bodies of the requests for the child with this prompt."""
    return [body for body in stage.model.bodies if f'"{prompt}"' in json.dumps(body["messages"])]
