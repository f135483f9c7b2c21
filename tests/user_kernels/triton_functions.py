"""The Triton functions that these tests bring, as a user would."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add(x, y, n, out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, i < n) + tl.load(y + i, i < n), i < n)


@triton.jit
def softmax(x, columns, out, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * columns + i, i < columns, -float("inf"))
    exponentials = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * columns + i, exponentials / tl.sum(exponentials, 0), i < columns)


@triton.jit
def matmul(a, b, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """With tensor descriptors, which lie in global scratch memory."""
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    from_a = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    from_b = tl.make_tensor_descriptor(b, [K, N], [N, 1], [BK, BN])
    to_out = tl.make_tensor_descriptor(out, [M, N], [N, 1], [BM, BN])
    sums = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        sums = tl.dot(from_a.load([row, k]), from_b.load([k, column]), sums)
    to_out.store([row, column], sums.to(tl.float16))


@triton.jit
def increment(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, i < n) + 1, i < n)


@triton.jit
def numbers(x, a, b, c, d, e, out):
    tl.store(out, a)
    tl.store(out + 1, b)
    tl.store(out + 2, c)
    tl.store(out + 3, d)
    if e is None:
        tl.store(out + 4, 1.0)


@triton.autotune([triton.Config({"BLOCK": 64}, num_warps=2), triton.Config({"BLOCK": 256})], key=["n"])
@triton.heuristics({"EVEN": lambda meta: meta["n"] % meta["BLOCK"] == 0})
@triton.jit
def tuned(x, n, out, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(out + i, tl.load(x + i) * 2)
    else:
        tl.store(out + i, tl.load(x + i, i < n) * 2, i < n)
