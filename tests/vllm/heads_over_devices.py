"""What engines with heads that draft do over several CPU devices, in a process of its own: test_heads_over_devices.py.

    PJRT_DEVICE=CPU XLA_FLAGS="--xla_dump_to=FOLDER --xla_dump_hlo_as_text" \\
        python -m tests.vllm.heads_over_devices DEVICES CASE [CASE ...]

A case is JSON: target, method, head (null where it is the model's own layer), and options of the engine. One line of
output starts with "RESULT " and is JSON: what ``draft`` has of each case, or why its engine was refused.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch

from tests.vllm import engines, heads, tiny
from tests.vllm.tensor_parallel import cache_shardings, dumped

NUM_DRAFTS = 3
NEW_TOKENS = 24
PROMPTS = tiny.prompts((5, 17, 1, 70, 12))
SAMPLED = [engines.random(NEW_TOKENS, seed=5, temperature=0.3), engines.greedy(NEW_TOKENS, presence_penalty=0.5)]
DUMP = re.search(r"--xla_dump_to=(\S+)", os.environ.get("XLA_FLAGS", ""))


def draft(devices: int, target: str, method: str, head: str | None, **options: object) -> dict | str:
    """Tokens, drafts as heads.Recorder has them, how weights and caches are divided, and the texts' names.

    And the bytes of a device that the engine counts for the model and the head, and those that they take.
    """
    import torch_xla

    from xla_gpu.vllm import tensor_parallel

    folder = Path(DUMP[1])
    before, spec = set(dumped(folder)), torch_xla._XLAC._get_xla_sharding_spec
    placed = 0 if (active := tensor_parallel.active()) is None else active.bytes_per_device
    drafts = {"method": method, "num_speculative_tokens": NUM_DRAFTS, **({} if head is None else {"model": head})}
    try:
        with cache_shardings() as caches:
            llm = engines.make(target, tensor_parallel_size=devices, speculative_config=drafts, **options)
    except Exception as error:
        return str(error)
    runner = engines.runner_of(llm)
    recorder = heads.Recorder(runner)
    greedy = engines.tokens(llm, PROMPTS, engines.greedy(NEW_TOKENS))
    found = {"greedy": greedy, "drafts": recorder.drafts, "counts": (recorder.drafted, recorder.accepted)}
    recorder.clear()
    both = torch.nn.ModuleList([runner.model, runner.head])
    whole = {id(tensor): tensor for tensor in (*both.parameters(), *both.buffers())}.values()
    shares = [tensor.nbytes // (1 if spec(tensor) == "{replicated}" else devices) for tensor in whole]
    return {
        **found,
        "bytes": [tensor_parallel.active().bytes_per_device - placed, sum(shares)],
        "sampled": engines.tokens(llm, PROMPTS[: len(SAMPLED)], SAMPLED),
        "compiled": engines.compiled_since_start(llm),
        "weights": {name: spec(parameter) for name, parameter in runner.head.named_parameters()},
        "caches": caches,
        "programs": sorted(path.name for path in set(dumped(folder)) - before),
    }


if __name__ == "__main__":
    made = [draft(int(sys.argv[1]), **json.loads(case)) for case in sys.argv[2:]]
    print("RESULT " + json.dumps({"cases": made}))
