#!/usr/bin/env python3
"""Decode and prefill of vLLM on XLA:GPU, at the shape of Llama-3-8B with random weights.

    PJRT_DEVICE=GPU python benchmarks/vllm_steps.py 1x1024 32x1024 64x2048
    PJRT_DEVICE=CPU python benchmarks/vllm_steps.py --tiny 1x16 4x16          # a check of the script

For each load BxC, B prompts of C random tokens: prefill is their time to the first token, decode the time of the tokens
after it, divided by their number. Greedy; the best of two runs. Each line of output starts with "R " and is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY = {
    **LLAMA_3_8B,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}


def emit(**values) -> None:
    print("R " + json.dumps(values), flush=True)


class HostTimes:
    """Wraps two methods of the runner with clocks: what a step costs the host."""

    NAMES = ("execute_model", "sample_tokens")

    def __init__(self, runner) -> None:
        self.seconds = dict.fromkeys(self.NAMES, 0.0)
        self.steps = 0
        for name in self.NAMES:
            setattr(runner, name, self._timed(name, getattr(runner, name)))

    def _timed(self, name, method):
        def timed(*args):
            start = time.perf_counter()
            result = method(*args)
            self.seconds[name] += time.perf_counter() - start
            self.steps += name == "execute_model"
            return result

        return timed

    def take(self) -> dict[str, float]:
        """Milliseconds of a step since the last call."""
        steps = max(self.steps, 1)
        times = {f"{name}_ms": round(seconds / steps * 1e3, 3) for name, seconds in self.seconds.items()}
        self.seconds, self.steps = dict.fromkeys(self.NAMES, 0.0), 0
        return times


def measure(llm, times: HostTimes, load: str, new_tokens: int, sampling: dict) -> dict:
    import numpy as np

    from vllm import SamplingParams, TokensPrompt

    count, length = (int(part) for part in load.split("x"))
    vocab_size = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    rng = np.random.default_rng(0)
    prompts = [TokensPrompt(prompt_token_ids=rng.integers(10, vocab_size, length).tolist()) for _ in range(count)]

    def run(tokens: int) -> float:
        start = time.perf_counter()
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, **sampling)
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    run(2)
    prefill = min(run(1) for _ in range(2))
    times.take()
    whole = min(run(1 + new_tokens) for _ in range(2))
    return {
        "load": load,
        "prefill_s": round(prefill, 4),
        "prefill_tokens_per_s": round(count * length / prefill),
        "decode_ms": round((whole - prefill) / new_tokens * 1e3, 3),
        "host": times.take(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loads", nargs="+", metavar="BxC", help="sequences x tokens of each prompt")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to check the script")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=8192, help="of a step (default %(default)s)")
    parser.add_argument("--max-seqs", type=int, default=64)
    parser.add_argument("--buckets", type=int, nargs="*", help="token buckets (default: powers of two)")
    parser.add_argument(
        "--sampling",
        type=json.loads,
        nargs="+",
        default=[{"temperature": 0}],
        metavar="JSON",
        help="sampling parameters, each measured with all loads (default: greedy)",
    )
    arguments = parser.parse_args()

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that the runner can be timed
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM, __version__
    from xla_gpu.vllm.program import compilations

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(TINY if arguments.tiny else LLAMA_3_8B))
        start = time.perf_counter()
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=4096,
            max_num_seqs=arguments.max_seqs,
            max_num_batched_tokens=arguments.max_tokens,
            enable_prefix_caching=False,
            additional_config={"token_buckets": arguments.buckets} if arguments.buckets else {},
        )
        compiled = compilations()
        emit(vllm=__version__, start_s=round(time.perf_counter() - start, 1), programs=compiled)
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        times = HostTimes(runner)
        for sampling in arguments.sampling:
            for load in arguments.loads:
                result = measure(llm, times, load, arguments.new_tokens, sampling)
                emit(**result, sampling=sampling, compiled_since=compilations() - compiled)


if __name__ == "__main__":
    main()
