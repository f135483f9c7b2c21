"""Generated calls of kernel_call, most of them wrong, in one process and one front end.

    python -m tests.user_kernels.hostile_calls FRONTEND SEED COUNT

Each call ends in its right result, or in an error that names the kernel and what was wrong. A damaged cubin gets past
the checks of Python here, as one in a program made by hand would; if the driver loads it, its number of parameters is
refused, so damaged machine code never runs. Prints each call before it is made, and "ok" at the end.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tests.common import frontends
from tests.user_kernels import sources
from xla_gpu._user_kernels.cuda_kernel import CudaKernel, cuda_kernel, register

X = np.arange(1000, dtype=np.float32)
NEEDS_GPU = "kernel_call: scale: a CUDA kernel runs on an NVIDIA GPU alone"
FOUR_BYTES = "argument {}: expected 4 bytes, as the kernel's parameter"


class Like:
    """A result's shape and dtype."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)


class Call(NamedTuple):
    """A call by what is special about it."""

    what: str
    make: Callable[[Any, Any], Any]  # from the module of operators and the array
    errors: tuple[str, ...] = ()  # the error contains one of them; none: the call is right
    driver: bool = False  # only a GPU's driver can refuse it


def scale(**launch: Any) -> Callable[[Any, Any], Any]:
    """The call as it should be, with other launch options."""
    options = {"grid": 8, "block": 128, **launch}
    return lambda ops, x: ops.kernel_call(KERNEL, x, **options)(x, 2.0, 1000)


def with_arguments(*arguments: Any) -> Callable[[Any, Any], Any]:
    return lambda ops, x: ops.kernel_call(KERNEL, x, grid=8, block=128)(*(x if a is X else a for a in arguments))


def with_results(like: Any, aliases: Any = None) -> Callable[[Any, Any], Any]:
    return lambda ops, x: ops.kernel_call(KERNEL, like, grid=8, block=128, input_output_aliases=aliases)(x, 2.0, 1000)


def by_cubin(make: Callable[[bytes, str], CudaKernel], cubin: bytes) -> Callable[[Any, Any], Any]:
    """A call with one argument of the four, so that a cubin is loaded at most."""
    return lambda ops, x: ops.kernel_call(make(cubin, "scale"), x, grid=8, block=128)(x)


KERNEL = cuda_kernel(sources.SCALE, "scale")


def past_python(cubin: bytes, name: str) -> CudaKernel:
    """The kernel with another cubin, as a program made by hand could have it."""
    return register(CudaKernel(name, name, KERNEL.arch, f"hostile {hash(cubin)}", cubin, None))


def calls(generator: random.Random) -> Iterator[Call]:
    """One call of each kind, over and over, with other values."""
    pick = generator.choice
    while True:
        grid = pick([0, -1, 2**31, 2**63, (8, 0), (1, 65536), (1, 1, 65536), (8, 1, 1, 1), (), 1.5, "8", None, True])
        yield Call(f"grid {grid}", scale(grid=grid), ("scale: grid: expected",))
        many = pick([8, 9, 4096, 65536, (8, 65535), (8, 1, 3)])
        yield Call(f"grid {many}", scale(grid=many))
        block = pick([0, -128, 1025, (512, 4), (1, 1, 65), (1024, 2), 2**40, 128.0, [], "x"])
        yield Call(f"block {block}", scale(block=block), ("scale: block: expected",))
        cluster = pick([0, 17, (16, 16), 3, -8, (8, 2), 2**33])
        yield Call(f"cluster {cluster}", scale(cluster=cluster), ("scale: cluster: expected", "scale: grid: expected"))
        cluster = pick([1, 2, 4, 8])
        yield Call(f"cluster {cluster}", scale(cluster=cluster))
        shared = pick([-1, 300 << 10, 1 << 20, 1 << 40, 2.0, None])
        by_driver = shared in (300 << 10, 1 << 20)
        yield Call(f"shared {shared}", scale(shared=shared), ("scale: shared: expected",), by_driver)
        shared = pick([0, 1, 48 << 10, 100 << 10, 227 << 10])
        yield Call(f"shared {shared}", scale(shared=shared))
        grid = pick([1 << 16, 1 << 20, 2**31 - 1])
        yield Call(
            f"cooperative grid {grid}",
            scale(grid=grid, block=1024, cooperative=True),
            ("scale: the launch: CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE",),
            driver=True,
        )
        flags = {"cooperative": pick([False, True]), "pdl": pick([False, True])}
        yield Call(f"{flags}", scale(**flags))

        count = pick([0, 1, 2, 4, 5, 40, 5000])
        yield Call(
            f"{count} arguments",
            with_arguments(*[X, 2.0, 1000, *[7] * count][:count]),
            ("scale: arguments: expected", "scale: expected at least one tensor"),
        )
        number = pick([2**32, -(2**31) - 1, 2**63, 2**80])
        yield Call(f"number {number}", with_arguments(X, 2.0, number), ("argument 2: expected an integer of 32 bits",))
        number = pick([np.float64(2), np.int8(1), np.float16(1), np.uint64(3), ml_dtypes.bfloat16(1), None, X])
        where = pick([1, 2])
        arguments = [X, 2.0, 1000]
        arguments[where] = number
        wide = FOUR_BYTES.format(where)
        yield Call(f"argument {where} {type(number).__name__}", with_arguments(*arguments), (wide,))
        odd = pick(["7", 1j, np.complex128(1), object(), {}, lambda: 0])
        yield Call(f"argument {type(odd).__name__}", with_arguments(X, 2.0, odd), ("argument 2: expected",))

        like = pick(
            [3, "float32", None, Like((-1,), "float32"), Like((1000,), "datetime64[s]"), Like((1000,), "U4"), {}]
        )
        yield Call(f"results {like!r}", with_results(like), ("scale: result", "scale: arguments: expected"))
        aliases = pick([{0: 1}, {1: 0}, {-1: 0}, {0: -1}, {0: 0, 1: 0}])
        yield Call(f"aliases {aliases}", with_results(Like((1000,), "float32"), aliases), ("input_output_aliases",))
        like = pick([Like((999,), "float32"), Like((1000,), "int32"), Like((1, 1000), "float32"), Like((), "float32")])
        yield Call(f"alias of {like.dtype}{like.shape}", with_results(like, {0: 0}), ("input_output_aliases: 0: 0",))

        cubin = KERNEL.cubin
        cut = cubin[: (size := generator.randrange(len(cubin)))]
        yield Call(f"Python, cut to {size}", by_cubin(cuda_kernel, cut), ("source_or_cubin",))
        yield Call(f"cut to {size}", by_cubin(past_python, cut), ("scale: cubin: expected",))
        for _ in range(4):
            damaged = bytearray(cubin)
            flipped = sorted(generator.sample(range(8 * len(cubin)), generator.randint(1, 4)))
            for bit in flipped:
                damaged[bit // 8] ^= 1 << bit % 8
            flips = by_cubin(past_python, bytes(damaged))
            yield Call(f"bits {flipped} of the cubin", flips, ("kernel_call: scale: ",))
        noise = generator.randbytes(generator.randrange(4096))
        yield Call(f"noise of {len(noise)}", by_cubin(past_python, noise), ("scale: cubin: expected",))
        arch = pick(["sm_120a", "sm_100a", "sm_80"])
        other = cuda_kernel(sources.SCALE, "scale", arch=arch)
        yield Call(
            f"for {arch}",
            by_cubin(past_python, other.cubin),
            ("scale: cubin: expected code for GPU", "scale: arguments: expected 4"),  # a GPU runs older code
            driver=True,
        )


def main() -> None:
    frontend, seed, count = frontends.ALL[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
    refused = right = 0
    for _, call in zip(range(count), calls(random.Random(seed)), strict=False):
        print(call.what, flush=True)
        # Without a GPU there is no driver either, and no result.
        only_gpu = frontend.platform != "cuda" and (call.driver or not call.errors)
        errors = (*call.errors, NEEDS_GPU) if only_gpu else call.errors
        try:
            (y,) = frontend.run(call.make, {"x": X})
        except Exception as error:
            assert any(text in str(error) for text in errors), f"{call.what}: {type(error).__name__}: {error}"
            refused += 1
        else:
            assert not errors, f"{call.what}: expected an error with one of {errors}"
            np.testing.assert_array_equal(y, 2 * X, call.what)
            right += 1
    if frontend.platform == "cuda":
        (y,) = frontend.run(scale(), {"x": X})
        np.testing.assert_array_equal(y, 2 * X)
    print(f"{refused} refused, {right} right")
    print("ok")


if __name__ == "__main__":
    main()
