"""Attention over pages on the host against PyTorch: gather the pages, then scaled_dot_product_attention.

    python benchmarks/host_attention.py [--threads 2] [--rounds 20] [--json FILE]

Both sides get the same tensors and the same number of threads, take turns in one process, and are checked against
float64. PyTorch is given three ways to serve grouped heads and is counted by the fastest. The floor is the bytes of K
and V over the bandwidth at which this machine sums a large tensor, measured in the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable

import torch
from argument_types import positive


@dataclasses.dataclass(frozen=True)
class Load:
    """Equal sequences of `context` tokens, of which the last `queries` are new."""

    name: str
    sequences: int
    context: int
    queries: int = 1
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: torch.dtype = torch.float32

    @property
    def kv_bytes(self) -> int:
        return 2 * self.sequences * self.context * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def operations(self) -> int:
        """Multiplications and additions of both products, over the keys that causality leaves."""
        seen = sum(self.context - self.queries + 1 + i for i in range(self.queries))
        return 4 * self.sequences * seen * self.num_heads * self.head_dim


LOADS = [
    Load("decode 8x2048, 32/8 heads, float32", 8, 2048),
    Load("decode 8x2048, 32/8 heads, bfloat16", 8, 2048, dtype=torch.bfloat16),
    Load("decode 1x8192, 32/8 heads, float32", 1, 8192),
    Load("decode 4x1024, 32/32 heads, float32", 4, 1024, num_kv_heads=32),
    Load("prefill 1x1024, 32/8 heads, float32", 1, 1024, queries=1024),
    Load("prefill 1x1024, 32/8 heads, bfloat16", 1, 1024, queries=1024, dtype=torch.bfloat16),
]


def make_inputs(load: Load) -> dict:
    """Arguments of paged_attention: random numbers, pages in random order."""
    generator = torch.Generator().manual_seed(0)
    pages_per_seq = -(-load.context // load.page_size)
    num_pages = load.sequences * pages_per_seq
    cache_shape = (num_pages, load.page_size, 2 * load.num_kv_heads, load.head_dim)
    num_tokens = load.sequences * load.queries
    query = torch.randn(num_tokens, load.num_heads, load.head_dim, generator=generator)
    pages = torch.randperm(num_pages, generator=generator, dtype=torch.int32)
    return {
        "query": query.to(load.dtype),
        "kv_cache": torch.randn(cache_shape, generator=generator).to(load.dtype),
        "context_lens": torch.full((load.sequences,), load.context, dtype=torch.int32),
        "block_tables": pages.reshape(load.sequences, pages_per_seq),
        "query_start_loc": torch.arange(0, num_tokens + 1, load.queries, dtype=torch.int32),
        "num_seqs": torch.tensor([load.sequences], dtype=torch.int32),
    }


def torch_ways(load: Load, inputs: dict) -> dict[str, Callable[[], torch.Tensor]]:
    """PyTorch's attention over gathered pages, by how the query heads of one kv head are served."""
    table = inputs["block_tables"].long()
    cache, query = inputs["kv_cache"], inputs["query"]
    group = load.num_heads // load.num_kv_heads
    causal = load.queries > 1
    if causal and load.queries != load.context:
        raise ValueError(f"{load.name}: is_causal aligns top-left, so only whole prompts compare")

    def gather(first_head: int) -> torch.Tensor:
        rows = cache[:, :, first_head::2][table]
        return rows.reshape(load.sequences, -1, load.num_kv_heads, load.head_dim)[:, : load.context].transpose(1, 2)

    def attend(heads_first: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            heads_first, k, v, scale=load.head_dim**-0.5, is_causal=causal, **options
        )

    batched = query.reshape(load.sequences, load.queries, load.num_heads, load.head_dim).transpose(1, 2)

    def enable_gqa() -> torch.Tensor:
        return attend(batched, gather(0), gather(1), enable_gqa=True).transpose(1, 2).reshape(query.shape)

    def repeat_interleave() -> torch.Tensor:
        k, v = (gather(first).repeat_interleave(group, dim=1) for first in (0, 1))
        return attend(batched, k, v).transpose(1, 2).reshape(query.shape)

    def heads_as_queries() -> torch.Tensor:
        folded = query.reshape(load.sequences, load.num_kv_heads, group, load.head_dim)
        return attend(folded, gather(0), gather(1)).reshape(query.shape)

    ways = {"enable_gqa": enable_gqa, "repeat_interleave": repeat_interleave}
    return ways if causal else {**ways, "heads as queries": heads_as_queries}


def read_bandwidth(num_bytes: int = 1 << 28) -> float:
    """Bytes per second at which all threads sum a tensor that no cache holds."""
    numbers = torch.ones(num_bytes // 4)
    return num_bytes / min(milliseconds({"sum": numbers.sum}, rounds=8)["sum"]) * 1e3


def milliseconds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Times of each call, taken in turns so that a change of the machine's load meets all of them."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - begin) * 1e3)
    return times


def check(load: Load, inputs: dict, results: dict[str, torch.Tensor]) -> dict[str, float]:
    """Largest error of each result against float64; ours may be twice PyTorch's largest, plus 1e-5."""
    doubled = {name: inputs[name].double() for name in ("query", "kv_cache")}
    exact = torch_ways(load, {**inputs, **doubled})["enable_gqa"]()
    errors = {name: (result.double() - exact).abs().max().item() for name, result in results.items()}
    allowed = 2 * max(error for name, error in errors.items() if name != "xla_gpu") + 1e-5
    if not errors["xla_gpu"] <= allowed:
        raise AssertionError(f"{load.name}: the error is {errors['xla_gpu']:.3g}, allowed {allowed:.3g}")
    return errors


def measure(load: Load, rounds: int, bandwidth: float) -> dict:
    from xla_gpu.torch import paged_attention

    inputs = make_inputs(load)
    calls = {"xla_gpu": lambda: paged_attention(**inputs, scale=load.head_dim**-0.5), **torch_ways(load, inputs)}
    errors = check(load, inputs, {name: call() for name, call in calls.items()})
    medians = {name: statistics.median(times) for name, times in milliseconds(calls, rounds).items()}
    ours = medians.pop("xla_gpu")
    fastest = min(medians, key=medians.__getitem__)
    return {
        "load": load.name,
        "kv_bytes": load.kv_bytes,
        "operations": load.operations,
        "floor_ms": load.kv_bytes / bandwidth * 1e3,
        "xla_gpu_ms": ours,
        "torch_ms": medians,
        "fastest_torch": fastest,
        "ratio": medians[fastest] / ours,
        "largest_errors": errors,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=positive, default=2, help="threads of either side (default 2)")
    parser.add_argument(
        "--rounds", type=positive, default=20, help="measurements per load; medians are reported (default 20)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    os.environ["XLA_GPU_NUM_THREADS"] = str(arguments.threads)  # read at the library's first call
    bandwidth = read_bandwidth()
    print(f"{arguments.threads} threads, reading {bandwidth / 1e9:.1f} GB/s, PyTorch {torch.__version__}\n")
    print(
        f"{'load':<38} {'floor':>8} {'xla_gpu':>9} {'GB/s':>6} {'GFLOP/s':>8} {'PyTorch':>9} {'ratio':>6}  fastest way"
    )
    rows = []
    for load in LOADS:
        row = measure(load, arguments.rounds, bandwidth)
        rows.append(row)
        ours = row["xla_gpu_ms"]
        print(
            f"{row['load']:<38} {row['floor_ms']:>5.2f} ms {ours:>6.2f} ms {row['kv_bytes'] / ours / 1e6:>6.1f} "
            f"{row['operations'] / ours / 1e6:>8.0f} {row['torch_ms'][row['fastest_torch']]:>6.1f} ms "
            f"{row['ratio']:>6.1f}  {row['fastest_torch']}",
            flush=True,
        )
    if arguments.json:
        report = {"threads": arguments.threads, "read_bytes_per_second": bandwidth, "torch": torch.__version__}
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({**report, "loads": rows}, file, indent=2)


if __name__ == "__main__":
    main()
