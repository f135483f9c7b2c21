"""Operands and results of more than 2**32 elements, which 32-bit indices of either sign get wrong: what an operator
returns for all rows must have the bits of what it returns for some of them. test_limits.py has caches and tables."""

from __future__ import annotations

import math
import os

import pytest

torch = pytest.importorskip("torch")
GIB = 2**30
OVER = 2**32 + 2**20
PART = 2**28  # elements that are compared at a time


def room(frontend, gib: float) -> None:
    """Skips where less than that many GiB are free; a GPU is part of the test, and so is a large host."""
    if frontend.platform == "cuda":
        import gc

        gc.collect()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = gib + 2 if frontend.platform == "cuda" else max(gib + 2, 60)  # minutes of a small host's time
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


@ALL
def test_simple_add(frontend):
    room(frontend, 18)
    a = random(frontend, OVER + 5)
    (out,) = call(frontend, "simple_add", a=a, b=a)
    assert_rows((out,), OVER + 5, 1, lambda first, last: [a[first:last] * 2])


@ALL
@pytest.mark.parametrize("operator", ["silu_and_mul", "gelu_and_mul"])
@pytest.mark.parametrize("rows", [1, 2**17 + 32])
def test_activations(frontend, operator, rows):
    """Of one long row, and of many."""
    room(frontend, 16)
    size = OVER // rows // 16 * 8
    x = random(frontend, rows, 2 * size)
    (out,) = call(frontend, operator, x=x)
    one = getattr(eager(), operator)
    if rows > 1:
        assert_rows((out,), rows, size, lambda first, last: [one(x[first:last])])
    else:
        assert_rows(
            (out[0],),
            size,
            1,
            lambda first, last: [one(torch.cat([x[0, first:last], x[0, size + first : size + last]]))],
        )


@ALL
def test_rms_norm(frontend):
    room(frontend, 46)
    rows, size = OVER // 2048 + 3, 2048
    x, residual, weight = random(frontend, rows, size), random(frontend, rows, size, seed=1), random(frontend, size)
    results = call(frontend, "rms_norm", x=x, weight=weight, eps=1e-6, residual=residual)
    assert_rows(
        results,
        rows,
        size,
        lambda first, last: eager().rms_norm(x[first:last], weight, eps=1e-6, residual=residual[first:last]),
    )


@EAGER_GPU
def test_rms_norm_of_one_row(frontend):
    """A row whose squares are 0 but for the last ones: its mean must hold them."""
    room(frontend, 36)
    x = torch.zeros(1, OVER, dtype=torch.bfloat16, device="cuda")
    x[0, -4:] = 2.0**15
    weight = torch.ones(OVER, dtype=torch.bfloat16, device="cuda")
    (out,) = call(frontend, "rms_norm", x=x, weight=weight, eps=1e-6)
    want = 2.0**15 / math.sqrt(4 * 2.0**30 / OVER + 1e-6)
    assert (out[0, -4:].float() / want - 1).abs().max() < 0.01 and not out[0, :-4].any()


@ALL
def test_merge_attention_states(frontend):
    room(frontend, 30)
    shape = (OVER // (64 * 256) + 1, 64, 256)
    a, b = random(frontend, *shape), random(frontend, *shape, seed=1)
    lse_a, lse_b = (random(frontend, *shape[:2], dtype=torch.float32, seed=i) for i in (2, 3))
    results = call(frontend, "merge_attention_states", out_a=a, lse_a=lse_a, out_b=b, lse_b=lse_b)
    assert_rows(
        results,
        shape[0],
        64 * 256,
        lambda i, j: eager().merge_attention_states(a[i:j], lse_a[i:j], b[i:j], lse_b[i:j]),
    )


@ALL
def test_rotary_embedding(frontend):
    room(frontend, 40)
    tokens, heads, kv_heads, dim = OVER // (64 * 128) + 1, 64, 8, 128
    query, key = random(frontend, tokens, heads, dim), random(frontend, tokens, kv_heads, dim, seed=1)
    table = random(frontend, 1024, dim // 2, 2, dtype=torch.float32)
    positions = torch.arange(tokens, dtype=torch.int32, device=query.device) % 1024
    results = call(frontend, "rotary_embedding", query=query, key=key, positions=positions, table=table)
    assert_rows(
        results,
        tokens,
        heads * dim,
        lambda i, j: eager().rotary_embedding(query[i:j], key[i:j], positions[i:j], table),
    )


@EAGER_GPU
def test_rotary_embedding_of_a_large_table(frontend):
    """More than 2**32 numbers in the table, of which the last row is 1 and 0: what it turns stays as it is."""
    room(frontend, 20)
    half = 64
    table = torch.zeros(OVER // (2 * half), half, 2, device="cuda")
    table[-1, :, 0] = 1.0
    query = random(frontend, 3, 2, 2 * half)
    positions = torch.tensor([table.shape[0] - 1, 5, table.shape[0] - 1], dtype=torch.int32, device="cuda")
    turned, _ = call(frontend, "rotary_embedding", query=query, key=query, positions=positions, table=table)
    assert torch.equal(turned[0], query[0]) and torch.equal(turned[2], query[2]) and not turned[1].any()


@GPU
def test_reshape_and_cache_and_rotary_and_cache(frontend):
    """Tokens, keys and a cache of more than 2**32 elements. A token's K and V stand where its slot says."""
    room(frontend, 60)
    tokens, kv_heads, dim, page_size = 2**17 + 48, 128, 256, 16
    key = random(frontend, tokens, kv_heads, dim)
    slots = torch.randperm(tokens, device="cuda")
    cache = torch.zeros(2, tokens // page_size, page_size, kv_heads, dim, dtype=torch.bfloat16, device="cuda")
    if frontend.framework == "torch":
        eager().reshape_and_cache_(key, key, cache, slots)
    else:
        (cache,) = call(frontend, "reshape_and_cache", key=key, value=key, kv_cache=cache, slot_mapping=slots.int())
    flat = cache.view(2, tokens, kv_heads, dim)
    assert_rows((key, key), tokens, kv_heads * dim, lambda i, j: [flat[0][slots[i:j]], flat[1][slots[i:j]]])
    del cache, flat, key

    room(frontend, 60)
    heads, kv_heads = 112, 8
    qkv = random(frontend, tokens, (heads + 2 * kv_heads) * dim)
    table = random(frontend, 512, dim // 2, 2, dtype=torch.float32)
    positions = torch.arange(tokens, dtype=torch.int32, device="cuda") % 512
    cache = torch.zeros(tokens // page_size, page_size, 2 * kv_heads, dim, dtype=torch.bfloat16, device="cuda")
    given = {"qkv": qkv, "positions": positions, "table": table, "kv_cache": cache, "slot_mapping": slots.int()}
    if frontend.framework == "torch":
        query = eager().rotary_and_cache_(**given)
    else:
        query, cache = call(frontend, "rotary_and_cache", **given)
    flat = cache.view(tokens, kv_heads, 2, dim)

    def parts(i, j):
        q, k, v = qkv[i:j].view(j - i, -1, dim).split([heads, kv_heads, kv_heads], 1)
        q, k = eager().rotary_embedding(q, k, positions[i:j], table)
        stored = flat[slots[i:j]]
        assert torch.equal(bits(stored[:, :, 0].contiguous()), bits(k)), f"K of tokens {i} to {j}"
        assert torch.equal(bits(stored[:, :, 1].contiguous()), bits(v.contiguous())), f"V of tokens {i} to {j}"
        return [q]

    assert_rows((query,), tokens, heads * dim, parts)


@GPU
def test_sample(frontend):
    rows, vocab = 40_000, 128_256
    room(frontend, 2 * rows * vocab / GIB + 1)
    logits = random(frontend, rows, vocab)
    device = logits.device
    options = {
        "temperature": torch.rand(rows, device=device),
        "top_k": torch.randint(0, 100, (rows,), dtype=torch.int32, device=device),
        "top_p": torch.rand(rows, device=device),
        "min_p": torch.rand(rows, device=device) * 0.1,
        "seed": torch.arange(rows, dtype=torch.int32, device=device),
        "step": torch.arange(rows, dtype=torch.int32, device=device),
    }
    options["temperature"][::3] = 0
    ends = [slice(0, 500), slice(2**31 // vocab - 250, 2**31 // vocab + 250), slice(rows - 500, rows)]
    token, logprob = call(frontend, "sample", logits=logits, **options)
    for part in ends:
        want = eager().sample(logits[part], **{n: x[part] for n, x in options.items()})
        assert torch.equal(token[part], want[0]) and torch.equal(bits(logprob[part]), bits(want[1]))
    assert int(token.min()) >= 0


@pytest.mark.frontends("eager", "eager-cuda")
def test_sample_of_the_largest_vocabulary(frontend):
    """Equal logits: their probabilities, as integers, add up to nearly 2**64."""
    vocab = 2**24 - 1
    logits = torch.zeros(1, vocab, dtype=torch.bfloat16, device=frontend.device())
    one = torch.ones(1, device=frontend.device())
    options = {"top_k": one.int() * 0, "top_p": one * 0.9, "min_p": one * 0, "seed": one.int(), "step": one.int()}
    for temperature in (0.0,) if frontend.platform == "host" else (0.0, 1.0):
        token, logprob = call(frontend, "sample", logits=logits, temperature=one * temperature, **options)
        assert 0 <= int(token) < vocab and abs(float(logprob) + math.log(vocab)) < 1e-5
    with pytest.raises(ValueError, match=r"logits: expected a vocabulary of 1 to 2\*\*24 - 1 tokens.*16777216\]"):
        call(frontend, "sample", logits=torch.zeros(1, vocab + 1).to(logits), temperature=one, **options)


# ---- attention -------------------------------------------------------------------------------------------------------
def ragged(tokens: int, lengths: tuple[int, ...], context: int):
    """Bounds of sequences with these numbers of new tokens, in turn, as many as have `tokens` together."""
    count = torch.tensor(lengths, dtype=torch.int32, device="cuda").repeat(tokens // sum(lengths))
    starts = torch.zeros(count.numel() + 1, dtype=torch.int32, device="cuda")
    starts[1:] = count.cumsum(0)
    return starts, count + context


@GPU
@pytest.mark.parametrize("lengths", [(1,), (300, 1, 7)], ids=["decode", "prefill"])
@pytest.mark.parametrize("cache", ["bfloat16", "float32", "float8_e4m3fn"])
def test_paged_attention(frontend, lengths, cache):
    """A query of more than 2**32 elements, in sequences whose results are those of a call with them alone."""
    if frontend.framework == "jax" and cache != "bfloat16":
        pytest.skip("JAX calls the same handler")
    cache_dtype = getattr(torch, cache)
    dtype = torch.float32 if cache == "float32" else torch.bfloat16
    room(frontend, 2.2 * OVER * dtype.itemsize / GIB)
    if dtype is torch.float32 and lengths == (1,):
        lengths = (4,)  # fewer sequences: each CTA of that kernel reads all bounds
    heads, kv_heads, dim, page_size, pages = 64, 8, 256, 16, 4096
    query = random(frontend, OVER // (heads * dim) + 5, heads, dim, dtype=dtype)
    kv_cache = random(frontend, pages, page_size, 2 * kv_heads, dim, dtype=dtype).to(cache_dtype)
    options = {"scale": dim**-0.5, "sliding_window": 64}
    if cache_dtype is not dtype:
        options |= {name: torch.full((1,), 0.5, device="cuda") for name in ("k_scale", "v_scale")}
    starts, contexts = ragged(query.shape[0], lengths, 30)
    seqs = contexts.numel()
    tables = torch.randint(0, pages, (seqs, (30 + max(lengths)) // page_size + 1), dtype=torch.int32, device="cuda")
    num_seqs = torch.tensor([seqs], dtype=torch.int32, device="cuda")
    batch = {"context_lens": contexts, "block_tables": tables, "query_start_loc": starts, "num_seqs": num_seqs}
    out, lse = call(frontend, "paged_attention_with_lse", query=query, kv_cache=kv_cache, **batch, **options)
    assert not out[int(starts[-1]) :].any()  # padding rows
    step = max(1, seqs // 37)
    for first in range(0, seqs, step):  # all of them, 38 calls
        last = min(seqs, first + step)
        rows = slice(int(starts[first]), int(starts[last]))
        want = eager().paged_attention_with_lse(
            query[rows],
            kv_cache,
            contexts[first:last],
            tables[first:last],
            starts[first : last + 1] - starts[first],
            last - first,
            **options,
        )
        assert torch.equal(bits(out[rows]), bits(want[0])), f"sequences {first} to {last}"
        assert torch.equal(bits(lse[rows]), bits(want[1])), f"lse of sequences {first} to {last}"
    tail = slice(int(starts[-2]), int(starts[-1]))  # and one by the mathematics
    keys = torch.arange(int(contexts[-1]), device="cuda")
    places = (tables[-1, keys // page_size].long(), keys % page_size)
    factor = 1.0 if cache_dtype is dtype else 0.5
    bytes_of = kv_cache.view(torch.uint8).view(pages, page_size, 2 * kv_heads, -1)  # float8 has no indexing
    k, v = (bytes_of[places][:, i::2].contiguous().view(cache_dtype).double() * factor for i in (0, 1))
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->qhk", query[tail].double(), k) * dim**-0.5
    at = keys[len(keys) - scores.shape[0] :, None, None]
    scores = scores.masked_fill((keys > at) | (keys <= at - 64), -math.inf)
    exact = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v)
    assert (out[tail].double() - exact).abs().max() < 0.05


@EAGER_GPU
def test_paged_attention_of_too_many_rows(frontend):
    """2**31 rows of head_dim, which is more than the kernels count, and one row less than that."""
    heads, dim, dtype = 128, 8, torch.bfloat16
    room(frontend, 2.1 * 2**34 * dtype.itemsize / GIB)
    tokens = 2**31 // heads
    query = torch.full((tokens, heads, dim), float("nan"), dtype=dtype, device="cuda")
    cache = random(frontend, 4, 16, 2, dim, dtype=dtype)
    batch = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([20], [[3, 1]], [0, 1])]
    with pytest.raises(ValueError, match=r"paged_attention: query: expected fewer than 2\^31 rows"):
        eager().paged_attention(query, cache, *batch, 1, scale=1.0)
    query[-2] = 1.0
    batch[2] = torch.tensor([tokens - 2, tokens - 1], dtype=torch.int32, device="cuda")
    out = eager().paged_attention(query[:-1], cache, *batch, 1, scale=1.0)
    assert out[-1].isfinite().all() and out[-1].any()
    for part in out[:-1].split(2**18):
        assert not part.any()


# ---- products --------------------------------------------------------------------------------------------------------
@GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("wide", ["x", "out"])
def test_linear_of_many_rows(frontend, dtype, wide):
    """x, or the result, of more than 2**32 elements: by the kernel in float32, by the framework otherwise."""
    k, n = (4096, 16) if wide == "x" else (16, 4096)
    rows = OVER // 4096 + 3
    room(frontend, 1.2 * OVER * dtype.itemsize / GIB)
    shapes = ((rows, k), (n, k), (n,))
    x, weight, bias = (random(frontend, *shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes))
    (out,) = call(frontend, "linear", x=x, weight=weight, bias=bias)
    step = PART // 4096
    for first in range(0, rows, step):
        want = x[first : first + step].float() @ weight.float().T + bias.float()
        error = (out[first : first + step].float() - want).abs().max()
        assert error < 0.01 * math.sqrt(k) * (4 if dtype is torch.bfloat16 else 1), f"rows from {first}: {error}"


@EAGER_GPU
@pytest.mark.parametrize("rows", [1, 60])
@pytest.mark.parametrize(
    ("dtype", "format"),
    [
        *((torch.bfloat16, format) for format in ("plain", "float8", "float8_block", "int8", "int4")),
        (torch.float32, "plain"),
        (torch.float32, "int4"),
    ],
    ids=str,
)
def test_linear_of_a_large_weight(frontend, dtype, format, rows):
    """A weight of more than 2**32 values, whose features are those of its parts."""
    n, k = OVER // 8192 + 16, 8192
    room(frontend, 1.6 * n * k * (dtype.itemsize if format == "plain" else 1) / GIB)
    x = random(frontend, rows, k, dtype=dtype, seed=1)
    generator = torch.Generator("cuda").manual_seed(7)
    arguments = {}
    if format == "plain":
        weight = random(frontend, n, k, dtype=dtype)
    elif format == "int4":
        weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda", generator=generator)
        arguments["weight_scale"] = torch.rand(n, k // 128, device="cuda", generator=generator).to(dtype)
        arguments["weight_zero_point"] = torch.randint(0, 16, (n, k // 128), device="cuda", generator=generator).byte()
    else:
        weight = torch.randint(0, 120, (n, k), dtype=torch.int8, device="cuda", generator=generator)
        weight[:, ::2] |= -128  # negative; in float8 too, where 0x7f and 0xff would be NaN
        shape = (-(-n // 128), k // 128) if format == "float8_block" else (n,)
        arguments["weight_scale"] = torch.rand(shape, device="cuda", generator=generator)
        if format != "int8":
            weight = weight.view(torch.float8_e4m3fn)
    (out,) = call(frontend, "linear", x=x, weight=weight, **arguments)
    for first in (0, 2**31 // k // 128 * 128 - 256, 2**32 // k // 128 * 128 - 256, n - n % 128 - 256):
        last = min(n, first + 1024)
        part = {
            name: v[first // 128 : -(-last // 128)]
            if name == "weight_scale" and format == "float8_block"
            else v[first:last]
            for name, v in arguments.items()
        }
        want = eager().linear(x, weight[first:last], **part)
        scale = want.float().abs().max()
        assert scale > 0 and (out[:, first:last].float() - want.float()).abs().max() <= 0.02 * scale, first


@EAGER_GPU
def test_gated_mlp_of_large_weights(frontend):
    room(frontend, 14)
    hidden, intermediate = 16384, 2**17 + 128
    gate_up, down = random(frontend, 2 * intermediate, hidden), random(frontend, hidden, intermediate)
    gate_up *= 0.02
    down *= 0.02
    x = random(frontend, 4, hidden)
    (out,) = call(frontend, "gated_mlp", x=x, gate_up_weight=gate_up, down_weight=down)
    h = torch.nn.functional.silu(x @ gate_up[:intermediate].T) * (x @ gate_up[intermediate:].T)
    want = (h @ down.T).float()
    assert (out.float() - want).abs().max() < 0.02 * want.abs().max()
