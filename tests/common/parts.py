"""Calls of all_reduce and all_reduce_add_rms_norm on gathered parts: the operators below the functions that gather."""

from __future__ import annotations

import numpy as np

from tests.common import cases

OPERANDS = {"all_reduce": ("x",), "all_reduce_add_rms_norm": ("x", "residual", "weight")}


def call(frontend, operator: str, arrays: dict[str, np.ndarray], **options):
    """One call through any front end."""

    def body(ops, **tensors):
        operands = [tensors[name] for name in OPERANDS[operator]]
        if frontend.framework == "torch":
            import torch

            return getattr(torch.ops.xla_gpu, operator)(*operands, **options)
        from xla_gpu import ops as declared
        from xla_gpu._jax import call as jax_call

        chosen = next(op for op in declared.OPERATORS if op.name == operator)
        return jax_call.call(chosen, **dict(zip(OPERANDS[operator], operands, strict=True)), **options)

    return frontend.run(body, arrays)


def norm_arrays(ranks: int, rows: int, hidden: int, dtype: str, seed: int = 0) -> dict[str, np.ndarray]:
    rng = cases.rng_for(f"all_reduce_add_rms_norm {ranks} {rows} {hidden} {dtype} {seed}")
    shapes = {"x": (ranks, rows, hidden), "residual": (rows, hidden), "weight": (hidden,)}
    return {name: rng.standard_normal(shape).astype(cases.DTYPES[dtype]) for name, shape in shapes.items()}
