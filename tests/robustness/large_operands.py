"""Operands and results of more than 2**32 elements, and how results are compared with those of some rows alone."""

from __future__ import annotations

import math
import os

import pytest

torch = pytest.importorskip("torch")
GIB = 2**30
OVER = 2**32 + 2**20
PART = 2**28  # elements that are compared at a time


def room(frontend, gib: float) -> None:
    """Skips where less than that many GiB are free, and some for others; a GPU is part of the test, or a large host.

    Tests that call this take the fixture much_memory.
    """
    if frontend.platform == "cuda":
        import gc

        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        needed = gib + total / GIB / 8  # other processes test on the same GPU
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        needed = max(gib + 2, 60)  # minutes of a small host's time
    if free < needed * GIB:
        pytest.skip(f"needs {needed:.0f} GiB of memory, {free / GIB:.0f} are free")


def random(frontend, *shape: int, dtype=torch.bfloat16, seed: int = 0):
    """Normal numbers. On the host a period of them, since making all of them takes minutes."""
    device, size = frontend.device() if frontend.framework == "torch" else "cuda", math.prod(shape)
    generator = torch.Generator(device).manual_seed(seed)
    if frontend.platform == "cuda":
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)
    period = torch.randn(min(size, 2**20 - 3), generator=generator).to(dtype)
    out = torch.empty(size, dtype=dtype)
    whole = size // period.numel() * period.numel()
    out[:whole].view(-1, period.numel()).copy_(period)
    out[whole:] = period[: size - whole]
    return out.view(shape)


def call(frontend, operator: str, **arguments):
    """The operator's results, as PyTorch's tensors: JAX takes and returns the memory that they are in."""
    if frontend.framework == "torch":
        results = getattr(frontend.module(), operator)(**arguments)
        return results if isinstance(results, tuple) else (results,)
    import jax

    import xla_gpu.jax

    float8 = {n for n, x in arguments.items() if getattr(x, "dtype", None) is torch.float8_e4m3fn}  # dlpack has none
    arguments |= {n: arguments[n].view(torch.uint8) for n in float8}
    arrays = {n: jax.dlpack.from_dlpack(x) for n, x in arguments.items() if isinstance(x, torch.Tensor)}
    options = {n: x for n, x in arguments.items() if n not in arrays}

    def program(arrays):
        typed = {n: jax.lax.bitcast_convert_type(arrays[n], jax.numpy.float8_e4m3fn) for n in float8}
        return getattr(xla_gpu.jax, operator)(**(arrays | typed), **options)

    torch.cuda.synchronize()
    results = jax.jit(program)(arrays)
    results = jax.block_until_ready(results if isinstance(results, tuple) else (results,))
    return tuple(torch.from_dlpack(x) for x in results)


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])


def assert_rows(results, rows: int, width: int, of_rows) -> None:
    """``of_rows(first, last)`` are the results of these rows alone."""
    step = max(1, PART // width)
    for first in range(0, rows, step):
        last = min(rows, first + step)
        for i, want in enumerate(of_rows(first, last)):
            assert torch.equal(bits(results[i][first:last]), bits(want)), f"result {i}, rows {first} to {last}"


def eager():
    import xla_gpu.torch

    return xla_gpu.torch


ALL = pytest.mark.frontends("eager", "eager-cuda", "jax-cuda")
GPU = pytest.mark.frontends("eager-cuda", "jax-cuda")
EAGER_GPU = pytest.mark.frontends("eager-cuda")  # JAX calls the same handlers
