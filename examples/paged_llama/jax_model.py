"""The Llama of model.py as functions of JAX arrays: parameters are a dict of arrays, the caches a list.

What belongs together is multiplied together: q, k and v are one matrix, gate and up are another. Matrices are stored
[in, out], transposed from Hugging Face's; with StepOptions.features_first [out, in]. Over several devices each holds
its heads, its part of the MLP and of the vocabulary; what one of them holds stands together: its q, k and v, and its
gate and up.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import xla_gpu.jax as xg

from .batch import StepLayout
from .config import LlamaConfig
from .options import StepOptions, of_step, usable

Parameters = dict[str, jax.Array]
ROW_PARALLEL = ("out", "down")  # over several devices these are divided along their inputs, the others along outputs


def forward(
    config: LlamaConfig,
    layout: StepLayout,
    group: xg.DeviceGroup | None,
    parameters: Parameters,
    caches: list[jax.Array],
    packed: jax.Array,
    previous: jax.Array,
    *,
    options: StepOptions | None = None,
) -> tuple[jax.Array, list[jax.Array]]:
    """Stores the K and V of a step's tokens in `caches` and chooses the next tokens.

    group: the devices over which the model is divided, which call this in jax.shard_map with their shards; None: one.
    caches: a layer's T[num_pages, page_size, 2 * num_kv_heads, head_dim] each, K of head h at 2h, V at 2h + 1; packed:
    int32 [layout.size], see StepLayout; previous: int32 [max_seqs], what the step before chose.
    Returns int32 [max_seqs], of each sequence the token chosen after its last row, and the caches.
    """
    options = options or StepOptions()
    options = dataclasses.replace(options, operators=of_step(options.operators, layout.num_tokens))
    step = layout.unpack(packed)
    sources = step["sources"]
    tokens = jnp.where(sources < 0, step["tokens"], previous[jnp.maximum(sources, 0)])
    total = parameters["embed.weight"][tokens]
    if in_halves(layout.num_tokens, group, options):
        hidden, updated = _layers_in_halves(config, group, options, parameters, caches, total, step)
    else:
        hidden, total, updated = _layers(config, group, options, parameters, caches, total, step)
    # Of the last rows alone: the others' logits are not used.
    model, last = _Layer(config, group, options, parameters, ""), step["last_rows"]
    hidden = model.norm("norm", total[last]) if hidden is None else hidden[last]
    logits = model.linear("embed" if group is None and config.tie_word_embeddings else "head", hidden)
    if options.temperature > 0 or (group is None and "sample" in options.operators):
        return _sample(logits, config.vocab_size, group, options, step), updated
    return _most_likely(logits, config.vocab_size, group), updated


def _layers(
    config: LlamaConfig,
    group: xg.DeviceGroup | None,
    options: StepOptions,
    parameters: Parameters,
    caches: list[jax.Array],
    total: jax.Array,
    step: dict[str, jax.Array],
) -> tuple[jax.Array | None, jax.Array, list[jax.Array]]:
    """From the embedding of all rows: the norm of the residual stream, if it was made, the stream, and the caches."""
    updated = []
    hidden = None  # the norm of total, where the part before has made it
    for i, cache in enumerate(caches):
        layer = _Layer(config, group, options, parameters, f"layers.{i}.")
        if layer.uses("attention_block"):
            hidden, (total, cache) = None, layer.attention_block(total, cache, step)
        else:
            hidden = layer.norm("attention_norm", total) if hidden is None else hidden
            attended, cache = layer.attention(hidden, cache, step)
            hidden, total = layer.add_and_norm(attended, total, f"layers.{i}.mlp_norm")
        updated.append(cache)
        if layer.uses("gated_mlp"):
            hidden, total = None, layer.gated_mlp(total)
            continue
        hidden = layer.norm("mlp_norm", total) if hidden is None else hidden
        activated = layer.activation(layer.linear("gate_up", hidden))
        after = f"layers.{i + 1}.attention_norm" if i + 1 < len(caches) else "norm"
        hidden, total = layer.add_and_norm(layer.linear("down", activated), total, after)
    return hidden, total, updated


def in_halves(rows: int, group: xg.DeviceGroup | None, options: StepOptions) -> bool:
    """Whether a step of so many rows over two devices is computed in halves, whose sums run beside products."""
    if group is None or group.size != 2 or rows < options.overlap_rows or jax.__version_info__ < (0, 10, 2):
        return False
    # XLA copies to another GPU's memory where one process has both.
    on_cpu = group.mesh.devices.flat[0].platform == "cpu"
    return on_cpu or (group.uses_peer_memory and jax.process_count() == 1)


def _layers_in_halves(
    config: LlamaConfig,
    group: xg.DeviceGroup | None,
    options: StepOptions,
    parameters: Parameters,
    caches: list[jax.Array],
    total: jax.Array,
    step: dict[str, jax.Array],
) -> tuple[jax.Array, list[jax.Array]]:
    """The same of many rows over two devices, computed in two halves: while one half's sum is on its way, the other
    half is multiplied."""
    half = total.shape[0] // 2 // 128 * 128 or total.shape[0] // 2  # products take the time of multiples of 128 rows
    totals = jnp.split(total, [half])
    products: list[jax.Array] = []  # that are to be summed
    last = total  # product

    def after_last(x: jax.Array) -> jax.Array:
        """x, behind the product before: so XLA has the products in this order."""
        return jax.lax.optimization_barrier((x, last))[0]

    updated = []
    for i, cache in enumerate(caches):
        layer = _Layer(config, group, options, parameters, f"layers.{i}.")
        projected = []
        for j in range(2):
            if i == 0:
                hidden = layer.norm("attention_norm", totals[j])
            else:
                rows = after_last(totals[j])
                hidden, totals[j] = layer.exchange_and_norm(products[j], rows, f"layers.{i}.attention_norm")
            last = layer.linear("qkv", hidden)
            projected.append(last)
        attended, cache = layer.attend(jnp.concatenate(projected), cache, step)
        updated.append(cache)
        products = []
        for rows in jnp.split(attended, [half]):
            last = layer.linear("out", after_last(rows))
            products.append(last)
        for j in range(2):
            rows = after_last(totals[j])
            hidden, totals[j] = layer.exchange_and_norm(products[j], rows, f"layers.{i}.mlp_norm")
            last = layer.linear("down", layer.activation(layer.linear("gate_up", hidden)))
            products[j] = last
    model = _Layer(config, group, options, parameters, "")
    pairs = [model.exchange_and_norm(*pair, "norm") for pair in zip(products, totals, strict=True)]
    return jnp.concatenate([hidden for hidden, _ in pairs]), updated


def _sample(
    logits: jax.Array,
    vocab_size: int,
    group: xg.DeviceGroup | None,
    options: StepOptions,
    step: dict[str, jax.Array],
) -> jax.Array:
    """int32 [rows]: a token of each row by its own random numbers; every device chooses the same."""
    if group is not None:
        logits = jax.lax.all_gather(logits, group.axis, axis=1, tiled=True)[:, :vocab_size]
    rows = logits.shape[:1]
    token, _ = xg.sample(
        logits,
        temperature=jnp.full(rows, options.temperature, jnp.float32),
        top_k=jnp.full(rows, options.top_k, jnp.int32),
        top_p=jnp.full(rows, options.top_p, jnp.float32),
        min_p=jnp.full(rows, options.min_p, jnp.float32),
        seed=step["requests"] + options.seed,
        step=step["choices"],
    )
    return token


def _most_likely(logits: jax.Array, vocab_size: int, group: xg.DeviceGroup | None) -> jax.Array:
    """int32 [rows]: the index of each row's largest logit, over the devices' parts of the vocabulary."""
    if group is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    rank, width = jax.lax.axis_index(group.axis), logits.shape[-1]
    if vocab_size % group.size:
        logits = jnp.where(rank * width + jnp.arange(width) < vocab_size, logits, -jnp.inf)
    chosen = jnp.argmax(logits, axis=-1)
    # Every device sends its best as float32, in which an index below 2 ** 24 is exact; a sum with zeros gathers them.
    best = jnp.stack([jnp.max(logits, axis=-1).astype(jnp.float32), chosen + rank * width])
    every = xg.all_reduce(jnp.zeros((group.size, *best.shape), jnp.float32).at[rank].set(best), group=group)
    return jnp.take_along_axis(every[:, 1], jnp.argmax(every[:, 0], axis=0)[None], axis=0)[0].astype(jnp.int32)


class _Layer:
    """The parameters of one layer, by the names of model.py: those of this device."""

    def __init__(
        self,
        config: LlamaConfig,
        group: xg.DeviceGroup | None,
        options: StepOptions,
        parameters: Parameters,
        prefix: str,
    ):
        self.config = config
        self._group = group
        self._operators = usable(options.operators, config)
        self._features_first = options.features_first and group is None
        self._parameters = parameters
        self._prefix = prefix

    def uses(self, operator: str) -> bool:
        """Whether the model calls an operator that is for one device."""
        return self._group is None and operator in self._operators

    def _projection(self, name: str) -> dict[str, jax.Array | None]:
        """The operands of a projection, by the names of attention_block and gated_mlp."""
        parts = ("weight", "scale", "zero_point", "bias")
        return {f"{name}_{part}": self._parameters.get(f"{self._prefix}{name}.{part}") for part in parts}

    def linear(self, name: str, x: jax.Array) -> jax.Array:
        weight, scale, zero_point, bias = self._projection(name).values()
        # linear takes multiples of 16 alone; a vocabulary may have any size.
        if scale is not None or (self.uses("linear") and not any(size % 16 for size in weight.shape)):
            return xg.linear(x, weight, weight_scale=scale, weight_zero_point=zero_point, bias=bias)
        out = x @ (weight.T if self._features_first or name == "embed" else weight)
        if bias is None:
            return out
        if self._group is not None and name in ROW_PARALLEL:  # the devices' results will be added up
            bias = jnp.where(jax.lax.axis_index(self._group.axis) == 0, bias, 0)
        return out + bias

    def norm(self, name: str, x: jax.Array) -> jax.Array:
        return self._norm(self._parameters[f"{self._prefix}{name}.weight"], x)

    def _norm(self, weight: jax.Array, x: jax.Array) -> jax.Array:
        if "rms_norm" in self._operators:
            return xg.rms_norm(x, weight, eps=self.config.rms_norm_eps)
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.config.rms_norm_eps)
        return weight * wide.astype(x.dtype)

    def add_and_norm(self, x: jax.Array, total: jax.Array, norm: str) -> tuple[jax.Array, jax.Array]:
        """Adds x, summed over the devices, to the residual stream: the next layer's input, and the stream."""
        weight = self._parameters[f"{norm}.weight"]
        if self._group is not None:
            return xg.all_reduce_add_rms_norm(x, total, weight, eps=self.config.rms_norm_eps, group=self._group)
        if "rms_norm" in self._operators:
            return xg.rms_norm(x, weight, eps=self.config.rms_norm_eps, residual=total)
        total = total + x
        return self._norm(weight, total), total

    def exchange_and_norm(self, x: jax.Array, total: jax.Array, norm: str) -> tuple[jax.Array, jax.Array]:
        """The same of two devices, each of which sends the other its part: XLA does that beside other work."""
        assert self._group is not None
        total = x + jax.lax.ppermute(x, self._group.axis, [(0, 1), (1, 0)]) + total
        return self._norm(self._parameters[f"{norm}.weight"], total), total

    def attention_block(
        self, total: jax.Array, cache: jax.Array, step: dict[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """The residual stream behind the layer's attention, and the cache."""
        return xg.attention_block(
            total,
            kv_cache=cache,
            positions=step["positions"],
            table=self._parameters["rotations"],
            slot_mapping=step["slots"],
            **{name: step[name] for name in ("context_lens", "block_tables", "query_start_loc", "num_seqs")},
            scale=self.config.head_dim**-0.5,
            norm_weight=self._parameters[f"{self._prefix}attention_norm.weight"],
            residual=total,
            eps=self.config.rms_norm_eps,
            **self._projection("qkv"),
            **self._projection("out"),
        )

    def gated_mlp(self, total: jax.Array) -> jax.Array:
        """The residual stream behind the layer's MLP."""
        return xg.gated_mlp(
            total,
            norm_weight=self._parameters[f"{self._prefix}mlp_norm.weight"],
            residual=total,
            eps=self.config.rms_norm_eps,
            **self._projection("gate_up"),
            **self._projection("down"),
        )

    def activation(self, gate_up: jax.Array) -> jax.Array:
        if "silu_and_mul" in self._operators:
            return xg.silu_and_mul(gate_up)
        gate, up = jnp.split(gate_up, 2, axis=-1)
        return jax.nn.silu(gate) * up

    def attention(self, x: jax.Array, cache: jax.Array, step: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        attended, cache = self.attend(self.linear("qkv", x), cache, step)
        return self.linear("out", attended), cache

    def attend(self, qkv: jax.Array, cache: jax.Array, step: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        ranks = 1 if self._group is None else self._group.size
        num_heads, num_kv_heads = self.config.num_heads // ranks, self.config.num_kv_heads // ranks
        head_dim = self.config.head_dim
        rotations = self._parameters["rotations"]
        metadata = {name: step[name] for name in ("context_lens", "block_tables", "query_start_loc", "num_seqs")}
        chained = "rotary_and_attention" in self._operators
        if chained and (self._group is None or "rotary_and_cache" not in self._operators):
            return xg.attention_block(
                qkv, None, None, step["positions"], rotations, cache, step["slots"], **metadata, scale=head_dim**-0.5
            )
        if "rotary_and_cache" in self._operators:
            query, cache = xg.rotary_and_cache(qkv, step["positions"], rotations, cache, step["slots"])
        else:
            heads = qkv.reshape(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
            query, key, value = jnp.split(heads, [num_heads, num_heads + num_kv_heads], axis=1)
            cos, sin = jnp.moveaxis(rotations[step["positions"]][:, None], -1, 0)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
            cache = xg.reshape_and_cache(key, value, cache, step["slots"])
        attended = xg.paged_attention(query, cache, **metadata, scale=head_dim**-0.5)
        return attended.reshape(qkv.shape[0], num_heads * head_dim), cache


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding of x [num_tokens, heads, head_dim]: element i turns with element i + head_dim / 2."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def rotation_table(config: LlamaConfig, num_positions: int) -> np.ndarray:
    """float32 [num_positions, head_dim / 2, 2]: cosine and sine of each position's angles, made on the host.

    Frequencies are rounded to float32 after each operation, as transformers rounds them: one ulp in a frequency is a
    visible angle after a few thousand positions.
    """
    one = np.float32(1)
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = one / np.float32(config.rope_theta) ** exponents
    if (scaling := config.rope_scaling) is not None:
        factor = np.float32(scaling["factor"])
        if scaling["rope_type"] == "linear":
            frequencies = frequencies / factor
        else:
            # Llama 3: wavelengths beyond the original context are stretched, short ones kept, the ones between mixed.
            low, high = np.float32(scaling["low_freq_factor"]), np.float32(scaling["high_freq_factor"])
            wavelengths = np.float32(2 * np.pi) / frequencies
            kept = (np.float32(scaling["original_max_position_embeddings"]) / wavelengths - low) / (high - low)
            kept = np.clip(kept, 0, one)
            frequencies = (one - kept) * frequencies / factor + kept * frequencies
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * frequencies
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1)
