"""The Llama of model.py as functions of JAX arrays: parameters are a dict of arrays, the caches a list.

What belongs together is multiplied together: q, k and v are one matrix, gate and up are another. Matrices are stored
[in, out], transposed from Hugging Face's.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xla_gpu.jax as xg

from .batch import StepLayout
from .checkpoint import hugging_face_names, safetensors
from .config import LlamaConfig

Parameters = dict[str, jax.Array]


def forward(
    config: LlamaConfig,
    layout: StepLayout,
    parameters: Parameters,
    caches: list[jax.Array],
    packed: jax.Array,
    previous: jax.Array,
) -> tuple[jax.Array, list[jax.Array]]:
    """Stores the K and V of a step's tokens in `caches` and chooses the next tokens.

    caches: a layer's T[num_pages, page_size, 2 * num_kv_heads, head_dim] each, K of head h at 2h, V at 2h + 1; packed:
    int32 [layout.size], see StepLayout; previous: int32 [max_seqs], what the step before chose.
    Returns int32 [max_seqs], of each sequence the most likely token after its last row, and the caches.
    """
    step = layout.unpack(packed)
    sources = step["sources"]
    tokens = jnp.where(sources < 0, step["tokens"], previous[jnp.maximum(sources, 0)])
    hidden = parameters["embed.weight"][tokens]
    cos, sin = jnp.moveaxis(parameters["rotations"][step["positions"]][:, None], -1, 0)
    updated = []
    for i, cache in enumerate(caches):
        layer = _Layer(config, parameters, f"layers.{i}.")
        attended, cache = layer.attention(layer.norm("attention_norm", hidden), cos, sin, cache, step)
        hidden = hidden + attended
        gate, up = jnp.split(layer.linear("gate_up", layer.norm("mlp_norm", hidden)), 2, axis=-1)
        hidden = hidden + layer.linear("down", jax.nn.silu(gate) * up)
        updated.append(cache)
    hidden = hidden[step["last_rows"]]  # the only rows whose logits anybody wants
    hidden = _Layer(config, parameters, "").norm("norm", hidden)
    head = parameters["embed.weight"].T if config.tie_word_embeddings else parameters["head.weight"]
    return jnp.argmax(hidden @ head, axis=-1).astype(jnp.int32), updated


class _Layer:
    """The parameters of one layer, by the names of model.py."""

    def __init__(self, config: LlamaConfig, parameters: Parameters, prefix: str):
        self.config = config
        self._parameters = parameters
        self._prefix = prefix

    def linear(self, name: str, x: jax.Array) -> jax.Array:
        out = x @ self._parameters[f"{self._prefix}{name}.weight"]
        bias = self._parameters.get(f"{self._prefix}{name}.bias")
        return out if bias is None else out + bias

    def norm(self, name: str, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.config.rms_norm_eps)
        return self._parameters[f"{self._prefix}{name}.weight"] * wide.astype(x.dtype)

    def attention(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, cache: jax.Array, step: dict[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        num_heads, num_kv_heads, head_dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        heads = self.linear("qkv", x).reshape(x.shape[0], num_heads + 2 * num_kv_heads, head_dim)
        query, key, value = jnp.split(heads, [num_heads, num_heads + num_kv_heads], axis=1)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        cache = xg.reshape_and_cache(key, value, cache, step["slots"])
        attended = xg.paged_attention(
            query,
            cache,
            step["context_lens"],
            step["block_tables"],
            step["query_start_loc"],
            step["num_seqs"],
            scale=head_dim**-0.5,
        )
        return self.linear("out", attended.reshape(x.shape[0], num_heads * head_dim)), cache


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


# ---- Parameters ------------------------------------------------------------------------------------------------------


def load(config: LlamaConfig, dtype: str, max_tokens: int, get: Callable[[str], Any]) -> Parameters:
    """Takes the parameters from `get`, which returns a checkpoint's tensor by name, as something NumPy can read.

    max_tokens: the longest sequence, in tokens; rotations are tabulated up to there.
    Raises ValueError for a tensor whose shape is not the model's.
    """
    shapes = _shapes(config)
    parameters = {}
    for name, parts in hugging_face_names(config).items():
        tensor = np.concatenate([np.asarray(get(part)) for part in parts])
        tensor = tensor.T if name in _matrices(shapes) else tensor
        if tensor.shape != shapes[name]:
            raise ValueError(f"{' + '.join(parts)}: expected {list(shapes[name])}, got {list(tensor.shape)}")
        parameters[name] = jax.device_put(tensor.astype(jnp.dtype(dtype)))
    return _with_rotations(parameters, config, max_tokens)


def load_checkpoint(config: LlamaConfig, dtype: str, max_tokens: int, folder: pathlib.Path) -> Parameters:
    """From `folder`: model.safetensors, or the shards that model.safetensors.index.json lists."""
    with safetensors(folder, "np") as get:
        return load(config, dtype, max_tokens, get)


def randomise(config: LlamaConfig, dtype: str, max_tokens: int, seed: int) -> Parameters:
    """Normal numbers of standard deviation 0.02, drawn on the device: nothing the size of a model crosses the host."""
    draw = jax.jit(lambda key, shape: jax.random.normal(key, shape, jnp.dtype(dtype)) * 0.02, static_argnums=1)
    parameters = {}
    for i, (name, shape) in enumerate(_shapes(config).items()):
        key = jax.random.fold_in(jax.random.key(seed), i)
        parameters[name] = jnp.ones(shape, dtype) if name.endswith("norm.weight") else draw(key, shape)
    return _with_rotations(parameters, config, max_tokens)


def _with_rotations(parameters: Parameters, config: LlamaConfig, max_tokens: int) -> Parameters:
    return {**parameters, "rotations": jax.device_put(rotation_table(config, max_tokens))}


def _shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    hidden, wide = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = {"qkv": (hidden, query + 2 * kv), "out": (query, hidden), "gate_up": (hidden, 2 * wide)}
    matrices |= {"down": (wide, hidden), "head": (hidden, config.vocab_size)}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in hugging_face_names(config):
        kind, what = name.split(".")[-2:]
        shape = (config.vocab_size, hidden) if kind == "embed" else matrices.get(kind, (hidden,))
        shapes[name] = shape if what == "weight" else shape[1:]
    return shapes


def _matrices(shapes: dict[str, tuple[int, ...]]) -> set[str]:
    """Those that are stored transposed."""
    return {name for name, shape in shapes.items() if len(shape) == 2 and name != "embed.weight"}
