"""Three steps of a two-layer model: each layer stores its new keys and values in place and attends over its cache.

test_in_place.py runs it in a process of its own, since XLA reads XLA_FLAGS once:

    python -m tests.frontends.in_place_program FRONTEND LAYOUT:OPERATOR ...

The operators: reshape_and_cache; rotary_and_cache, by which keys and values are turned by angles of 0; attention_block,
whose weights take query, key and value from x as they are; concat_and_cache_mla, with the layout "latents". (layout,
operator) pairs run one after the other.
"""

from __future__ import annotations

import sys

import numpy as np

from tests.common import cases, frontends, mla_cases, reference

LAYERS, STEPS = 2, 3
CASE = cases.AttentionCase("in-place", ((1, 30), (5, 21)), num_heads=4, num_kv_heads=2, page_size=8, head_dim=64)
OPTIONS = CASE.options()
LATENT_OPTIONS = {"scale": CASE.softmax_scale, "value_dim": CASE.head_dim}  # so that a result is a query


def build(layout: str):
    latents = layout == "latents"
    inputs = cases.build(CASE.but(layout="split" if latents else layout), poison=False)
    if latents:
        inputs.kv_cache = np.ascontiguousarray(inputs.kv_cache[0, :, :, 0])
    rng = cases.rng_for("in-place")
    shape = (CASE.num_tokens, CASE.num_kv_heads, CASE.head_dim)
    new = [[rng.standard_normal(shape).astype(np.float32) for _ in range(2 * LAYERS)] for _ in range(STEPS)]
    slots = np.full(CASE.num_tokens, -1, np.int32)
    for s, (q_len, context_len) in enumerate(CASE.sequences):
        first = int(inputs.query_start_loc[s])
        positions = np.arange(context_len - q_len, context_len)
        pages = inputs.block_tables[s, positions // CASE.page_size]
        slots[first : first + q_len] = pages * CASE.page_size + positions % CASE.page_size
    caches = [inputs.kv_cache.copy() for _ in range(LAYERS)]
    metadata = {k: v for k, v in inputs.arrays().items() if k not in ("query", "kv_cache")}
    return inputs.query, metadata, caches, slots, new


def expected(layout: str):
    query, metadata, caches, slots, new = build(layout)
    for step in new:
        x = query
        for layer in range(LAYERS):
            if layout == "latents":
                new_latents = latent_arguments(step[2 * layer], step[2 * layer + 1])
                caches[layer] = mla_cases.stored(*new_latents, caches[layer], slots)
                arrays = {"query": x.astype(np.float32), "kv_cache": caches[layer], **metadata}
                x, _ = mla_cases.expected(arrays, **LATENT_OPTIONS)
                continue
            caches[layer] = reference.reshape_and_cache(step[2 * layer], step[2 * layer + 1], caches[layer], slots)
            x, _ = reference.paged_attention(x.astype(np.float32), caches[layer], **metadata, **OPTIONS)
    return x, caches


def latent_arguments(key, value):
    """Latents and rotary keys of new tokens."""
    return key[:, 0, : CASE.head_dim - 16], value[:, 0, :16]


def qkv_arguments(numpy, x, key, value):
    """The arguments of rotary_and_cache before the cache, of `numpy`: torch or jax.numpy. It returns x as it is."""
    tokens = x.shape[0]
    qkv = numpy.concatenate([y.reshape(tokens, -1) for y in (x, key, value)], 1)
    half = CASE.head_dim // 2
    table = numpy.stack([numpy.ones_like(x[:1, 0, :half]), numpy.zeros_like(x[:1, 0, :half])], -1)
    return qkv, numpy.zeros_like(x[:, 0, 0], dtype=numpy.int32), table


def block_arguments(numpy, x, key, value):
    """The arguments of attention_block before the cache: x has key and value beside it, and weights pass them on."""
    qkv, positions, table = qkv_arguments(numpy, x, key, value)
    inner = CASE.num_heads * CASE.head_dim
    every = numpy.ones_like(qkv[:1, :1]) * numpy.ones_like(qkv[:1])  # [1, width]
    ones = (numpy.cumsum(every, 1)[0][:, None] == numpy.cumsum(every, 1)[0][None, :]) * every
    return qkv, ones, ones[:inner, :inner], positions, table


def run_torch(frontend, layout: str, operator: str = "reshape_and_cache"):
    import torch
    import torch_xla

    import xla_gpu.torch as ops
    from tests.common.arrays import to_torch

    query, metadata, caches, slots, new = build(layout)
    device = frontend.device()
    query, slots, *caches = (to_torch(x, device) for x in (query, slots, *caches))
    metadata = {k: to_torch(v, device) for k, v in metadata.items()}
    torch_xla.sync()

    def model(query, slots, caches, metadata, new):
        x = query
        for layer, cache in enumerate(caches):
            if operator == "attention_block":
                given = block_arguments(torch, x, new[2 * layer], new[2 * layer + 1])
                x = ops.attention_block_(*given, cache, slots, **metadata, **OPTIONS).reshape(x.shape)
                continue
            if operator == "concat_and_cache_mla":
                ops.concat_and_cache_mla_(*latent_arguments(new[2 * layer], new[2 * layer + 1]), cache, slots)
                x = ops.mla_attention(x, cache, **metadata, **LATENT_OPTIONS)
                continue
            if operator == "rotary_and_cache":
                x = ops.rotary_and_cache_(*qkv_arguments(torch, x, new[2 * layer], new[2 * layer + 1]), cache, slots)
            else:
                ops.reshape_and_cache_(new[2 * layer], new[2 * layer + 1], cache, slots)
            x = ops.paged_attention(x, cache, **metadata, **OPTIONS)
        return x

    if frontend.name.endswith("-compiled"):
        torch._dynamo.reset()
        model = torch.compile(model, backend="openxla", fullgraph=True)
    with torch.no_grad():
        for step in new:
            new_tensors = [to_torch(x, device) for x in step]
            torch_xla.sync()
            x = model(query, slots, caches, metadata, new_tensors)
            torch_xla.sync()
    return x.cpu().numpy(), [c.cpu().numpy() for c in caches]


def run_jax(frontend, layout: str, donate: bool, operator: str = "reshape_and_cache"):
    import jax
    import jax.numpy as jnp

    import xla_gpu.jax as ops

    query, metadata, caches, slots, new = jax.device_put(build(layout), frontend.device())

    def model(caches, query, slots, metadata, new):
        x, updated = query, []
        for layer, cache in enumerate(caches):
            if operator == "attention_block":
                given = block_arguments(jnp, x, new[2 * layer], new[2 * layer + 1])
                out, cache = ops.attention_block(*given, cache, slots, **metadata, **OPTIONS)
                x = out.reshape(x.shape)
                updated.append(cache)
                continue
            if operator == "concat_and_cache_mla":
                cache = ops.concat_and_cache_mla(*latent_arguments(new[2 * layer], new[2 * layer + 1]), cache, slots)
                x = ops.mla_attention(x, cache, **metadata, **LATENT_OPTIONS)
                updated.append(cache)
                continue
            if operator == "rotary_and_cache":
                x, cache = ops.rotary_and_cache(
                    *qkv_arguments(jnp, x, new[2 * layer], new[2 * layer + 1]), cache, slots
                )
            else:
                cache = ops.reshape_and_cache(new[2 * layer], new[2 * layer + 1], cache, slots)
            x = ops.paged_attention(x, cache, **metadata, **OPTIONS)
            updated.append(cache)
        return x, updated

    model = jax.jit(model, donate_argnums=(0,) if donate else ())
    for step in new:
        x, caches = model(caches, query, slots, metadata, step)
    return np.asarray(x), [np.asarray(c) for c in caches]


def run_torchax(frontend, layout: str):
    import jax
    import torchax.interop

    ops = frontend.module()
    query, metadata, caches, slots, new = torchax.interop.torch_view(jax.device_put(build(layout), frontend.device()))

    def model(caches, query, slots, metadata, new):
        x = query
        for layer, cache in enumerate(caches):
            ops.reshape_and_cache_(new[2 * layer], new[2 * layer + 1], cache, slots)
            x = ops.paged_attention(x, cache, **metadata, **OPTIONS)
        return x, caches

    model = torchax.interop.jax_jit(model, {"donate_argnums": (0,)})
    with torchax.default_env():
        for step in new:
            x, caches = model(caches, query, slots, metadata, step)
    return np.asarray(x.jax()), [np.asarray(c.jax()) for c in caches]


def run(name: str, layout: str, operator: str) -> None:
    frontend = frontends.ALL[name.removesuffix("-without-donation")]
    if frontend.framework == "jax":
        x, caches = run_jax(frontend, layout, donate=not name.endswith("-without-donation"), operator=operator)
    elif frontend.framework == "torchax":
        assert operator == "reshape_and_cache", operator
        x, caches = run_torchax(frontend, layout)
    else:
        x, caches = run_torch(frontend, layout, operator)
    want_x, want_caches = expected(layout)
    np.testing.assert_allclose(x, want_x, atol=1e-4)
    for cache, want in zip(caches, want_caches, strict=True):
        np.testing.assert_array_equal(cache, want)


def main(name: str, *runs: str) -> None:
    for layout, operator in (pair.split(":") for pair in runs):
        run(name, layout, operator)


if __name__ == "__main__":
    main(*sys.argv[1:])
