"""The other side of `waiting`: the same children in a bare event loop, with nothing of the product's.

`python -m benchmarks.bare_loop COUNT` says `ready`, starts them all at once when it is told `go`, says `done` when the
last has answered, and ends when its input does.
"""

from __future__ import annotations

import asyncio
import sys

from pydantic_ai import Agent

from benchmarks.child import INSTRUCTIONS, look_up, prompt_of, waiting_model


async def _run(count: int) -> None:
    agent = Agent(waiting_model(), instructions=INSTRUCTIONS, tools=[look_up])
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await asyncio.gather(*(agent.run(prompt_of(number)) for number in range(count)))
    print("done", flush=True)
    await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    asyncio.run(_run(int(sys.argv[1])))
