"""The torch_xla front end: a call as StableHLO, as an HLO computation, as one node of the lazy graph.

``_XLAC._xla_custom_call`` would be shorter, but its graph hash leaves out attributes and result shapes, so that calls
that differ in them share a compiled program; and it has neither aliases nor layouts. A user computation's hash covers
the whole HLO.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from .._core import compatibility
from .._core.operator import CACHED_CALLS, OpCall
from .._runtime import library, targets
from .._runtime.targets import Target
from ..errors import TargetError
from . import spmd, stablehlo


def run(call: OpCall, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Adds ``call`` to the lazy graph and returns its results, scratch left out."""
    results = spmd.run(call, tensors, run_whole)
    return run_whole(call, tensors) if results is None else results


def run_whole(call: OpCall, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The same, as one call on these tensors: under SPMD on shards, inside of manual sharding."""
    import _XLAC

    results = _XLAC._xla_user_computation(f"xla_gpu::{call.name}", list(tensors), _computation(call))
    return tuple(results[: len(call.results)])


def hlo(tensors: Sequence[torch.Tensor]) -> str:
    """HLO text of the graph that computes ``tensors``."""
    import _XLAC

    text: str = _XLAC._get_xla_tensors_hlo(list(tensors))
    return text


@functools.lru_cache(maxsize=CACHED_CALLS)
def _computation(call: OpCall) -> Any:
    from torch_xla.core import xla_builder

    from .hlo_module import hlo_module_proto

    register(targets.lookup(call.target, platform()))
    return xla_builder.computation_from_module_proto(call.target, hlo_module_proto(stablehlo.module(call)))


@functools.cache
def platform() -> str:
    """The platform of torch_xla's client, as register_ffi_target calls it.

    Raises:
      CompatibilityError: torch_xla is of another version than the one whose runtime is known here.
      TargetError: it runs on another platform than CPU and GPU.
    """
    compatibility.torch_xla("the torch_xla front end")
    from torch_xla import runtime

    device_type = str(runtime.device_type())
    if device_type == "CPU":
        return "cpu"
    if device_type in ("GPU", "CUDA"):
        return "CUDA"
    raise TargetError(
        f"torch_xla runs on {device_type}; xla_gpu has handlers for CPU and NVIDIA GPUs (PJRT_DEVICE=CPU or GPU)"
    )


@functools.cache
def register(target: Target) -> None:
    """Registers ``target`` with the XLA runtime of torch_xla's client."""
    cdll, stages = library.load().cdll, target.stages()
    if target.platform == "cpu":
        from . import host_ffi_api

        api = host_ffi_api.ffi_api()
        error = cdll.xla_gpu_register_ffi(
            api, target.name.encode(), target.runtime_platform.encode(), ctypes.byref(stages)
        )
    else:
        from . import plugin

        api = plugin.pjrt_api()
        error = cdll.xla_gpu_register_pjrt(api, target.name.encode(), ctypes.byref(stages))
    if error is not None:
        text = error.decode(errors="replace")
        raise TargetError(
            f"FFI target {target.name!r} was refused by torch_xla's {target.platform} runtime: {text}. If the name is "
            "taken, something else in this process registered it first: a second copy of the library, or other code"
        )
