#!/usr/bin/env python3
"""Decode and prefill of vLLM on XLA:GPU, at the shape of Llama-3-8B or another model with random weights.

    PJRT_DEVICE=GPU python benchmarks/vllm_steps.py 1x1024 32x1024 64x2048
    PJRT_DEVICE=GPU python benchmarks/vllm_steps.py 1x1024 --tensor-parallel 2
    PJRT_DEVICE=GPU python benchmarks/vllm_steps.py 1x64 32x64 --model gpt-oss-20b --layers 4
    PJRT_DEVICE=CPU python benchmarks/vllm_steps.py --tiny 1x16 4x16          # a check of the script

For each load BxC, B prompts of C random tokens: prefill is their time to the first token, decode_ms the time of the
tokens after it, divided by their number, decode_step_ms the median time of a step in which every sequence decodes.
decode_ms is more where prompts end beside sequences that decode already. Greedy; the best of two runs. Each line of
output starts with "R " and is JSON.

With --embed the model gives embeddings of the prompts:

    PJRT_DEVICE=GPU python benchmarks/vllm_steps.py 256x128 64x512 16x2048 --embed --model qwen3-0.6b

With --speculative-config tokens_per_step is what a step gives each sequence, and decode_step_ms means nothing:

    PJRT_DEVICE=GPU python benchmarks/vllm_steps.py 1x1024 --speculative-config \\
        '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 2}'
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import time

from argument_types import load_size, positive
from vllm_engine import add_options, emit, started


class HostTimes:
    """Wraps two methods of the runner with clocks: what a step costs the host, and how long a decode step takes."""

    NAMES = ("execute_model", "sample_tokens")

    def __init__(self, runner, profile: cProfile.Profile | None) -> None:
        self._profile = profile
        self.clear()
        for name in self.NAMES:
            setattr(runner, name, self._timed(name, getattr(runner, name)))

    def clear(self) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in self.NAMES}
        self.intervals: list[float] = []
        self.steps = 0
        self._last: tuple[float, int] | None = None

    def _timed(self, name, method):
        def timed(argument):
            start = time.perf_counter()
            if name == "execute_model":
                self._note(start, argument)
            if self._profile is not None:
                self._profile.enable()
            result = method(argument)
            if self._profile is not None:
                self._profile.disable()
            self.seconds[name].append(time.perf_counter() - start)
            return result

        return timed

    def _note(self, now: float, scheduled) -> None:
        """Steps follow each other as the device ends them: the time between two decode steps is that of one."""
        self.steps += scheduled.total_num_scheduled_tokens > 0
        decodes = len(scheduled.num_scheduled_tokens)
        if decodes != scheduled.total_num_scheduled_tokens:
            self._last = None
            return
        if self._last is not None and self._last[1] == decodes:
            self.intervals.append(now - self._last[0])
        self._last = now, decodes

    def take(self) -> dict[str, float | dict[str, float]]:
        """Medians since the last call, in milliseconds."""
        host = {f"{name}_ms": milliseconds(seconds) for name, seconds in self.seconds.items()}
        found = {"decode_step_ms": milliseconds(self.intervals), "host": host}
        self.clear()
        return found


def milliseconds(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3) if seconds else 0.0


def prompts_of(llm, load: tuple[int, int]) -> list:
    import numpy as np

    from vllm import TokensPrompt

    count, length = load
    vocab_size = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    rng = np.random.default_rng(0)
    return [TokensPrompt(prompt_token_ids=rng.integers(10, vocab_size, length).tolist()) for _ in range(count)]


def measure_embeddings(llm, times: HostTimes, load: tuple[int, int]) -> dict:
    count, length = load
    prompts, seconds = prompts_of(llm, load), []
    for _ in range(3):
        times.take()
        start = time.perf_counter()
        llm.embed(prompts, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    best, steps = min(seconds[1:]), times.steps
    return {
        "load": f"{count}x{length}",
        "s": round(best, 4),
        "tokens_per_s": round(count * length / best),
        "steps": steps,
    }


def measure(llm, times: HostTimes, load: tuple[int, int], new_tokens: int, sampling: dict) -> dict:
    from vllm import SamplingParams

    count, length = load
    prompts = prompts_of(llm, load)

    def run(tokens: int) -> float:
        start = time.perf_counter()
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, **sampling)
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    run(2)
    prefill = min(run(1) for _ in range(2))
    times.take()
    whole = min(run(1 + new_tokens) for _ in range(2))
    config = llm.llm_engine.vllm_config
    result = {
        "load": f"{count}x{length}",
        "prefill_s": round(prefill, 4),
        "prefill_tokens_per_s": round(count * length / prefill),
        "decode_ms": round((whole - prefill) / new_tokens * 1e3, 3),
    }
    if config.speculative_config is not None:
        prompt_steps = -(-count * length // config.scheduler_config.max_num_batched_tokens)
        result["tokens_per_step"] = round(new_tokens / (times.steps / 2 - prompt_steps), 2)
    return {**result, **times.take()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loads", type=load_size, nargs="+", metavar="BxC", help="sequences x tokens of each prompt")
    add_options(parser, max_seqs=64)
    parser.add_argument("--new-tokens", type=positive, default=64, help="of each sequence (default %(default)s)")
    parser.add_argument("--tensor-parallel", type=positive, default=1, metavar="N", help="GPUs that share the model")
    parser.add_argument(
        "--sampling",
        type=json.loads,
        nargs="+",
        default=[{"temperature": 0}],
        metavar="JSON",
        help="sampling parameters, each measured with all loads (default: greedy)",
    )
    parser.add_argument("--embed", action="store_true", help="embeddings in the place of tokens")
    parser.add_argument("--speculative-config", type=json.loads, metavar="JSON", help="as vLLM takes it")
    parser.add_argument("--profile", action="store_true", help="show what takes the host's time, on stderr")
    arguments = parser.parse_args()

    options = {"tensor_parallel_size": arguments.tensor_parallel}
    if arguments.speculative_config is not None:
        options["speculative_config"] = arguments.speculative_config
    if arguments.embed:
        options["runner"] = "pooling"
    with started(arguments, **options) as (llm, start):
        from xla_gpu.torch import executable_cache_info
        from xla_gpu.vllm.program import compilations

        compiled = compilations()
        emit(**start, programs=compiled, cache=executable_cache_info()._asdict())
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        profile = cProfile.Profile() if arguments.profile else None
        times = HostTimes(runner, profile)
        for load in arguments.loads if arguments.embed else ():
            emit(**measure_embeddings(llm, times, load), compiled_since=compilations() - compiled)
        for sampling in () if arguments.embed else arguments.sampling:
            for load in arguments.loads:
                result = measure(llm, times, load, arguments.new_tokens, sampling)
                emit(**result, sampling=sampling, compiled_since=compilations() - compiled)
        if profile is not None:
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
