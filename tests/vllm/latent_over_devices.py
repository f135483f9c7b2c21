"""What models with latent attention do over several CPU devices, in a process of its own: test_latent_attention.py.

    PJRT_DEVICE=CPU python -m tests.vllm.latent_over_devices DEVICES FOLDER [FOLDER ...]

One line of output starts with "RESULT " and is JSON.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from tests.vllm import engines, tiny
from tests.vllm.tensor_parallel import cache_shardings

NEW_TOKENS = 12
PROMPTS = tiny.prompts((5, 70, 33, 1))


def case(devices: int, folder: str) -> dict:
    """Greedy tokens, and how caches and weights are divided, as torch_xla says it."""
    import torch_xla

    spec = torch_xla._XLAC._get_xla_sharding_spec
    with cache_shardings() as caches:
        llm = engines.make(folder, tensor_parallel_size=devices)
    runner = engines.runner_of(llm)
    return {
        "tokens": engines.tokens(llm, PROMPTS, engines.greedy(NEW_TOKENS)),
        "compiled": engines.compiled_since_start(llm),
        "caches": caches,
        "cache_bytes": sum(cache.nbytes for cache in runner.caches.tensors),
        "weights": {name: spec(parameter) for name, parameter in runner.model.named_parameters()},
    }


if __name__ == "__main__":
    print("RESULT " + json.dumps({"cases": [case(int(sys.argv[1]), folder) for folder in sys.argv[2:]]}))
