"""What a chaos run will do, from its seed alone: what is delegated, and what goes wrong when. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

Purpose = Literal["wait", "collect", "hear", "kill by model", "kill by host", "kill by operator"]
"""How a delegation is dealt with: awaited in the foreground; or a job that is collected, announced or killed."""

PURPOSES: dict[Purpose, int] = {
    "wait": 6, "collect": 4, "hear": 4, "kill by model": 1, "kill by host": 1, "kill by operator": 1,
}  # fmt: skip

WorkerFault = Literal["kill", "stop", "short freeze", "long freeze"]
WORKER_FAULTS: dict[WorkerFault, int] = {"kill": 14, "stop": 3, "short freeze": 1, "long freeze": 2}

LinkFault = Literal["cut", "lose", "stall"]
LINK_FAULTS: dict[LinkFault, int] = {"cut": 3, "lose": 8, "stall": 1}

ServerFault = Literal["short freeze", "long freeze", "restart"]
SERVER_FAULTS: dict[ServerFault, int] = {"short freeze": 3, "long freeze": 1, "restart": 2}


@dataclass(frozen=True, slots=True)
class Delegation:
    """One call of a host: what for, what the child will do, and after how long a killer strikes."""

    id: str
    purpose: Purpose
    plan: dict[str, Any]
    kill_after_seconds: float

    @property
    def prompt(self) -> str:
        return json.dumps(self.plan)


def delegations(seed: str) -> Iterator[Delegation]:
    """What one lane of a session delegates, one after another, without end. Ids begin with `seed`."""
    random = Random(seed)
    number = 0
    while True:
        number += 1
        name = f"{seed}.{number}"
        purpose = random.choices(list(PURPOSES), list(PURPOSES.values()))[0]
        # One more level than the cap allows, now and then.
        depth = random.choices([1, 2, 3, 4], [10, 5, 3, 1])[0]
        yield Delegation(name, purpose, plan(name, random, depth=depth), random.uniform(0, 0.8))


def plan(name: str, random: Random, *, depth: int) -> dict[str, Any]:
    """What a child does: messages with tool calls, and, `depth` allowing, children of its own among them."""
    steps: list[list[tuple[str, dict[str, Any]]]] = []
    for step in range(random.randint(1, 3)):
        calls: list[tuple[str, dict[str, Any]]] = []
        for call in range(random.randint(1, 2)):
            text = f"{name}:{step}:{call}"
            tool = random.choices(["act", "grind"], [4, 1])[0]
            calls.append((tool, {"text": text, "seconds": round(random.expovariate(8), 3)}))
        steps.append(calls)
    if depth > 1:
        calls = [
            delegate(plan(f"{name}-{child}", random, depth=depth - 1), is_background=random.random() < 0.3)
            for child in range(random.randint(1, 3))
        ]
        steps.insert(random.randint(0, len(steps)), calls)
    return {"id": name, "think_seconds": round(random.expovariate(20), 3), "steps": steps}


def delegate(plan: dict[str, Any], *, is_background: bool) -> tuple[str, dict[str, Any]]:
    """The call that hands a plan to a child."""
    return "subagent", {
        "description": plan["id"],
        "prompt": json.dumps(plan),
        "run_in_background": is_background,
    }


def acts_of(plan: dict[str, Any]) -> list[str]:
    """The texts of a plan's own effects, in order."""
    return [arguments["text"] for step in plan["steps"] for tool, arguments in step if tool != "subagent"]


def worker_faults(seed: int) -> Iterator[tuple[float, WorkerFault, int]]:
    """Seconds since the one before, what happens, and to which of the workers (modulo their number)."""
    random = Random(f"workers {seed}")
    while True:
        fault = random.choices(list(WORKER_FAULTS), list(WORKER_FAULTS.values()))[0]
        yield random.uniform(0.5, 3), fault, random.randrange(1000)


def link_faults(seed: int) -> Iterator[tuple[float, LinkFault, int, float]]:
    """Seconds since the one before, what happens, where (modulo the links), and a number from 0 to 1 for how much."""
    random = Random(f"links {seed}")
    while True:
        fault = random.choices(list(LINK_FAULTS), list(LINK_FAULTS.values()))[0]
        yield random.uniform(0.2, 1.0), fault, random.randrange(1000), random.random()


def server_faults(seed: int) -> Iterator[tuple[float, ServerFault]]:
    """Seconds since the one before, and what happens to the server."""
    random = Random(f"server {seed}")
    while True:
        fault = random.choices(list(SERVER_FAULTS), list(SERVER_FAULTS.values()))[0]
        yield random.uniform(6, 25), fault
