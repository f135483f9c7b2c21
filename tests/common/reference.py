"""What the operators mean, in float64 NumPy, written to be read. Everything else is measured against this."""

from __future__ import annotations

import functools
import math

import ml_dtypes
import numpy as np

FLOAT8_MAX = {np.dtype(ml_dtypes.float8_e4m3fn): 448.0, np.dtype(ml_dtypes.float8_e5m2): 57344.0}


def split_cache(kv_cache: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Views of K and V, each [num_pages, page_size, num_kv_heads, head_dim], of a cache in either layout."""
    if kv_cache.ndim == 4:  # [num_pages, page_size, 2 * num_kv_heads, head_dim], K of head h at 2h, V at 2h + 1
        return kv_cache[:, :, 0::2], kv_cache[:, :, 1::2]
    return kv_cache[0], kv_cache[1]  # [2, num_pages, page_size, num_kv_heads, head_dim]


def _scale_per_head(scale, num_kv_heads: int) -> np.ndarray:
    """float64 [num_kv_heads, 1] from None, a number, or an array of one element or one per kv head."""
    scale = np.ones(1) if scale is None else np.asarray(scale, np.float64).reshape(-1)
    return np.broadcast_to(scale, num_kv_heads)[:, None]


def hidden_keys(rows: int, context_len: int, sliding_window: int | None, tree_mask: np.ndarray | None) -> np.ndarray:
    """bool[rows, context_len]: the keys that a sequence's rows do not see. tree_mask: the sequence's rows of it."""
    q_pos = np.arange(context_len - rows, context_len)[:, None]
    k_pos = np.arange(context_len)[None, :]
    hidden = k_pos > q_pos
    if tree_mask is not None:
        bits = np.unpackbits(tree_mask.view(np.uint8), axis=1, bitorder="little")[:, :rows] == 0
        hidden = np.zeros((rows, context_len), bool)
        new = min(rows, context_len)  # tokens with a place in the context
        hidden[:, context_len - new :] = bits[:, rows - new :]
    if sliding_window is not None:
        hidden |= k_pos <= q_pos - sliding_window
    return hidden


def paged_attention(
    query: np.ndarray,
    kv_cache: np.ndarray,
    context_lens: np.ndarray,
    block_tables: np.ndarray,
    query_start_loc: np.ndarray,
    num_seqs: np.ndarray | int,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale=None,
    v_scale=None,
    sinks: np.ndarray | None = None,
    tree_mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """float64 (out [num_tokens, num_heads, head_dim], lse [num_tokens, num_heads])."""
    num_tokens, num_heads, head_dim = query.shape
    k_pages, v_pages = split_cache(kv_cache)
    _, page_size, num_kv_heads, _ = k_pages.shape
    group = num_heads // num_kv_heads
    k_scale, v_scale = _scale_per_head(k_scale, num_kv_heads), _scale_per_head(v_scale, num_kv_heads)

    out = np.zeros((num_tokens, num_heads, head_dim))
    lse = np.full((num_tokens, num_heads), -np.inf)
    for s in range(int(np.asarray(num_seqs).reshape(()))):
        context_len = int(context_lens[s])
        pages = block_tables[s, : math.ceil(context_len / page_size)]
        k = k_pages[pages].reshape(-1, num_kv_heads, head_dim)[:context_len].astype(np.float64) * k_scale
        v = v_pages[pages].reshape(-1, num_kv_heads, head_dim)[:context_len].astype(np.float64) * v_scale
        first, last = int(query_start_loc[s]), int(query_start_loc[s + 1])
        for row in range(first, last):
            position = context_len - (last - first) + (row - first)
            oldest = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            if tree_mask is None:
                seen = slice(oldest, max(oldest, position + 1))  # none where there are more new tokens than context
            else:
                seen = np.arange(oldest, context_len)
                token = seen - (context_len - (last - first))
                bits = tree_mask[row][np.maximum(token, 0) // 32] >> (np.maximum(token, 0) % 32).astype(np.uint32) & 1
                seen = seen[(token < 0) | (bits == 1)]
            keys, values = k[seen], v[seen]
            if len(keys) == 0:
                continue
            for h in range(num_heads):
                q = query[row, h].astype(np.float64)
                scores = keys[:, h // group] @ q * scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                logits = scores if sinks is None else np.append(scores, np.float64(sinks[h]))
                top = logits.max()
                if top == -np.inf:
                    continue  # every logit is -inf: nothing to see
                total = np.exp(logits - top).sum()
                out[row, h] = np.exp(scores - top) / total @ values[:, h // group]
                lse[row, h] = top + np.log(total)
    return out, lse


def to_storage(value: np.ndarray, scale, cache_dtype: np.dtype) -> np.ndarray:
    """value T[..., num_kv_heads, head_dim] as a cache of `cache_dtype` holds it: value / scale in float32, rounded to
    nearest, beyond the largest finite number: that number."""
    if cache_dtype not in FLOAT8_MAX:
        return value.astype(cache_dtype)
    scale = _scale_per_head(scale, value.shape[-2]).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaN are cases like others
        scaled = value.astype(np.float32) / scale
    limit = np.float32(FLOAT8_MAX[cache_dtype])
    return np.clip(scaled, -limit, limit).astype(cache_dtype)  # NaN passes through np.clip


def reshape_and_cache(key, value, kv_cache, slot_mapping, *, k_scale=None, v_scale=None) -> np.ndarray:
    """The cache after the new tokens; negative slots are skipped, of duplicate slots the last token wins."""
    kv_cache = kv_cache.copy()
    k_pages, v_pages = split_cache(kv_cache)
    page_size = k_pages.shape[1]
    key = to_storage(key, k_scale, kv_cache.dtype)
    value = to_storage(value, v_scale, kv_cache.dtype)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            k_pages[slot // page_size, slot % page_size] = key[token]
            v_pages[slot // page_size, slot % page_size] = value[token]
    return kv_cache


def merge_attention_states(out_a, lse_a, out_b, lse_b) -> tuple[np.ndarray, np.ndarray]:
    """Attention over the union of two disjoint sets of keys, from the results over each. float64."""
    out_a, out_b = out_a.astype(np.float64), out_b.astype(np.float64)
    lse_a, lse_b = lse_a.astype(np.float64), lse_b.astype(np.float64)
    top = np.maximum(lse_a, lse_b)
    empty = top == -np.inf
    top = np.where(empty, 0, top)
    weight_a, weight_b = np.exp(lse_a - top), np.exp(lse_b - top)
    total = weight_a + weight_b
    safe = np.where(empty, 1, total)
    # A side with weight 0 has seen nothing; whatever its rows hold takes no part.
    part_a = np.where(weight_a[..., None] > 0, out_a * (weight_a / safe)[..., None], 0)
    part_b = np.where(weight_b[..., None] > 0, out_b * (weight_b / safe)[..., None], 0)
    with np.errstate(divide="ignore"):
        lse = np.where(empty, -np.inf, top + np.log(total))
    return part_a + part_b, lse


def all_reduce(parts: np.ndarray) -> np.ndarray:
    """T[...] from T[ranks, ...]: float32 sums in the order of ranks, rounded once. These are the bits."""
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total = total + part.astype(np.float32)
    return np.asarray(total).astype(parts.dtype)


def all_reduce_add_rms_norm(
    parts: np.ndarray, residual: np.ndarray, weight: np.ndarray, *, eps: float
) -> tuple[np.ndarray, np.ndarray]:
    """(out, sum) in T: the bits of sum, and out with a float64 mean."""
    dtype = parts.dtype
    sum_ = (all_reduce(parts).astype(np.float32) + residual.astype(np.float32)).astype(dtype)
    wide = sum_.astype(np.float64)
    normed = (wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps)).astype(dtype)
    return (normed.astype(np.float32) * weight.astype(np.float32)).astype(dtype), sum_


def linear(
    x,
    weight,
    *,
    weight_scale=None,
    weight_zero_point=None,
    bias=None,
    residual=None,
    activation: str | None = None,
) -> tuple[np.ndarray]:
    """The product with a weight in any of linear's formats. float64, nothing rounded."""
    values = linear_weight(weight, weight_scale, weight_zero_point)
    out = x.astype(np.float64) @ values.T
    if bias is not None:
        out = out + bias.astype(np.float64)
    if activation is not None:
        gate, up = np.split(out, 2, axis=-1)
        if activation == "silu_and_mul":
            out = gate / (1 + np.exp(-gate)) * up
        else:
            out = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    return (out if residual is None else out + residual.astype(np.float64),)


def gated_mlp(x, gate_up_weight, down_weight, **given) -> tuple[np.ndarray]:
    """By the operators that it is made of, each rounded to T."""
    options = {name: given[name] for name in ("eps", "weight_offset", "round_once") if name in given}
    h = x
    if given.get("norm_weight") is not None:
        (h,) = rms_norm(x, given["norm_weight"], **{"eps": 1e-6, **options})

    def product(h, prefix, weight, **more):
        names = {"weight_scale": "scale", "weight_zero_point": "zero_point", "bias": "bias"}
        return linear(h, weight, **{name: given.get(f"{prefix}_{its}") for name, its in names.items()}, **more)[0]

    h = product(h, "gate_up", gate_up_weight, activation=given.get("activation", "silu_and_mul")).astype(x.dtype)
    return (product(h, "down", down_weight, residual=given.get("residual")),)


def attention_block(x, qkv_weight, out_weight, positions, table, kv_cache, slot_mapping, *metadata, **given) -> tuple:
    """By the operators that it is made of, each rounded to T."""
    some = {name: given[name] for name in given if given[name] is not None}

    def options(*names):
        return {name: some[name] for name in names if name in some}

    def product(h, prefix, weight, **more):
        if weight is None:
            return h
        names = {"weight_scale": "scale", "weight_zero_point": "zero_point", "bias": "bias"}
        return linear(h, weight, **{name: some.get(f"{prefix}_{its}") for name, its in names.items()}, **more)[0]

    h = x
    norm = {"eps": some.get("eps", 1e-6), **options("weight_offset", "round_once")}
    if "norm_weight" in some:
        (h,) = rms_norm(x, some["norm_weight"], **norm)
    stored = {"norm_eps": norm.pop("eps"), **norm}
    query, cache = rotary_and_cache(
        product(h, "qkv", qkv_weight).astype(x.dtype), positions, table, kv_cache, slot_mapping,
        **stored, **options("k_scale", "v_scale", "q_norm_weight", "k_norm_weight", "interleaved"),
    )  # fmt: skip
    metadata = metadata or tuple(some[n] for n in ("context_lens", "block_tables", "query_start_loc", "num_seqs"))
    attended = paged_attention(
        query, cache, *metadata, **options("scale", "sliding_window", "soft_cap", "k_scale", "v_scale", "sinks")
    )[0].astype(x.dtype)
    return product(attended.reshape(len(x), -1), "out", out_weight, residual=some.get("residual")), cache


@functools.cache
def _every_value(dtype: np.dtype) -> np.ndarray:
    """float64: of each pattern of bits."""
    patterns = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}")
    with np.errstate(invalid="ignore"):  # NaN
        return patterns.view(dtype).astype(np.float64)


def _wide(x: np.ndarray) -> np.ndarray:
    """x as float64; NumPy converts ml_dtypes' one by one, 20 ns each."""
    if x.dtype.itemsize > 2:
        return x.astype(np.float64)
    return _every_value(x.dtype)[x.view(f"u{x.dtype.itemsize}")]


def linear_weight(weight, weight_scale=None, weight_zero_point=None) -> np.ndarray:
    """float64[n, k]: what the stored weight means."""
    if weight_scale is None:
        return _wide(weight)
    scale = weight_scale.astype(np.float64)
    if weight.dtype == np.uint8:
        order = (0, 2, 4, 6, 1, 3, 5, 7)  # of the values in the eight nibbles of four bytes
        packed = weight.reshape(weight.shape[0], -1, 4)
        values = np.empty((*packed.shape[:2], 8), np.float64)
        for nibble, value in enumerate(order):
            byte = packed[..., nibble // 2]
            values[..., value] = byte >> 4 if nibble % 2 else byte & 15
        values = values.reshape(*scale.shape, 128)
        values -= 8.0 if weight_zero_point is None else weight_zero_point.astype(np.float64)[..., None]
        values *= scale[..., None]
        return values.reshape(weight.shape[0], -1)
    values = _wide(weight)
    if scale.ndim == 2:
        n, k = values.shape
        values *= np.repeat(np.repeat(scale, 128, 0)[:n], 128, 1)[:, :k]
    else:
        values *= scale[:, None]
    return values


def rms_norm(x, weight, *, eps, residual=None, weight_offset=0.0, round_once=False) -> tuple[np.ndarray, ...]:
    """(out,) or (out, sum) in T: the bits of sum, and out with a float64 mean, rounded where the operator rounds."""
    dtype = x.dtype
    sum_ = x if residual is None else (x.astype(np.float32) + residual.astype(np.float32)).astype(dtype)
    wide = sum_.astype(np.float64)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps)
    if not round_once:
        normed = normed.astype(dtype)
    out = (normed.astype(np.float64) * (weight.astype(np.float64) + weight_offset)).astype(dtype)
    return (out,) if residual is None else (out, sum_)


def _activation_and_mul(activation, x) -> tuple[np.ndarray]:
    gate, up = np.split(x.astype(np.float64), 2, -1)
    with np.errstate(over="ignore"):
        active = activation(gate).astype(x.dtype)
    return ((active.astype(np.float64) * up).astype(x.dtype),)


def silu_and_mul(x) -> tuple[np.ndarray]:
    return _activation_and_mul(lambda gate: gate / (1 + np.exp(-gate)), x)


def gelu_and_mul(x) -> tuple[np.ndarray]:
    return _activation_and_mul(
        lambda gate: gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))), x
    )


# ---- Sampling --------------------------------------------------------------------------------------------------------


def philox(seed: int, step: int, count: int) -> np.ndarray:
    """uint32 [count]: words of Philox4x32-10, four for each counter (block, step, 0, 0), with the key `seed`."""
    mask = np.uint64(0xFFFFFFFF)
    blocks = np.arange(-(-count // 4), dtype=np.uint64)
    c = [blocks, np.full_like(blocks, step & 0xFFFFFFFF), np.zeros_like(blocks), np.zeros_like(blocks)]
    keys = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        high = [(product >> np.uint64(32)) & mask for product in (first, second)]
        c = [
            high[1] ^ c[1] ^ np.uint64(keys[0]),
            second & mask,
            high[0] ^ c[3] ^ np.uint64(keys[1]),
            first & mask,
        ]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(c, -1).reshape(-1)[:count].astype(np.uint32)


def kept_tokens(logits: np.ndarray, temperature, top_k, top_p, min_p, slack: float = 0.0) -> np.ndarray:
    """bool [vocab]: what one row's min_p, top_k and top_p leave. `slack` > 0 keeps a little more, < 0 a little less."""
    x = logits.astype(np.float64) / float(temperature)
    weights = np.exp(x - x.max())
    kept = (weights >= min_p * (1 - slack)) & (weights >= 0) & (logits > -np.inf)
    if top_k > 0 and kept.sum() > top_k:
        kept &= logits >= np.sort(logits[kept])[-top_k]
    if top_p < 1:
        order = np.argsort(-logits, kind="stable")
        order = order[kept[order]]
        sums = np.cumsum(weights[order])
        first_equal = np.searchsorted(-logits[order].astype(np.float64), -logits[order].astype(np.float64))
        before = np.where(first_equal > 0, sums[first_equal - 1], 0.0)  # of all that are more likely
        kept[order] = (before < sums[-1] * (top_p + slack)) | (first_equal == 0)
    return kept


def gumbel(words: np.ndarray) -> np.ndarray:
    v = np.minimum((words.astype(np.float64) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -np.log(-np.log1p(-v))


def sample(logits, *, temperature, top_k, top_p, min_p, seed, step) -> tuple[np.ndarray, np.ndarray]:
    """(token int32 [rows], logprob float64 [rows])"""
    rows, vocab = logits.shape
    token, logprob = np.full(rows, -1, np.int32), np.full(rows, np.nan)
    for r in range(rows):
        x = logits[r].astype(np.float64)
        if np.isnan(x).any() or x.max() == -np.inf:
            continue
        token[r] = x.argmax()
        if temperature[r] > 0:
            kept = kept_tokens(logits[r].astype(np.float32), temperature[r], top_k[r], top_p[r], min_p[r])
            noise = gumbel(philox(int(seed[r]), int(step[r]), vocab))
            token[r] = np.where(kept, x / float(temperature[r]) + noise, -np.inf).argmax()
        logprob[r] = x[token[r]] - x.max() - np.log(np.exp(x - x.max()).sum())
    return token, logprob


# ---- Rotary embedding ------------------------------------------------------------------------------------------------


def _turn(x, positions, table, interleaved) -> np.ndarray:
    """float64 [num_tokens, heads, head_dim]"""
    cos, sin = np.moveaxis(table[positions].astype(np.float64)[:, None], -1, 0)
    half = table.shape[1]
    out = x.astype(np.float64)
    first, second = slice(half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = out[..., first].copy(), out[..., second].copy()
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def rotary_embedding(query, key, positions, table, *, interleaved=False) -> tuple[np.ndarray, np.ndarray]:
    return tuple(_turn(x, positions, table, interleaved).astype(x.dtype) for x in (query, key))


def rotary_and_cache(
    qkv, positions, table, kv_cache, slot_mapping, *, k_scale=None, v_scale=None, q_norm_weight=None,
    k_norm_weight=None, bias=None, interleaved=False, norm_eps=1e-6, weight_offset=0.0, round_once=False,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    num_kv_heads, head_dim = split_cache(kv_cache)[0].shape[2:]
    if bias is not None:
        qkv = (qkv.astype(np.float32) + bias.astype(np.float32)).astype(qkv.dtype)
    heads = qkv.reshape(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    query, key, value = np.split(heads, [num_heads, num_heads + num_kv_heads], axis=1)
    norm = {"eps": norm_eps, "weight_offset": weight_offset, "round_once": round_once}
    if q_norm_weight is not None:
        (query,) = rms_norm(query, q_norm_weight, **norm)
    if k_norm_weight is not None:
        (key,) = rms_norm(key, k_norm_weight, **norm)
    query, key = rotary_embedding(query, key, positions, table, interleaved=interleaved)
    slots = np.full(qkv.shape[0], -1, np.int64)
    slots[: len(slot_mapping)] = slot_mapping
    return query, reshape_and_cache(key, value, kv_cache, slots, k_scale=k_scale, v_scale=v_scale)
