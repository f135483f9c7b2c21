#!/usr/bin/env python3
"""A serving run of vLLM at the shape of Llama-3-8B with random weights: all requests at once, of random lengths.

    PJRT_DEVICE=GPU python benchmarks/vllm_serving.py              # this library's back end
    python benchmarks/vllm_serving.py                              # vLLM's own, in an environment with its CUDA build
    PJRT_DEVICE=CPU python benchmarks/vllm_serving.py --tiny --requests 20 --prompt 4 40 --output 4 20

Output tokens per second from the first request to the last token, and the times between the tokens of a request as the
engine hands them out. The second of two runs with the same requests is measured. One line of output starts with "R "
and is JSON.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from argument_types import positive
from vllm_engine import add_options, emit, model_of, started


def run(engine, requests: list[tuple[list[int], int]], prefix: str) -> dict[str, float]:
    """Sends (prompt, output length) pairs and waits for all."""
    from vllm import SamplingParams

    start = time.perf_counter()
    for number, (prompt, new) in enumerate(requests):
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        engine.add_request(f"{prefix}-{number}", {"prompt_token_ids": prompt}, params)
    counts: dict[str, int] = {}
    last: dict[str, float] = {}
    between: list[float] = []
    first: list[float] = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            name, count = output.request_id, len(output.outputs[0].token_ids)
            new = count - counts.get(name, 0)
            if new <= 0:
                continue
            if name in last:
                between += [(now - last[name]) / new] * new
            else:
                first.append(now - start)
            counts[name], last[name] = count, now
    seconds = time.perf_counter() - start
    tokens = sum(counts.values())
    assert tokens == sum(new for _, new in requests), (tokens, len(counts))
    p50, p90, p99 = np.percentile(between, [50, 90, 99]) * 1e3
    return {
        "seconds": round(seconds, 2),
        "prompt_tokens": sum(len(prompt) for prompt, _ in requests),
        "output_tokens": tokens,
        "output_tokens_per_s": round(tokens / seconds),
        "between_tokens_ms": {"p50": round(p50, 2), "p90": round(p90, 2), "p99": round(p99, 2)},
        "first_token_s": {"p50": round(float(np.median(first)), 3), "max": round(max(first), 3)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, max_seqs=256)
    parser.add_argument("--requests", type=positive, default=200, help="sent at once (default %(default)s)")
    parser.add_argument(
        "--prompt",
        type=positive,
        nargs=2,
        default=[100, 2000],
        metavar=("LEAST", "MOST"),
        help="tokens of a prompt, drawn between these (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=positive,
        nargs=2,
        default=[50, 400],
        metavar=("LEAST", "MOST"),
        help="new tokens of a request, drawn between these (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="by which they are drawn (default %(default)s)")
    arguments = parser.parse_args()
    for option in ("prompt", "output"):
        least, most = getattr(arguments, option)
        if least > most:
            parser.error(f"--{option}: expected the least number of tokens, then the most, got {least} and {most}")

    rng = np.random.default_rng(arguments.seed)
    requests = [
        (rng.integers(10, model_of(arguments)["vocab_size"], length).tolist(), int(new))
        for length, new in zip(
            rng.integers(*arguments.prompt, arguments.requests, endpoint=True),
            rng.integers(*arguments.output, arguments.requests, endpoint=True),
            strict=True,
        )
    ]
    with started(arguments, async_scheduling=True) as (llm, start):
        run(llm.llm_engine, requests, "first")
        emit(**start, **run(llm.llm_engine, requests, "second"))


if __name__ == "__main__":
    main()
