"""The serving example's JAX step alone: a decode step of a Llama, chained on the device without scheduler or host work.
What examples/serve_llama_jax.py needs beyond this is its own cost.

    python -m benchmarks.jax_step --shape llama3-8b 1x1024 32x1024 64x2048

Prints one JSON object per case: milliseconds of a step (the fastest of `--repeats` chains of `--steps`), and the bytes
of weights and KV cache that a step must read.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


def measure(config, parameters, batch: int, context: int, steps: int, repeats: int) -> dict:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from paged_llama.batch import StepLayout
    from paged_llama.jax_model import forward

    page_size = 16
    pages = -(-(context + 1) // page_size)
    layout = StepLayout(batch, batch, pages)
    packed = layout.empty()
    parts = layout.unpack(packed)
    tables = np.random.default_rng(0).permutation(batch * pages).reshape(batch, pages)
    parts["block_tables"][:] = tables
    parts["sources"][:] = parts["last_rows"][:] = np.arange(batch)
    parts["positions"][:] = context
    parts["slots"][:] = tables[:, context // page_size] * page_size + context % page_size
    parts["context_lens"][:] = context + 1
    parts["query_start_loc"][:] = np.arange(batch + 1)
    parts["num_seqs"][0] = batch

    step = jax.jit(functools.partial(forward, config, layout), donate_argnames="caches")
    dtype = parameters["embed.weight"].dtype
    shape = (batch * pages, page_size, 2 * config.num_kv_heads, config.head_dim)
    caches = [jnp.zeros(shape, dtype) for _ in range(config.num_layers)]
    packed, chosen = jax.device_put(packed), jnp.zeros(batch, jnp.int32)
    began = time.perf_counter()
    chosen, caches = step(parameters, caches, packed, chosen)
    chosen.block_until_ready()
    compiled = time.perf_counter() - began
    best = float("inf")
    for _ in range(repeats + 1):  # the first warms up
        began = time.perf_counter()
        for _ in range(steps):
            chosen, caches = step(parameters, caches, packed, chosen)
        chosen.block_until_ready()
        best = min(best, (time.perf_counter() - began) / steps)
    per_token = config.num_layers * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
    embedding = 0 if config.tie_word_embeddings else parameters["embed.weight"].nbytes  # only a row per token is read
    weights = sum(x.nbytes for name, x in parameters.items() if name != "rotations") - embedding
    return {
        "case": f"{batch}x{context}",
        "milliseconds": round(best * 1e3, 4),
        "weight_bytes": int(weights),
        "kv_bytes": batch * (context + 1) * per_token,
        "first_step_seconds": round(compiled, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["1x1024", "32x1024", "64x2048"], metavar="BATCHxCONTEXT")
    parser.add_argument("--shape", default="llama3-8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()

    import dataclasses

    import jax

    from paged_llama.config import SHAPES
    from paged_llama.jax_model import randomise

    config = SHAPES[arguments.shape]
    if arguments.layers:
        config = dataclasses.replace(config, num_layers=arguments.layers)
    sizes = [tuple(map(int, case.split("x"))) for case in arguments.cases]
    parameters = randomise(config, arguments.dtype, max(context for _, context in sizes) + 1, seed=0)
    for batch, context in sizes:
        figures = measure(config, parameters, batch, context, arguments.steps, arguments.repeats)
        print(json.dumps({"shape": arguments.shape, "device": jax.devices()[0].device_kind, **figures}), flush=True)


if __name__ == "__main__":
    main()
