"""The parameters of jax_model.py on the devices of a mesh: from a checkpoint's files, from a model, or random ones.

Each device gets its shard alone, and one shard is in the host's memory at a time: a model may be larger than a device.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_gpu import quantization

from .checkpoint import hugging_face_names, safetensors
from .config import LlamaConfig
from .jax_model import ROW_PARALLEL, Parameters, rotation_table

AXIS = "tp"  # of the mesh
P = jax.sharding.PartitionSpec
CACHE_SPEC = P(None, None, AXIS, None)


def make_mesh(devices: int) -> jax.sharding.Mesh:
    """The first so many devices. Raises ValueError where there are fewer."""
    there = jax.devices()
    if len(there) < devices:
        raise ValueError(
            f"--tensor-parallel: expected at most {len(there)}, the {there[0].platform} devices, got {devices}"
        )
    return jax.sharding.Mesh(np.array(there[:devices]), (AXIS,))


def specs(config: LlamaConfig, devices: int) -> dict[str, jax.sharding.PartitionSpec]:
    """Of each parameter the dimension that the devices divide."""
    result = {"rotations": P()}
    for name in _names(config, devices):
        axis = _divided(name)
        result[name] = P() if axis is None else P(*(AXIS if i == axis else None for i in range(axis + 1)))
    return result


def load(
    config: LlamaConfig, dtype: str, max_tokens: int, get: Callable[[str], Any], mesh: jax.sharding.Mesh | None = None
) -> Parameters:
    """Takes the parameters from `get`, which returns a checkpoint's tensor by name, or what reads parts of one.

    max_tokens: the longest sequence, in tokens; rotations are tabulated up to there. mesh: default the first device.
    Raises ValueError for a tensor whose shape is not the model's.
    """
    mesh = make_mesh(1) if mesh is None else mesh
    shapes, placed = _shapes(config, mesh.size), specs(config, mesh.size)
    parameters = {}
    for name, parts in _names(config, mesh.size).items():
        tensors = [get(part) for part in parts]
        divided, transposed = _divided(name), _is_transposed(name, shapes[name])
        whole = (shapes[name][0], config.vocab_size) if name == "head.weight" else shapes[name]
        stored = tuple(reversed(whole)) if transposed else whole
        got = (sum(_shape(t)[0] for t in tensors), *_shape(tensors[0])[1:])
        if got != stored:
            raise ValueError(
                f"{' + '.join(parts)}: expected {list(whole)}, got {list(reversed(got) if transposed else got)}"
            )
        axis = None if divided is None else len(stored) - 1 - divided if transposed else divided

        def shard(rank: int, name=name, tensors=tensors, axis=axis, transposed=transposed) -> np.ndarray:
            pieces = [np.asarray(t[_part(_shape(t), axis, rank, mesh.size)]) for t in tensors]
            piece = np.concatenate(pieces).astype(jnp.dtype(dtype))
            if name == "head.weight":  # zeros behind the vocabulary's end
                piece = np.pad(piece, ((0, shapes[name][1] // mesh.size - piece.shape[0]), (0, 0)))
            return np.ascontiguousarray(piece.T) if transposed else piece

        sharding = jax.sharding.NamedSharding(mesh, placed[name])
        if divided is None:
            parameters[name] = jax.device_put(shard(0), sharding)
        else:
            shards = [jax.device_put(shard(rank), device) for rank, device in enumerate(mesh.devices.flat)]
            parameters[name] = jax.make_array_from_single_device_arrays(shapes[name], sharding, shards)
    return _with_rotations(parameters, config, max_tokens, mesh)


def load_checkpoint(
    config: LlamaConfig, dtype: str, max_tokens: int, folder: pathlib.Path, mesh: jax.sharding.Mesh | None = None
) -> Parameters:
    """From `folder`: model.safetensors, or the shards that model.safetensors.index.json lists."""
    with safetensors(folder, "np", slices=True) as get:
        return load(config, dtype, max_tokens, get, mesh)


def randomise(
    config: LlamaConfig, dtype: str, max_tokens: int, seed: int, mesh: jax.sharding.Mesh | None = None
) -> Parameters:
    """Normal numbers of standard deviation 0.02, drawn on the devices: nothing the size of a model crosses the host."""
    mesh = make_mesh(1) if mesh is None else mesh
    placed = specs(config, mesh.size)
    draws: dict[Any, Any] = {}
    parameters = {}
    for i, (name, shape) in enumerate(_shapes(config, mesh.size).items()):
        sharding = jax.sharding.NamedSharding(mesh, placed[name])
        if name.endswith("norm.weight"):
            parameters[name] = jax.device_put(np.ones(shape, jnp.dtype(dtype)), sharding)
            continue
        if (shape, sharding) not in draws:
            draws[shape, sharding] = jax.jit(
                lambda key, shape=shape: jax.random.normal(key, shape, jnp.dtype(dtype)) * 0.02, out_shardings=sharding
            )
        parameters[name] = draws[shape, sharding](jax.random.fold_in(jax.random.key(seed), i))
    return _with_rotations(parameters, config, max_tokens, mesh)


def features_first(parameters: Parameters) -> None:
    """Turns the matrices to [out, in], as xla_gpu's operators take them, where they are. One device's alone."""
    turn = jax.jit(jnp.transpose)
    for name in [name for name in parameters if parameters[name].ndim == 2 and name != "embed.weight"]:
        parameters[name] = jax.block_until_ready(turn(parameters[name]))


def quantize(parameters: Parameters, weight_format: str, part: str = "layers.") -> None:
    """Quantises the layers' matrices [out, in] where they are: "layers.0.qkv.weight" gets "layers.0.qkv.scale"; with
    "head." as `part` the head.

    int4 leaves those whose k is no multiple of 128. One device's alone.
    """
    make = jax.jit(functools.partial(quantization.quantize, weight_format=weight_format))
    for name in [name for name in parameters if name.startswith(part) and parameters[name].ndim == 2]:
        n, k = parameters[name].shape
        if n % 16 == 0 and k % (128 if weight_format == "int4" else 16) == 0:
            stored = make(parameters[name])
            parameters[name] = stored.weight
            parameters[name.replace(".weight", ".scale")] = jax.block_until_ready(stored.weight_scale)


def _with_rotations(
    parameters: Parameters, config: LlamaConfig, max_tokens: int, mesh: jax.sharding.Mesh
) -> Parameters:
    sharding = jax.sharding.NamedSharding(mesh, P())
    return {**parameters, "rotations": jax.device_put(rotation_table(config, max_tokens), sharding)}


def _names(config: LlamaConfig, devices: int) -> dict[str, list[str]]:
    """As hugging_face_names; divided, a tied head is a parameter of its own: the embedding is whole on each device."""
    names = hugging_face_names(config)
    return names if devices == 1 else {"head.weight": names["embed.weight"], **names}


def _shapes(config: LlamaConfig, devices: int) -> dict[str, tuple[int, ...]]:
    hidden, wide = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = {"qkv": (hidden, query + 2 * kv), "out": (query, hidden), "gate_up": (hidden, 2 * wide)}
    # As many columns on each device; forward leaves those behind the vocabulary's end out.
    matrices |= {"down": (wide, hidden), "head": (hidden, -(-config.vocab_size // devices) * devices)}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in _names(config, devices):
        kind, what = name.split(".")[-2:]
        shape = (config.vocab_size, hidden) if kind == "embed" else matrices.get(kind, (hidden,))
        shapes[name] = shape if what == "weight" else shape[1:]
    return shapes


def _divided(name: str) -> int | None:
    """The dimension of the parameter, [in, out] or [out], that the devices divide."""
    kind, what = name.split(".")[-2:]
    if kind in ROW_PARALLEL:
        return 0 if what == "weight" else None
    if kind in ("qkv", "gate_up", "head"):
        return 1 if what == "weight" else 0
    return None


def _is_transposed(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and name != "embed.weight"


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape)


def _part(shape: tuple[int, ...], axis: int | None, rank: int, ranks: int) -> tuple[slice, ...]:
    size = 0 if axis is None else -(-shape[axis] // ranks)
    ends = (min(rank * size, shape[axis or 0]), min((rank + 1) * size, shape[axis or 0]))
    return tuple(slice(*ends) if i == axis else slice(0, n) for i, n in enumerate(shape))
