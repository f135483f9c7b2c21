"""Calls that differ in one attribute, shape or dtype each, with a persistent compilation cache.

test_caches.py runs it twice over one folder. It prints what the cache did, and ends with 1 where a result is that of
another call:

    python -m tests.robustness.cached_program FRONTEND FOLDER
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np

from tests.common import baseline, cases, compare, frontends, reference
from tests.fuzz.programs import program

CASE = cases.AttentionCase("cached", ((2, 40), (12, 33)), num_heads=4, num_kv_heads=2, page_size=8)
SINKS = CASE.but(sinks=True)
FP8 = CASE.but(cache_dtype="float8_e4m3fn", scales="one")
CASES = [
    CASE,
    CASE.but(scale=0.5),
    CASE.but(scale=-0.125),
    CASE.but(sliding_window=1),
    CASE.but(sliding_window=9),
    CASE.but(soft_cap=1.0),
    CASE.but(soft_cap=9.0),
    SINKS,
    SINKS.but(soft_cap=1.0),
    FP8,
    FP8.but(cache_dtype="float8_e5m2"),
    FP8.but(scales="per_head"),
    CASE.but(dtype="float16"),
    CASE.but(dtype="bfloat16"),
    CASE.but(layout="split"),
    CASE.but(spare_columns=5),
    CASE.but(padding_tokens=4),
    CASE.but(sequences=((2, 40), (12, 33), (1, 5))),
]


def check(frontend: frontends.Frontend) -> None:
    for case in CASES:
        inputs = cases.build(case)
        want = reference.paged_attention(**inputs.arrays(), **case.options())
        base = baseline.paged_attention(inputs, **case.options())
        got = program(frontend, "paged_attention_with_lse", case.options())(inputs.arrays())
        for g, w, y in zip(got, want, base, strict=True):
            compare.assert_close(g, w, y, f"{frontend.name} {case.name}")
        (out,) = program(frontend, "paged_attention", case.options())(inputs.arrays())
        compare.assert_bitwise_equal(out, got[0], f"{frontend.name} {case.name}")


def main(name: str, folder: str) -> None:
    frontend = frontends.ALL[name]
    counts = {}
    if frontend.framework == "jax":
        import jax

        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

        def listen(event, **kwargs):
            if "compilation_cache" in event:
                key = event.rsplit("/", 1)[-1]
                counts[key] = counts.get(key, 0) + 1

        jax.monitoring.register_event_listener(listen)
        check(frontend)
    else:
        from xla_gpu.torch import executable_cache_info

        os.environ["XLA_GPU_EXECUTABLE_CACHE"] = folder
        check(frontend)
        counts = executable_cache_info()._asdict()
    print(json.dumps(counts))


if __name__ == "__main__":
    np.seterr(all="ignore")
    main(*sys.argv[1:])
