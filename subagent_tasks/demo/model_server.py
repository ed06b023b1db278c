"""The process that serves the demo's model: an OpenAI-compatible API, on a free loopback port unless told otherwise.

Run as a program it prints its URL as one line on stdout once it is ready, and ends when its stdin is closed, so that it
cannot outlive the demo. Started by `processes.local_model`.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import xllamacpp  # pyright: ignore[reportMissingTypeStubs]  # a compiled module without annotations

MODEL_NAME = "smollm2"
CONTEXT_TOKENS = 8192
"""For all children at once: each has a third."""
PARALLEL = 3
THREADS = 2


def start(weights: str, *, host: str = "127.0.0.1", port: int = 0) -> Any:
    """A server of the weights, ready; it ends with this process. Port 0 is a free one: see its `listening_address`."""
    parameters: Any = cast("Any", xllamacpp).CommonParams()
    parameters.model.path = weights
    parameters.model_alias = {MODEL_NAME}
    parameters.hostnames = [host]
    parameters.port = port
    parameters.use_jinja = True
    parameters.n_ctx = CONTEXT_TOKENS
    parameters.n_parallel = PARALLEL
    # Small batches: a child that was killed frees its slot after one.
    parameters.n_batch = parameters.n_ubatch = 256
    for cpu in (parameters.cpuparams, parameters.cpuparams_batch):
        cpu.n_threads = THREADS
    # A model this small repeats itself, and does not know when to stop: one line is an answer.
    parameters.sampling.temp = 0.2
    parameters.sampling.penalty_repeat = 1.1
    parameters.antiprompt = ["\n"]
    return cast("Any", xllamacpp).Server(parameters)


if __name__ == "__main__":
    server = start(sys.argv[1])
    print(server.listening_address, flush=True)
    sys.stdin.read()
