"""Device groups of a torch_xla SPMD mesh, and the operators that sum over them.

The operators take the parts of all ranks, [ranks, ...], divided over the devices along that dimension: each device
calls the handler on its own part, between torch_xla's manual-sharding markers.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from .._core.operator import ArraySpec, Operator
from .._runtime import device_groups
from .._runtime.device_groups import Member, Settings
from . import lowering

_DEFAULT_TIMEOUT_S = 120.0
_groups: list[DeviceGroup] = []  # by index: what a traced program names


class DeviceGroup(device_groups.Group):
    """The devices along one axis of a torch_xla SPMD mesh, ready to sum with each other.

    Make it once, after torch_xla.runtime.use_spmd(). On GPUs it allocates twice max_bytes (more than two GPUs: four
    times) and a few MB more on each GPU of the axis, opens the peers' memory and loads the kernels. Where a GPU cannot
    reach a peer's memory it warns, and XLA's all-gather is used; on the CPU and over several hosts that is the only
    way.

    Args:
      mesh: a torch_xla.distributed.spmd.Mesh with axis names. Along its other axes there are as many independent
        groups.
      axis: the name of the axis to sum over.
      timeout_s: how long a call waits for a peer before it gives up.
      max_bytes: of a message; one that is larger goes in pieces.

    Raises:
      TypeError, ValueError: an argument is not as described, or SPMD is not in use.
    """

    def __init__(
        self, mesh: Any, axis: str, *, timeout_s: float = _DEFAULT_TIMEOUT_S, max_bytes: int = 16 << 20
    ) -> None:
        from torch_xla import runtime
        from torch_xla.distributed import spmd

        if not isinstance(mesh, spmd.Mesh):
            raise TypeError(f"DeviceGroup: mesh: expected a torch_xla.distributed.spmd.Mesh, got {type(mesh).__name__}")
        names = mesh.axis_names or ()
        if axis not in names:
            raise ValueError(f"DeviceGroup: axis: expected one of {', '.join(names) or 'named axes'}, got {axis!r}")
        if not runtime.is_spmd():
            raise ValueError("DeviceGroup: mesh: expected torch_xla.runtime.use_spmd() before, got a process without")
        device_groups.check_arguments(timeout_s, max_bytes)
        self.mesh, self.axis = mesh, axis
        index = names.index(axis)
        self.size = int(mesh.mesh_shape[index])
        self._number = 0
        if lowering.platform() != "cpu" and self.size > 1:
            self._number = self._connect(index, Settings(round(timeout_s * 1000), int(max_bytes)))
        self.index = len(_groups)
        _groups.append(self)

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.mesh.mesh_shape))
        return f"DeviceGroup(({shape}), {self.axis!r}, uses_peer_memory={self.uses_peer_memory})"

    def _connect(self, index: int, settings: Settings) -> int:
        import numpy as np
        from torch_xla import runtime

        if runtime.process_count() > 1:
            number = 0
            reason: str | None = f"torch_xla runs in {runtime.process_count()} processes"
        else:
            rows = np.moveaxis(np.asarray(self.mesh.get_logical_mesh()), index, -1).reshape(-1, self.size)
            groups = [[Member(0, int(device)) for device in row] for row in rows]
            name = f"torch_xla {self.mesh.axis_names} {self.axis} {len(_groups)}"
            number, reason = device_groups.connect(groups, name, settings, 0, lambda mine: mine[None])
        if reason is not None:
            warnings.warn(device_groups.no_peer_memory(self.axis, reason), stacklevel=3)
        return number


def is_spmd() -> bool:
    from torch_xla import runtime

    return bool(runtime.is_spmd())


def device() -> tuple[str, int]:
    """The platform of this process's torch_xla devices, "cpu" or "cuda", and CUDA's number of the first."""
    if lowering.platform() == "cpu":
        return "cpu", 0
    from . import plugin  # imports torch_xla

    return "cuda", plugin.device_ordinal()


def run(operator: Operator, group: DeviceGroup, x: torch.Tensor, *rest: torch.Tensor, **options: Any) -> Any:
    """``operator`` over ``group``: x holds the parts of all ranks."""
    name = operator.name
    if not isinstance(x, torch.Tensor) or x.device.type not in ("xla", "meta"):
        got = f"one on {x.device}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"{name}: x: expected a tensor of torch_xla with a group of its mesh, got {got}")
    if x.dim() < 1 or x.shape[0] != group.size:
        raise ValueError(
            f"{name}: x: expected the parts of all ranks, [{group.size}, ...], divided along the first dimension, "
            f"got {list(x.shape)}"
        )
    return getattr(torch.ops.xla_gpu, f"_{name}_of_parts")(x, *rest, **options, group=group.index)


def run_on_parts(
    operator: Operator, x: torch.Tensor, rest: tuple[torch.Tensor, ...], index: int, options: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    """The kernel of those operators on torch_xla's tensors."""
    group = _groups[index]
    if not group.uses_peer_memory:
        results = getattr(torch.ops.xla_gpu, operator.name)(x, *rest, **options)
        return results if isinstance(results, tuple) else (results,)
    import torch_xla.distributed.spmd as xs

    def shard(tensor: torch.Tensor, *spec: str | None) -> torch.Tensor:
        # An annotation of the tensor itself could move it: the clone's is of its values alone.
        specs = (*spec, *(None,) * (tensor.dim() - len(spec)))
        result: Any = xs.enable_manual_sharding(tensor.clone(), specs, mesh=group.mesh)
        return getattr(result, "global_tensor", result)

    # A device's shard of x keeps its dimension of size 1, and what is as long as a part gets it too.
    locals_ = [shard(x, group.axis), *(shard(t[None] if t.dim() == x.dim() - 1 else t) for t in rest)]
    if operator.name == "all_reduce_add_rms_norm":
        locals_[2] = shard(rest[1])  # the weight, [hidden]
    specs = {
        name: ArraySpec(tuple(t.shape), str(t.dtype).removeprefix("torch."))
        for name, t in zip(operator.operands, locals_, strict=True)
    }
    call = operator.bind(**specs, **options, group=group._number, check_inputs=False)
    results = lowering.run_whole(call, locals_)
    full = torch.Size((1, *x.shape[1:]))
    none = (None,) * len(full)
    out = []
    for result in results:
        whole: Any = xs.disable_manual_sharding(result, none, full, mesh=group.mesh)
        out.append(getattr(whole, "global_tensor", whole)[0])
    return tuple(out)
