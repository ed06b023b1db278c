"""Children that delegate: whole trees per second, beside as many children that a host starts itself.

Each child above the last level calls the delegation tool `FAN_OUT` times in one message and waits, suspended, for all
of them; the model answers at once on both sides. What a tree costs more than its children alone is what nesting costs.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, UserPromptPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from benchmarks.machine import group_cpu_seconds
from benchmarks.samples import Figure, median_of
from benchmarks.stage import Stage, call
from broker_config import BrokerSettings, load_settings
from subagent_tasks import SubagentApp
from subagent_tasks.host import Session
from subagent_tasks.providers import SpawnProvider

DEPTH = 3
FAN_OUT = 5
RUNS_PER_TREE = sum(FAN_OUT**level for level in range(DEPTH))
CHILDREN_IN_FLIGHT = 4 * RUNS_PER_TREE
TREES_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class Trees:
    """Rates over all rounds; `cpu_ms` is the worker's CPU time per run in a tree, beside per child without one."""

    trees_per_second: Figure
    runs_per_second: Figure
    flat_per_second: Figure
    cpu_ms: Figure
    flat_cpu_ms: Figure


async def measure_trees(stage: Stage, *, rounds: int, trees: int) -> Trees:
    """`trees` trees, then as many children without one, `rounds` times, on one worker process."""
    app = declare(load_settings())
    rates, flat_rates = list[float](), list[float]()
    cpu, flat_cpu = list[float](), list[float]()
    try:
        with stage.worker("benchmarks.tree_agents") as worker:
            await stage.wait_ready(ours=1)
            async with stage.sessions(app=app) as (session,):
                await _carry_out(session, "tree 1", count=2, in_flight=2)
                for _ in range(rounds):
                    seconds, spent = await _timed(session, worker.pid, "tree 1", count=trees, in_flight=TREES_IN_FLIGHT)
                    rates.append(trees / seconds)
                    cpu.append(spent * 1000 / (trees * RUNS_PER_TREE))
                    count = trees * RUNS_PER_TREE
                    seconds, spent = await _timed(
                        session, worker.pid, f"tree {DEPTH}", count=count, in_flight=CHILDREN_IN_FLIGHT
                    )
                    flat_rates.append(count / seconds)
                    flat_cpu.append(spent * 1000 / count)
    finally:
        app.celery.close()
    return Trees(
        trees_per_second=median_of(rates),
        runs_per_second=median_of([rate * RUNS_PER_TREE for rate in rates]),
        flat_per_second=median_of(flat_rates),
        cpu_ms=median_of(cpu),
        flat_cpu_ms=median_of(flat_cpu),
    )


def declare(settings: BrokerSettings | None = None) -> SubagentApp:
    """The app of worker and host alike."""
    app = SubagentApp(settings)
    app.add_provider(SpawnProvider(model=tree_model()))
    app.add_delegation_tool(provider="spawn", max_depth=DEPTH)
    return app


def tree_model() -> FunctionModel:
    """A child at level n delegates to the next one, `FAN_OUT` times at once; the last one answers."""

    async def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        prompt = next(str(part.content) for part in messages[0].parts if isinstance(part, UserPromptPart))
        level = int(prompt.partition(" ")[2])
        if level == DEPTH or len(messages) > 1:
            return ModelResponse(parts=[TextPart("done")])
        task = {"description": "a part", "prompt": f"tree {level + 1}"}
        return ModelResponse(parts=[ToolCallPart("subagent", task) for _ in range(FAN_OUT)])

    return FunctionModel(answer, model_name="tree")


async def _timed(session: Session, pid: int, prompt: str, *, count: int, in_flight: int) -> tuple[float, float]:
    """Seconds of wall and of the worker's CPU time."""
    cpu_seconds, begun = group_cpu_seconds(pid), time.perf_counter()
    await _carry_out(session, prompt, count=count, in_flight=in_flight)
    return time.perf_counter() - begun, group_cpu_seconds(pid) - cpu_seconds


async def _carry_out(session: Session, prompt: str, *, count: int, in_flight: int) -> None:
    room = asyncio.Semaphore(in_flight)

    async def one() -> None:
        async with room:
            await call(session, prompt)

    await asyncio.gather(*(one() for _ in range(count)))
