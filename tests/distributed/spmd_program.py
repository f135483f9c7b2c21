"""torch_xla's SPMD over CPU devices: a program of its own, since SPMD and the number of devices are a process's.

python -m tests.distributed.spmd_program LAYOUT: a step on a cache that is annotated by heads, beside one device's.
"""

from __future__ import annotations

import os
import sys

os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime

import xla_gpu.torch as xg
from tests.common import cases

CASE = cases.AttentionCase("spmd", ((1, 20), (4, 9)), num_heads=8, num_kv_heads=4, page_size=8, dtype="float32")
METADATA = ("context_lens", "block_tables", "query_start_loc", "num_seqs")


def step(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    xg.reshape_and_cache_(t["key"], t["key"] + 1, t["kv_cache"], t["slots"])
    metadata = [t[name] for name in METADATA]
    out, lse = xg.paged_attention_with_lse(t["query"] * 2, t["kv_cache"], *metadata, scale=0.1)
    return xg.merge_attention_states(out, lse, out, lse)


def main(layout: str) -> None:
    arrays = cases.build(CASE.but(layout=layout), poison=False).arrays()
    arrays["key"] = cases.rng_for("spmd").standard_normal((CASE.num_tokens, 4, 64)).astype(np.float32)
    arrays["slots"] = np.arange(CASE.num_tokens, dtype=np.int32)
    one = {name: torch.from_numpy(x.copy()) for name, x in arrays.items()}
    want = step(one)

    torch_xla.runtime.use_spmd()
    mesh = xs.Mesh(np.arange(4), (2, 2), ("dp", "tp"))
    shards = {name: x.to("xla") for name, x in (("cache", torch.from_numpy(arrays["kv_cache"].copy())),)}
    tensors = {name: torch.from_numpy(x.copy()).to("xla") for name, x in arrays.items()}
    tensors["kv_cache"] = shards["cache"]
    heads = (None, None, "tp", None) if layout == "combined" else (None, None, None, "tp", None)
    xs.mark_sharding(tensors["kv_cache"], mesh, heads)
    torch_xla.sync()
    got = step(tensors)
    torch_xla.sync()
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        print(name, "same bits:", torch.equal(a.cpu(), b))
    print("cache same bits:", torch.equal(tensors["kv_cache"].cpu(), one["kv_cache"]))

    cache = torch.zeros(8, 8, 8, 64).to("xla")
    for spec in (("tp", None, None, None), (None, None, ("dp", "tp"), None)):
        wrong = cache.clone()
        xs.mark_sharding(wrong, mesh, spec)
        key = torch.zeros(3, 4, 64).to("xla")
        try:
            if spec[0] is None:  # eight heads of K and V in four parts: whole kv heads; of two kv heads: half of one
                wrong, key = wrong[:, :, :4].clone(), key[:, :2].clone()
                xs.mark_sharding(wrong, mesh, spec)
            xg.reshape_and_cache(key, key, wrong, tensors["slots"][:3])
            print("refused: nothing")
        except ValueError as error:
            print("refused:", error)


if __name__ == "__main__":
    main(sys.argv[1])
