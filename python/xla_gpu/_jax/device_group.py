"""Device groups of a JAX mesh, and the operators that sum over them inside jax.shard_map."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import numpy as np

from .._core.operator import Operator
from .._runtime import device_groups
from .._runtime.device_groups import Member, Settings
from . import call

_DEFAULT_TIMEOUT_S = 120.0


class DeviceGroup(device_groups.Group):
    """The devices along one axis of a mesh, ready to sum with each other.

    Make it once, outside of jit, in every process of the program at the same point; use it inside jax.shard_map over
    that mesh. On GPUs it allocates twice max_bytes (more than two GPUs: four times) and a few MB more on each GPU of
    the axis, opens the peers' memory and loads the kernels; a second group of the same arguments is the first one
    again. Where a GPU cannot reach a peer's memory it warns, and XLA's all-gather is used; on the CPU that is the only
    way.

    XLA runs the calls of one program in the order in which it schedules them, the same on all devices. Programs that
    use a group must reach its devices in one order too, as any program with collectives must.

    Args:
      mesh: a jax.sharding.Mesh. Along its other axes there are as many independent groups.
      axis: the name of the axis to sum over.
      timeout_s: how long a call waits for a peer before it gives up.
      max_bytes: of a message; one that is larger goes in pieces.

    Raises:
      TypeError, ValueError: an argument is not as described.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        axis: str,
        *,
        timeout_s: float = _DEFAULT_TIMEOUT_S,
        max_bytes: int = 16 << 20,
    ) -> None:
        if not isinstance(mesh, jax.sharding.Mesh):
            raise TypeError(f"DeviceGroup: mesh: expected a jax.sharding.Mesh, got {type(mesh).__name__}")
        if axis not in mesh.axis_names:
            raise ValueError(f"DeviceGroup: axis: expected one of {', '.join(mesh.axis_names)}, got {axis!r}")
        device_groups.check_arguments(timeout_s, max_bytes)
        self._mesh, self._axis = mesh, axis
        self._number = connected(mesh, axis, Settings(round(timeout_s * 1000), int(max_bytes)))

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self._mesh

    @property
    def axis(self) -> str:
        return self._axis

    @property
    def size(self) -> int:
        """Ranks: devices along the axis."""
        size: int = self._mesh.shape[self._axis]
        return size

    def __repr__(self) -> str:
        return f"DeviceGroup({self._mesh.shape_tuple}, {self._axis!r}, uses_peer_memory={self.uses_peer_memory})"


@functools.lru_cache(maxsize=256)
def connected(mesh: jax.sharding.Mesh, axis: str, settings: Settings) -> int:
    """The group's number for handlers, or 0 where there is no peer memory."""
    index = mesh.axis_names.index(axis)
    devices = np.moveaxis(mesh.devices, index, -1).reshape(-1, mesh.devices.shape[index])
    platforms = {device.platform for device in devices.flat}
    if platforms == {"cpu"} or devices.shape[1] == 1:
        return 0
    groups = [[Member(device.process_index, device.local_hardware_id) for device in row] for row in devices]
    name = f"{mesh.axis_names} {axis}"
    number, reason = device_groups.connect(groups, name, settings, jax.process_index(), _exchange)
    if reason is not None:
        warnings.warn(device_groups.no_peer_memory(axis, reason), stacklevel=4)
    return number


def _exchange(mine: Any) -> Any:
    if jax.process_count() == 1:
        return mine[None]
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(mine))


def run(operator: Operator, group: DeviceGroup, **arguments: Any) -> Any:
    """One of the operators over ``group``: x is exchanged by the handler, or gathered first."""
    _check_place(operator.name, group)
    if not group.uses_peer_memory:
        call.check(operator, group=1, **arguments)  # as the caller has them: with a group x is a rank's own
        x = call.as_array(f"{operator.name}: x", arguments["x"])
        arguments["x"] = jax.lax.all_gather(x, group.axis)
    return call.call(operator, reduced_axes=frozenset((group.axis,)), group=group._number, **arguments)


def _check_place(name: str, group: Any) -> None:
    if not isinstance(group, DeviceGroup):
        raise TypeError(f"{name}: group: expected an xla_gpu.jax.DeviceGroup, got {type(group).__name__}")
    where = f"a call inside jax.shard_map over axis {group.axis!r} of {group.size} devices"
    try:
        size = jax.lax.psum(1, group.axis)
    except NameError:
        raise ValueError(f"{name}: group: expected {where}, got one where that axis is not bound") from None
    if size != group.size:
        raise ValueError(f"{name}: group: expected {where}, got an axis of {size}")
