"""The serving examples' step alone: a decode step of a Llama, chained on the device without a scheduler.
What examples/serve_llama_jax.py and examples/serve_llama.py need beyond this is their own cost.

    python -m benchmarks.serving_step --shape llama3-8b 1x1024 32x1024 64x2048
    python -m benchmarks.serving_step --framework torch_xla --tensor-parallel 2
    python -m benchmarks.serving_step --framework torch_xla --tensor-parallel 4 --prefill --steps 3 8x1024
    python -m benchmarks.serving_step --weights float8 --operators attention_block,gated_mlp,linear,sample --profile
    python -m benchmarks.serving_step --operators none rotary_and_cache rms_norm,rotary_and_cache,silu_and_mul,sample

Prints one JSON object per case: milliseconds of a step behind others (the fastest of `--repeats` chains of `--steps`,
from one step's tokens to the last's), those that the host needs to launch one in a chain (`launch`) and where each is
waited for (`launch_waited`, the median), its tokens per second, and the bytes of weights and KV cache that a step must
read, on all devices together.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from benchmarks import memory
from benchmarks.argument_types import load_size, positive

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from paged_llama.batch import StepLayout
from paged_llama.config import SHAPES, LlamaConfig
from paged_llama.options import StepOptions, usual

PAGE_SIZE = 16


def make_load(batch: int, context: int, prefill: bool) -> tuple[SimpleNamespace, np.ndarray]:
    """What an engine asks of its scheduler, and a step in which each sequence decodes behind `context` tokens; with
    `prefill` all `context` tokens of each at once."""
    new = context if prefill else 1
    pages = -(-(context + 1) // PAGE_SIZE)
    layout = StepLayout(batch * new, batch, pages)
    packed = layout.empty()
    parts = layout.unpack(packed)
    rng = np.random.default_rng(0)
    tables = rng.permutation(batch * pages).reshape(batch, pages)
    parts["block_tables"][:] = tables
    # Not one token in all rows: products of equal rows draw less power, so that a GPU at its limit is faster.
    parts["tokens"][:] = rng.integers(0, 256, layout.num_tokens)
    sequences, positions = np.arange(batch * new) // new, np.arange(batch * new) % new
    if not prefill:
        parts["sources"][:] = sequences
        positions += context
    parts["positions"][:] = positions
    parts["slots"][:] = tables[sequences, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    parts["context_lens"][:] = context + (not prefill)
    parts["query_start_loc"][:] = np.arange(batch + 1) * new
    parts["last_rows"][:] = np.arange(1, batch + 1) * new - 1
    parts["num_seqs"][0] = batch
    allocator = SimpleNamespace(num_pages=batch * pages)
    return SimpleNamespace(allocator=allocator, page_size=PAGE_SIZE, mixed=layout, layouts=(layout,)), packed


# Makes an engine for a scheduler and options, and a function that waits for what it launched.
Engines = Callable[[Any, StepOptions], tuple[Any, Callable[[Any], object]]]


def in_jax(config: LlamaConfig, dtype: str, max_tokens: int, devices: int, weights: str, head: str) -> Engines:
    from paged_llama import jax_weights
    from paged_llama.jax_engine import Engine

    parameters = jax_weights.randomise(config, dtype, max_tokens, 0, jax_weights.make_mesh(devices))
    turned = dict(parameters)

    def engine(load: Any, options: StepOptions) -> tuple[Any, Callable[[Any], object]]:
        options = dataclasses.replace(
            options, features_first=options.features_first or weights != "plain" or head != "plain"
        )
        if options.features_first and turned["layers.0.qkv.weight"] is parameters["layers.0.qkv.weight"]:
            jax_weights.features_first(turned)
            if weights != "plain":
                jax_weights.quantize(turned, weights)
            if head != "plain":
                jax_weights.quantize(turned, head, "head.")
        chosen = turned if options.features_first else parameters
        return Engine(config, chosen, load, options), lambda chosen: chosen.block_until_ready()

    return engine


def in_torch_xla(config: LlamaConfig, dtype: str, max_tokens: int, devices: int, weights: str, head: str) -> Engines:
    import serve_llama

    example = serve_llama.TorchXla()
    device = os.environ.get("PJRT_DEVICE", "GPU").lower()
    example.start(argparse.Namespace(device=device, dtype=dtype, tensor_parallel=devices))
    from paged_llama.engine import Engine

    def engine(load: Any, options: StepOptions) -> tuple[Any, Callable[[Any], object]]:
        given = argparse.Namespace(
            dtype=dtype, model=None, seed=0, tensor_parallel=devices, options=options, temperature=options.temperature,
            weights=None if weights == "plain" else weights, head_weights=None if head == "plain" else head,
        )  # fmt: skip
        model = example.model(given, config, None, max_tokens)
        return Engine(model, load, example.device), lambda chosen: chosen.cpu()

    return engine


def measure(engine: Any, wait: Callable[[Any], object], packed: np.ndarray, steps: int, repeats: int) -> dict[str, Any]:
    layout = engine.scheduler.mixed
    began = time.perf_counter()
    wait(engine.launch(layout, packed))
    compiled = time.perf_counter() - began
    best = launch = float("inf")
    for _ in range(repeats + 1):  # the first warms up
        first = engine.launch(layout, packed)
        chosen = engine.launch(layout, packed)
        wait(first)
        # The device has a step to do: what the host needs before the first kernel of a chain belongs to no step.
        began = time.perf_counter()
        for _ in range(steps - 1):
            chosen = engine.launch(layout, packed)
        launched = time.perf_counter() - began
        wait(chosen)
        best, launch = min(best, (time.perf_counter() - began) / steps), min(launch, launched / (steps - 1))
    alone = []  # launches that wait for none before
    for _ in range(steps):
        began = time.perf_counter()
        chosen = engine.launch(layout, packed)
        alone.append(time.perf_counter() - began)
        wait(chosen)
    return {
        "milliseconds": round(best * 1e3, 4),
        "launch": round(launch * 1e3, 4),
        "launch_waited": round(sorted(alone)[len(alone) // 2] * 1e3, 4),
        "first_step_seconds": round(compiled, 1),
        "tokens_per_second": round(layout.num_tokens / best),
    }


def profile(engine: Any, wait: Callable[[Any], object], packed: np.ndarray, steps: int) -> None:
    """Prints what each kernel adds to a step."""
    from benchmarks import kernel_times

    def chain() -> None:
        for _ in range(steps):
            chosen = engine.launch(engine.scheduler.mixed, packed)
        wait(chosen)

    kernel_times.report(chain, steps)


def weight_bytes(config: LlamaConfig, itemsize: int, weights: str, head: str) -> int:
    """Of the embedding only a row per token is read, unless it is the head too. Scales are left out but for int4."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = config.hidden_size * (heads + config.num_heads * config.head_dim + 3 * config.intermediate_size)
    stored = {"plain": itemsize, "float8": 1, "int8": 1, "int4": 0.5 + itemsize / 128}
    return int(config.num_layers * layer * stored[weights] + config.hidden_size * config.vocab_size * stored[head])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = [(1, 1024), (32, 1024), (64, 2048)]
    parser.add_argument(
        "cases",
        type=load_size,
        nargs="*",
        default=cases,
        metavar="BATCHxCONTEXT",
        help="sequences, and tokens that each has (default: 1x1024 32x1024 64x2048)",
    )
    parser.add_argument("--framework", choices=("jax", "torch_xla"), default="jax", help="default %(default)s")
    parser.add_argument(
        "--tensor-parallel", type=positive, default=1, help="devices that share the model (default %(default)s)"
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b", help="of the model (default %(default)s)")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the model (default %(default)s)"
    )
    parser.add_argument("--layers", type=positive, help="instead of the shape's own number")
    parser.add_argument(
        "--operators", nargs="+", metavar="NAMES", help="with commas, or none; default: the examples' own"
    )
    formats = ("plain", "float8", "int8", "int4")
    parser.add_argument("--weights", choices=formats, default="plain", help="of the layers")
    parser.add_argument("--head-weights", choices=formats, default="plain", help="of the matrix of the logits")
    parser.add_argument("--prefill", action="store_true", help="all tokens of the context at once, instead of one more")
    parser.add_argument("--steps", type=int, default=20, help="of a chain: at least 2, since the first is the device's")
    parser.add_argument(
        "--repeats", type=positive, default=3, help="chains, of which the fastest counts (default %(default)s)"
    )
    parser.add_argument("--profile", action="store_true", help="what each kernel adds to a step; in JAX")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"--steps: expected at least 2, got {arguments.steps}")
    config, itemsize = SHAPES[arguments.shape], 2 if arguments.dtype == "bfloat16" else 4
    if arguments.layers:
        config = dataclasses.replace(config, num_layers=arguments.layers)
    rows = max(batch for batch, _ in arguments.cases)
    default = ",".join(usual(arguments.dtype, arguments.tensor_parallel, rows, arguments.weights != "plain"))
    try:
        options = [
            (names, StepOptions(frozenset() if names == "none" else frozenset(names.split(","))))
            for names in arguments.operators or [default]
        ]
    except ValueError as error:
        parser.error(str(error))
    make = in_jax if arguments.framework == "jax" else in_torch_xla
    chosen = (arguments.weights, arguments.head_weights)
    engines = make(
        config, arguments.dtype, max(context for _, context in arguments.cases) + 1, arguments.tensor_parallel, *chosen
    )
    per_token = config.num_layers * 2 * config.num_kv_heads * config.head_dim * itemsize
    for (batch, context), (names, chosen_operators) in itertools.product(arguments.cases, options):
        with memory.left_out_if_too_large(f"{batch}x{context} {names}"):
            load, packed = make_load(batch, context, arguments.prefill)
            engine, wait = engines(load, chosen_operators)
            row = {"framework": arguments.framework, "shape": arguments.shape, "devices": arguments.tensor_parallel}
            row |= {"weights": arguments.weights, "head": arguments.head_weights, "operators": names}
            row["case"] = f"{batch}x{context}"
            row |= measure(engine, wait, packed, arguments.steps, arguments.repeats)
            row |= {
                "weight_bytes": weight_bytes(config, itemsize, *chosen),
                "kv_bytes": batch * (context + 1) * per_token,
            }
            print(json.dumps(row), flush=True)
            if arguments.profile:
                profile(engine, wait, packed, arguments.steps)
            del engine  # and its caches


if __name__ == "__main__":
    main()
