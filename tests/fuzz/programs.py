"""An operator of a front end as a function of arrays that is compiled once. Frontend.call traces anew each time, which
is right for tests of single inputs and too slow for thousands."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np

from tests.common.frontends import Frontend, enable_x64


def program(frontend: Frontend, operator: str, options: dict | None = None) -> Callable[[dict], tuple[np.ndarray, ...]]:
    options = options or {}
    if frontend.framework == "jax":
        return _jitted(frontend, operator, options)
    if frontend.name.endswith("-compiled"):
        return _compiled(frontend, operator, options)
    return lambda arrays: frontend.call(operator, arrays, **options)


def arrays_are_wide(arrays: dict[str, np.ndarray]) -> bool:
    return any(x.dtype in (np.int64, np.float64) for x in arrays.values())


def _jitted(frontend: Frontend, operator: str, options: dict):
    import jax

    import xla_gpu.jax

    step = jax.jit(lambda arrays: getattr(xla_gpu.jax, operator)(**arrays, **options))

    def call(arrays):
        with enable_x64() if arrays_are_wide(arrays) else contextlib.nullcontext():
            results = step(jax.device_put(arrays, frontend.device()))
            return tuple(np.asarray(r) for r in (results if isinstance(results, (tuple, list)) else (results,)))

    return call


def _compiled(frontend: Frontend, operator: str, options: dict):
    import torch

    from tests.common.arrays import to_numpy

    torch._dynamo.reset()
    ops = frontend.module()
    step = torch.compile(
        lambda tensors: getattr(ops, operator)(**tensors, **options), backend="openxla", fullgraph=True
    )

    def call(arrays):
        results = step(frontend.tensors(arrays))
        return tuple(to_numpy(r) for r in (results if isinstance(results, (tuple, list)) else (results,)))

    return call


def forget() -> None:
    """Releases compiled programs, which are not used again."""
    import sys

    if "jax" in sys.modules:
        import jax

        jax.clear_caches()
