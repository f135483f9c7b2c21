"""What engines over several CPU devices do. SPMD is for a whole process, so this is one: test_tensor_parallel.py.

    PJRT_DEVICE=CPU python -m tests.vllm.tensor_parallel DEVICES FOLDER [OTHER ...]

One line of output starts with "RESULT " and is JSON: of the first model all that ``generate`` has, of others the greedy
tokens, or why they were refused.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from tests.vllm import tiny
from tests.vllm.engines import compiled_since_start, greedy, make, metric, random, run, runner_of, tokens

PROMPTS = tiny.prompts((5, 70, 33, 1))
NEW_TOKENS = 12
PENALISED = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "presence_penalty": 0.5}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def generate(llm) -> dict:
    """Tokens and log-probabilities: greedy, with all kinds of sampling, prompts read in chunks."""
    outputs = run(llm, PROMPTS[:2], greedy(2, logprobs=3))
    return {
        "greedy": tokens(llm, PROMPTS, greedy(NEW_TOKENS)),
        "sampled": tokens(llm, PROMPTS[:2], [random(8, seed=3), random(8, **PENALISED)]),
        "logprobs": [[sorted(e.logprob for e in step.values()) for step in o.outputs[0].logprobs] for o in outputs],
    }


def draft(llm) -> list[list[int]]:
    """Tokens of few, of which some come again."""
    few = {"allowed_token_ids": [70, 71, 72]}
    return tokens(llm, PROMPTS, [greedy(24, **few), random(24, **few, seed=3), *[greedy(24)] * 2])


def main(devices: int, folder: str, *others: str) -> None:
    llm = make(folder, tensor_parallel_size=devices)
    result = {**generate(llm), "compiled": compiled_since_start(llm)}
    if devices > 1:
        import torch_xla

        runner, spec = runner_of(llm), torch_xla._XLAC._get_xla_sharding_spec
        result["caches"] = [spec(tensor) for tensor in runner.caches.tensors]
        result["weights"] = {name: spec(parameter) for name, parameter in runner.model.named_parameters()}
    drafting = make(folder, tensor_parallel_size=devices, speculative_config=DRAFTS)
    result["drafted"] = draft(drafting), metric(drafting, ACCEPTED) > 0
    result["others"] = [greedy_tokens(other, devices) for other in others]
    print("RESULT " + json.dumps(result))


def greedy_tokens(folder: str, devices: int) -> list[list[int]] | str:
    try:
        llm = make(folder, tensor_parallel_size=devices)
    except Exception as error:
        return str(error)
    return tokens(llm, PROMPTS, greedy(NEW_TOKENS))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
