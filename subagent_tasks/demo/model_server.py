"""The process that serves the demo's model: an OpenAI-compatible API on a free loopback port.

Prints its URL as one line on stdout once it is ready, and ends when its stdin is closed, so that it cannot outlive the
demo. Started by `processes.local_model`.
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


def serve(weights: str) -> None:
    """Serve the weights until stdin ends."""
    parameters: Any = cast("Any", xllamacpp).CommonParams()
    parameters.model.path = weights
    parameters.model_alias = {MODEL_NAME}
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = 0
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
    server: Any = cast("Any", xllamacpp).Server(parameters)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    serve(sys.argv[1])
