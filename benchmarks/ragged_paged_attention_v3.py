"""ragged_paged_attention_v3 beside the CUDA kernel of that call in ejkernel, where that is installed and builds.

    python -m benchmarks.ragged_paged_attention_v3

Each call runs inside a jitted loop that carries the cache, so that every implementation may update it in place. Prints
one JSON object per case: microseconds of a call, and of ejkernel's or the reason why there is none.
"""

from __future__ import annotations

import argparse
import functools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks.argument_types import positive

CASES = {
    "decode 1x1024": ([(1, 1024)], 16),
    "decode 32x1024": ([(1, 1024)] * 32, 16),
    "decode 64x2048": ([(1, 2048)] * 64, 16),
    "prefill 2048": ([(2048, 2048)], 16),
    "chunk 512 behind 3584 and 31 decodes at 1024": ([(512, 4096)] + [(1, 1024)] * 31, 16),
}


def inputs(sequences, page_size, num_heads, num_kv_heads, head_dim, dtype):
    rng = np.random.default_rng(0)
    pages = -(-max(context for _, context in sequences) // page_size)
    num_tokens = sum(q for q, _ in sequences)
    total = len(sequences) * pages

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    queries, keys, values = (normal(num_tokens, heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads))
    cache = jax.random.normal(jax.random.key(0), (total, page_size, num_kv_heads, 2, head_dim), dtype)
    metadata = (
        np.array([context for _, context in sequences]),
        rng.permutation(total),
        np.cumsum([0] + [q for q, _ in sequences]),
        np.array([0, 0, len(sequences)]),
    )
    return (queries, keys, values), cache, tuple(jnp.asarray(x, jnp.int32) for x in metadata)


def microseconds(call, new, cache, metadata, repeats: int, loops: int) -> float:
    """Of one call, in a loop on the device; the fastest of some loops."""

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(cache, new, metadata):
        def body(_, carry):
            out, cache = carry
            return call(out, *new[1:], cache, *metadata)  # the next queries are these results: nothing is hoisted

        return jax.lax.fori_loop(0, repeats, body, (new[0], cache))

    _, cache = loop(cache, new, metadata)
    jax.block_until_ready(cache)
    best = float("inf")
    for _ in range(loops):
        began = time.perf_counter()
        out, cache = loop(cache, new, metadata)
        jax.block_until_ready((out, cache))
        best = min(best, (time.perf_counter() - began) / repeats)
    return best * 1e6


def implementations(head_dim: int) -> dict:
    import xla_gpu.jax

    scale = head_dim**-0.5
    found = {"xla_gpu": functools.partial(xla_gpu.jax.ragged_paged_attention_v3, sm_scale=scale)}
    try:
        from ejkernel.kernels._cuda.ragged_page_attention_v3 import ragged_page_attention_v3

        found["ejkernel"] = functools.partial(ragged_page_attention_v3, softmax_scale=scale)
    except Exception as error:
        found["ejkernel"] = error
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=positive, default=50, help="calls in a loop")
    parser.add_argument(
        "--loops",
        type=positive,
        default=5,
        help="times the loop runs, of which the fastest counts (default %(default)s)",
    )
    parser.add_argument(
        "--heads",
        type=positive,
        nargs=3,
        default=(32, 8, 128),
        metavar=("QUERY", "KV", "DIM"),
        help="query heads, KV heads and elements of a head (default: %(default)s)",
    )
    parser.add_argument("--case", choices=CASES, action="append", help="some cases alone")
    arguments = parser.parse_args()
    num_heads, num_kv_heads, head_dim = arguments.heads
    for name in arguments.case or CASES:
        sequences, page_size = CASES[name]
        record = {"case": name, "device": jax.devices()[0].device_kind}
        results = {}
        for implementation, call in implementations(head_dim).items():
            new, cache, metadata = inputs(sequences, page_size, num_heads, num_kv_heads, head_dim, jnp.bfloat16)
            if isinstance(call, Exception):
                record[implementation] = f"not available: {type(call).__name__}: {str(call)[:300]}"
                continue
            try:
                results[implementation] = np.asarray(call(*new, jnp.copy(cache), *metadata)[0], np.float32)
                took = microseconds(call, new, cache, metadata, arguments.repeats, arguments.loops)
                record[implementation] = round(took, 2)
            except Exception as error:
                record[implementation] = f"failed: {type(error).__name__}: {str(error)[-300:]}"
        if len(results) == 2:
            record["largest_difference"] = float(np.abs(results["xla_gpu"] - results["ejkernel"]).max())
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
