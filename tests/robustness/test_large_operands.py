"""Operands and results of more than 2**32 elements, which 32-bit indices of either sign get wrong: what an operator
returns for all rows must have the bits of what it returns for some of them. test_large_weights.py has products,
test_limits.py caches and tables."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from tests.robustness.large_operands import ALL, EAGER_GPU, GIB, GPU, OVER, assert_rows, bits, call, eager, random, room  # noqa: E402 - after what may be missing

pytestmark = pytest.mark.usefixtures("much_memory")


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
@pytest.mark.parametrize("window", [None, 3])
def test_bidirectional_attention(frontend, window):
    """Of sequences of 16 rows."""
    room(frontend, 40)
    heads, dim, length = 64, 128, 16
    tokens = (OVER // (heads * dim) // length + 1) * length
    query, key, value = (random(frontend, tokens, heads, dim, seed=i) for i in range(3))

    def metadata(rows):
        starts = torch.arange(0, rows + 1, length, dtype=torch.int32, device=query.device)
        num_seqs = torch.tensor([rows // length], dtype=torch.int32, device=query.device)
        return {"query_start_loc": starts, "num_seqs": num_seqs, "scale": dim**-0.5, "sliding_window": window}

    results = call(frontend, "bidirectional_attention", query=query, key=key, value=value, **metadata(tokens))

    def of_rows(first, last):
        begin, end = first // length * length, -(-last // length) * length
        parts = (x[begin:end] for x in (query, key, value))
        return [eager().bidirectional_attention(*parts, **metadata(end - begin))[first - begin : last - begin]]

    assert_rows(results, tokens, heads * dim, of_rows)


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


@ALL
def test_mla_attention(frontend):
    """Of sequences of one row and 8 keys."""
    room(frontend, 40)
    heads, dim, value_dim, pages = 64, 576, 512, 1024
    rows = OVER // (heads * value_dim) + 1
    query, cache = random(frontend, rows, heads, dim), random(frontend, pages, 8, dim, seed=1)

    def metadata(first, last):
        count, device = last - first, query.device
        return {
            "kv_cache": cache,
            "context_lens": torch.full((count,), 8, dtype=torch.int32, device=device),
            "block_tables": (torch.arange(first, last, device=device) % pages).int()[:, None].contiguous(),
            "query_start_loc": torch.arange(count + 1, dtype=torch.int32, device=device),
            "num_seqs": torch.tensor([count], dtype=torch.int32, device=device),
            "scale": dim**-0.5,
            "value_dim": value_dim,
        }

    def of_rows(first, last):
        return [eager().mla_attention(query[first:last], **metadata(first, last))]

    results = call(frontend, "mla_attention", query=query, **metadata(0, rows))
    assert_rows(results, rows, heads * value_dim, of_rows)


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
