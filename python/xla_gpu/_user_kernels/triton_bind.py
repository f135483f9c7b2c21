"""The custom call of a Triton call with its arguments: constants, grid, and the kernel that Triton compiles."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._core.operator import CACHED_CALLS, ArraySpec, OpCall
from . import launch, triton_arguments, triton_compile
from .triton_call import TritonCall, by_key, constant_identity
from .triton_tuning import with_tuned_config


def bind(
    call: TritonCall,
    operands: tuple[ArraySpec, ...],
    encoded: Sequence[int],
    floats: Sequence[float],
    results: tuple[ArraySpec, ...],
    aliases: tuple[tuple[int, int], ...],
    check_inputs: bool,
) -> OpCall:
    """The custom call that launches the compiled function; scratch memory follows its results. Cached.

    Raises:
      ValueError, TypeError: the arguments do not fit the function.
    """
    bound, meta = prepare(call, operands, encoded, floats, results)
    constants = {name: meta[name] for name in bound.function.jit.arg_names if name not in set(bound.parameters())}
    identity = tuple((name, constant_identity(bound.where, name, value)) for name, value in sorted(constants.items()))
    return _bind(
        _Key(bound.key, identity, constants),
        operands,
        bound.programs(meta),
        tuple(encoded),
        launch.double_bytes(floats),
        results,
        aliases,
        check_inputs,
    )


def prepare(
    call: TritonCall, operands: Sequence[ArraySpec], encoded: Sequence[int], floats: Sequence[float], results: Any
) -> tuple[TritonCall, dict[str, Any]]:
    """The call with its configuration, and all of the function's arguments by name, as a grid function takes them."""
    bound = with_tuned_config(call, operands, encoded, floats, results)
    return bound, _meta(bound, operands, encoded, floats, results)


class _Key:
    """A call and its constants, compared by what they are and not by identity."""

    def __init__(self, key: str, identity: Any, constants: Mapping[str, Any]) -> None:
        self.key, self.identity, self.constants = key, identity, constants

    def __hash__(self) -> int:
        return hash((self.key, self.identity))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and (self.key, self.identity) == (other.key, other.identity)


def _meta(
    call: TritonCall, operands: Sequence[ArraySpec], encoded: Sequence[int], floats: Sequence[float], results: Any
) -> dict[str, Any]:
    names = call.parameters()
    given = triton_arguments.values(
        encoded,
        floats,
        [triton_arguments.Described(*x) for x in operands],
        [triton_arguments.Described(*x) for x in results],
    )
    constants = {each.name for each in call.function.jit.params if each.is_constexpr}
    if by_name := [name for name in names if name in constants]:
        raise TypeError(
            f"{call.where}: expected values of {', '.join(by_name)} by name, as triton_call's own arguments, since "
            "they are tl.constexpr"
        )
    if len(given) != len(names):
        raise ValueError(
            f"{call.where}: arguments: expected {len(names)} ({', '.join(names)}), results included, got {len(given)}"
        )
    defaults = {each.name: each.default for each in call.function.jit.params if each.is_constexpr and each.has_default}
    meta: dict[str, Any] = {**call.options, **defaults, **dict(zip(names, given, strict=True)), **call.constexprs}
    if call.config is not None:
        meta.update(call.config.all_kwargs())
    for heuristics in call.function.heuristics:
        for name, heuristic in heuristics.items():
            meta[name] = heuristic(meta)
    if missing := [name for name in call.function.jit.arg_names if name not in meta]:
        raise TypeError(f"{call.where}: expected values of {', '.join(missing)}, got none")
    return meta


@functools.lru_cache(maxsize=CACHED_CALLS)
def _bind(
    key: _Key,
    operands: tuple[ArraySpec, ...],
    grid: tuple[int, ...],
    encoded: tuple[int, ...],
    floats: tuple[bytes, ...],
    results: tuple[ArraySpec, ...],
    aliases: tuple[tuple[int, int], ...],
    check_inputs: bool,
) -> OpCall:
    call = by_key(key.key)
    options = dict(call.options)
    if call.config is not None:
        names = call.function.jit.arg_names
        options.update({name: value for name, value in call.config.all_kwargs().items() if name not in names})
    compiled = triton_compile.compile_function(
        *(call.function.jit, call.where, options, call.parameters(), key.constants, operands, encoded, results)
    )
    metadata, kernel = compiled.metadata, compiled.kernel
    num_ctas = metadata.num_ctas
    # Triton 3.5 had cluster dimensions for each axis; later ones put all CTAs of a cluster side by side.
    cluster = tuple(getattr(metadata, "cluster_dims", (num_ctas, 1, 1)))
    ctas = [*grid, 1, 1][:3]
    if num_ctas > 1:
        ctas = [size * of for size, of in zip(ctas, cluster, strict=True)]
    shape = launch.geometry(
        call.where,
        tuple(ctas),
        32 * metadata.num_warps,
        cluster if num_ctas > 1 else 1,
        metadata.shared,
        bool(getattr(metadata, "launch_cooperative_grid", False)),
        bool(getattr(metadata, "launch_pdl", False)),
    )
    arguments = list(compiled.arguments)
    programs = int(np.prod([*grid, 1], dtype=np.int64))
    for size in (getattr(metadata, f"{which}_scratch_size", 0) or 0 for which in ("global", "profile")):
        # A parameter of its own, also where nothing is needed. Kernels of other versions than are known may have none.
        if kernel.parameters is not None and len(arguments) // 3 >= len(kernel.parameters):
            break
        total = size * programs * num_ctas
        arguments += [launch.SCRATCH, total, 0] if total else [launch.BITS, 0, 8]
    return launch.make_call(kernel, operands, shape, arguments, floats, results, aliases, check_inputs)
