"""A host: hands the tools to its model, passes the model's calls in, receives the notices."""

from __future__ import annotations

import asyncio

from agents import app


async def main() -> None:
    async with app.host() as host:
        session = await host.open_session("conversation-42")

        # Give these to your model: session.tools has .for_openai() and .for_anthropic(), session.system_prompt the
        # guidance that belongs to them. What follows are calls as a model makes them.
        print("tools:", ", ".join(tool.name for tool in session.tools))

        task = {"description": "greet", "prompt": "Say hello in one short sentence."}
        result = await session.call("subagent", task)
        print("foreground:", result.text)

        job = {"description": "count", "prompt": "Name three prime numbers.", "run_in_background": True}
        started = await session.call("subagent", job)
        print("background:", started.text)

        async for notice in session.notices():
            print("notice:", notice.text)
            await session.acknowledge(notice)
            output = await session.call("job_output", {"job_id": notice.sender_id})
            print("output:", output.text)
            break


if __name__ == "__main__":
    asyncio.run(main())
