"""A decode step of a Llama as a JAX program, tensor parallel over a mesh axis "tp"; decode_step.py measures it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import xla_gpu.jax as xg

P = jax.sharding.PartitionSpec
T = jnp.bfloat16
PAGE_SIZE = 16
MAX_CONTEXT = 8192
EPS = 1e-5
SHAPES = {  # hidden, intermediate, layers, vocabulary, heads, kv heads, head_dim
    "llama3-8b": (4096, 14336, 32, 128256, 32, 8, 128),
    "llama3-70b": (8192, 28672, 80, 128256, 64, 8, 128),
    "tiny": (256, 512, 2, 512, 8, 4, 32),
}
Weights = dict[str, Any]
Weight = dict[str, jax.Array]  # weight, and scale where it is quantised


def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + EPS)
    return (wide * scale).astype(x.dtype) * weight


def rotations(head_dim: int) -> np.ndarray:
    """float32 [MAX_CONTEXT, head_dim / 2, 2]: cosines and sines."""
    frequencies = 500000.0 ** (-np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    angles = np.arange(MAX_CONTEXT, dtype=np.float32)[:, None] * frequencies
    return np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    head_dim = x.shape[-1]
    frequencies = 500000.0 ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions[:, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


# How a sublayer's partial sums become the next one's input: (partial, residual, weight) -> (normed, residual).
Join = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
# What every rank has of a few float32 numbers, by rank: (numbers) -> [ranks, *numbers.shape].
Gather = Callable[[jax.Array], jax.Array]


def exchanged_sum(x: jax.Array, group: xg.DeviceGroup) -> jax.Array:
    """The sum over the ranks: each sums its share of the rows, in the order of ranks, and sends it to all.

    Of more than two ranks, x must have a multiple of their number of rows.
    """
    size, axis = group.size, group.axis
    if size == 2:
        return x + jax.lax.ppermute(x, axis, [(0, 1), (1, 0)])
    rank = jax.lax.axis_index(axis)
    shares = x.reshape(size, -1, x.shape[1])
    at = [(rank + i) % size for i in range(size)]
    sent = [
        jax.lax.ppermute(shares[at[i]], axis, [(r, (r + i) % size) for r in range(size)]) if i else shares[rank]
        for i in range(size)
    ]  # element i: of rank - i
    of_ranks = jnp.zeros(shares.shape, x.dtype)
    for i, share in enumerate(sent):
        of_ranks = of_ranks.at[(rank - i) % size].set(share)
    own = jnp.sum(of_ranks.astype(jnp.float32), 0).astype(x.dtype)
    total = jnp.zeros(shares.shape, x.dtype).at[rank].set(own)
    for i in range(1, size):
        total = total.at[(rank - i) % size].set(jax.lax.ppermute(own, axis, [(r, (r + i) % size) for r in range(size)]))
    return total.reshape(x.shape)


# Over several devices.
JOINS = ("psum", "exchange", "all_reduce", "all_reduce_add_rms_norm")


def joins(group: xg.DeviceGroup | None) -> dict[str, Join]:
    """By name: the sum over the ranks, its sum with the residual, and the norm of that."""
    if group is None:

        def alone(x: jax.Array, residual: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
            total = x + residual
            return norm(total, weight), total

        return {"one": alone}

    def with_psum(x: jax.Array, residual: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = jax.lax.psum(x, group.axis) + residual
        return norm(total, weight), total

    def with_exchange(x: jax.Array, residual: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = exchanged_sum(x, group) + residual
        return norm(total, weight), total

    def with_all_reduce(x: jax.Array, residual: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = xg.all_reduce(x, group=group) + residual
        return norm(total, weight), total

    def fused(x: jax.Array, residual: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        return xg.all_reduce_add_rms_norm(x, residual, weight, eps=EPS, group=group)

    return dict(zip(JOINS, (with_psum, with_exchange, with_all_reduce, fused), strict=True))


def gathers(group: xg.DeviceGroup | None, name: str) -> Gather | None:
    if group is None:
        return None
    if name == "psum":
        return functools.partial(jax.lax.all_gather, axis_name=group.axis)

    def by_sum(numbers: jax.Array) -> jax.Array:
        places = jnp.zeros((group.size, *numbers.shape), numbers.dtype)
        # A sum with zeros is exact; so the program holds no collective of XLA's, at which its threads would meet.
        return xg.all_reduce(places.at[jax.lax.axis_index(group.axis)].set(numbers), group=group)

    return by_sum


def most_likely(logits: jax.Array, axis: str | None, gather: Gather | None) -> jax.Array:
    """int32 [batch]: of each row the index of the largest logit over the ranks' parts of the vocabulary."""
    chosen = jnp.argmax(logits, -1).astype(jnp.int32)
    if gather is None:
        return chosen
    chosen += jax.lax.axis_index(axis) * logits.shape[-1]
    # Below 2 ** 24 an index is exact in float32.
    every = gather(jnp.stack([jnp.max(logits, -1).astype(jnp.float32), chosen.astype(jnp.float32)]))
    return jnp.take_along_axis(every[:, 1], jnp.argmax(every[:, 0], 0)[None], 0)[0].astype(jnp.int32)


def times(x: jax.Array, weight: Weight, linear: bool = False) -> jax.Array:
    """x @ weight.T: weights are [out, in], as checkpoints store them. With [in, out] and a single row XLA writes the
    products of all elements to memory and adds them up in a second kernel."""
    if linear or "scale" in weight:
        return xg.linear(x, weight["weight"], weight_scale=weight.get("scale"))
    return jax.lax.dot_general(x, weight["weight"], (((1,), (1,)), ((), ())))


def projections(layer: dict[str, Weight], *names: str) -> dict[str, jax.Array]:
    """The weights and scales of these products by the names of attention_block and gated_mlp."""
    return {f"{name}_{part}": value for name in names for part, value in layer[name].items()}


class Options(NamedTuple):
    fused: bool  # rotary_and_cache and silu_and_mul
    linear: bool  # products of plain weights too
    blocks: bool = False  # attention_block and gated_mlp, on each device's shard
    parts: int = 1  # of the rows: the sum over the ranks of one beside the products of the next


def layers_in_parts(
    parts: int,
    join: Join,
    product: Callable[[jax.Array, Weight], jax.Array],
    attend: Callable[[jax.Array, jax.Array], jax.Array],
    mlp: Callable[[dict[str, Weight], jax.Array], jax.Array],
    weights: Weights,
    caches: list[jax.Array],
    residual: jax.Array,
) -> jax.Array:
    """All layers; the rows of a prefill are in parts: while a part's sum over the ranks is on its way, another part is
    multiplied."""
    residuals, partials = jnp.split(residual, parts), []
    last = residual  # product

    def after_last(x: jax.Array) -> jax.Array:
        """x, behind the product before: so XLA has the products in this order."""
        return jax.lax.optimization_barrier((x, last))[0]

    for i, (layer, cache) in enumerate(zip(weights["layers"], caches, strict=True)):
        projected = []
        for j in range(parts):
            if i:
                hidden, residuals[j] = join(partials[j], after_last(residuals[j]), weights["norms"][2 * i])
            else:
                hidden = norm(residuals[j], weights["norms"][0])
            last = product(hidden, layer["qkv"])
            projected.append(last)
        attended = attend(jnp.concatenate(projected), cache)
        partials = []
        for rows in jnp.split(attended, parts):
            last = product(after_last(rows), layer["out"])
            partials.append(last)
        for j in range(parts):
            hidden, residuals[j] = join(partials[j], after_last(residuals[j]), weights["norms"][2 * i + 1])
            last = mlp(layer, hidden)
            partials[j] = last
    pairs = zip(partials, residuals, strict=True)
    return jnp.concatenate([join(partial, rows, weights["norms"][-1])[0] for partial, rows in pairs])


def step(
    join: Join,
    gather: Gather | None,
    options: Options,
    heads: tuple[int, int, int],
    axis: str | None,
    weights: Weights,
    caches: list[jax.Array],
    tokens: jax.Array,
    context_lens: jax.Array,
    tables: jax.Array,
    query_start_loc: jax.Array,
    num_seqs: jax.Array,
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """One token of each sequence; a device's weights and heads are its shard's. Returns caches, tokens, lengths. With
    several tokens of each sequence, a prefill, tokens and lengths are such that the next call does the same."""
    num_heads, num_kv_heads, head_dim = heads
    batch, rows = tables.shape[0], tokens.shape[0]
    new = rows // batch
    product = functools.partial(times, linear=options.linear)
    lengths = context_lens + new
    positions = (context_lens[:, None] + jnp.arange(new, dtype=jnp.int32)).reshape(rows)
    slots = tables[jnp.arange(rows) // new, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    residual = weights["embed"][tokens]
    hidden = norm(residual, weights["norms"][0])
    stored = []

    def attend(qkv: jax.Array, cache: jax.Array) -> jax.Array:
        if options.fused:
            query, cache = xg.rotary_and_cache(qkv, positions, weights["rotations"], cache, slots)
        else:
            cuts = [num_heads * head_dim, (num_heads + num_kv_heads) * head_dim]
            query, key, value = (t.reshape(rows, -1, head_dim) for t in jnp.split(qkv, cuts, 1))
            query, key = rotate(query, positions), rotate(key, positions)
            cache = xg.reshape_and_cache(key, value, cache, slots)
        stored.append(cache)
        attended = xg.paged_attention(query, cache, lengths, tables, query_start_loc, num_seqs, scale=head_dim**-0.5)
        return attended.reshape(rows, -1)

    def mlp(layer: dict[str, Weight], x: jax.Array) -> jax.Array:
        gate_up = product(x, layer["gate_up"])
        if options.fused:
            return product(xg.silu_and_mul(gate_up), layer["down"])
        gate, up = jnp.split(gate_up, 2, 1)
        return product(jax.nn.silu(gate) * up, layer["down"])

    if options.parts > 1:
        hidden = layers_in_parts(options.parts, join, product, attend, mlp, weights, caches, residual)
    for i, (layer, cache) in enumerate(zip(weights["layers"], caches, strict=True) if options.parts == 1 else ()):
        if options.blocks:
            partial, cache = xg.attention_block(
                hidden,
                positions=positions,
                table=weights["rotations"],
                kv_cache=cache,
                slot_mapping=slots,
                context_lens=lengths,
                block_tables=tables,
                query_start_loc=query_start_loc,
                num_seqs=num_seqs,
                scale=head_dim**-0.5,
                **projections(layer, "qkv", "out"),
            )
            stored.append(cache)
            hidden, residual = join(partial, residual, weights["norms"][2 * i + 1])
            partial = xg.gated_mlp(hidden, **projections(layer, "gate_up", "down"))
            hidden, residual = join(partial, residual, weights["norms"][2 * i + 2])
            continue
        partial = product(attend(product(hidden, layer["qkv"]), cache), layer["out"])
        hidden, residual = join(partial, residual, weights["norms"][2 * i + 1])
        hidden, residual = join(mlp(layer, hidden), residual, weights["norms"][2 * i + 2])
    hidden = hidden.reshape(batch, new, -1)[:, -1]
    chosen = most_likely(product(hidden, weights["head"]), axis, gather)
    return stored, *((chosen, lengths) if new == 1 else (tokens.at[:batch].set(chosen), context_lens))


def on_all(mesh: jax.sharding.Mesh, x: np.ndarray) -> jax.Array:
    """A copy on each device. An argument that lies on one device is copied to the others by Python at every call of a
    jitted function over several: some 30 to 60 microseconds of the host's time each."""
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, P()))


SPECS = {"qkv": P("tp", None), "out": P(None, "tp"), "gate_up": P("tp", None), "down": P(None, "tp")}
CACHE_SPEC = P(None, None, "tp", None)


def make_weights(
    shape: tuple[int, ...], mesh: jax.sharding.Mesh, weight_format: str = "bfloat16"
) -> tuple[Weights, Weights, int]:
    """Random weights drawn shard by shard on their devices, their specs, and their bytes. Rows of a shard's qkv and
    gate_up stand together: its own q, k and v, and its own gate and up. In float8 with a scale for each row; the head
    stays bfloat16."""
    hidden, intermediate, layers, vocabulary, heads, kv_heads, head_dim = shape
    total = 0

    @functools.cache
    def maker(dims: tuple[int, ...], spec: jax.sharding.PartitionSpec, dtype: Any) -> Callable[[jax.Array], jax.Array]:
        sharding = jax.sharding.NamedSharding(mesh, spec)
        spread = 0.02 if dtype == T else 1.0
        return jax.jit(lambda key: (jax.random.normal(key, dims, T) * spread).astype(dtype), out_shardings=sharding)

    def make(seed: int, dims: tuple[int, ...], spec: jax.sharding.PartitionSpec, quantised: bool = False) -> Weight:
        nonlocal total
        dtype = jnp.float8_e4m3fn if quantised else T
        total += dtype.dtype.itemsize * int(np.prod(dims))
        made = {"weight": maker(dims, spec, dtype)(jax.random.PRNGKey(seed))}
        if quantised:
            sharding = jax.sharding.NamedSharding(mesh, P(spec[0]))
            made["scale"] = jax.device_put(np.full(dims[0], 0.02, np.float32), sharding)
        return made

    def specs_of(spec: jax.sharding.PartitionSpec, quantised: bool = False) -> Weights:
        return {"weight": spec, "scale": P(spec[0])} if quantised else {"weight": spec}

    sizes = {
        "qkv": ((heads + 2 * kv_heads) * head_dim, hidden),
        "out": (hidden, heads * head_dim),
        "gate_up": (2 * intermediate, hidden),
        "down": (hidden, intermediate),
    }
    float8 = weight_format == "float8"
    blocks = [
        {n: make(10 * i + j, d, SPECS[n], float8) for j, (n, d) in enumerate(sizes.items())} for i in range(layers)
    ]
    weights: Weights = {"layers": blocks, "head": make(1, (vocabulary, hidden), P("tp", None))}
    read = total  # of the embedding only some rows are
    weights["embed"] = make(2, (vocabulary, hidden), P())["weight"]
    weights["norms"] = [on_all(mesh, np.ones(hidden, T)) for _ in range(2 * layers + 1)]
    weights["rotations"] = on_all(mesh, rotations(head_dim))
    specs = {
        "rotations": P(),
        "layers": [{n: specs_of(SPECS[n], float8) for n in sizes} for _ in range(layers)],
        "head": specs_of(P("tp", None)),
        "embed": P(),
        "norms": [P()] * (2 * layers + 1),
    }
    return weights, specs, read
