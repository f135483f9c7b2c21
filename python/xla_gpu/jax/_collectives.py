"""All-reduce over several devices."""

from __future__ import annotations

import jax
import jax.typing

from .._core.docstrings import docstring
from .._jax import device_group
from .._jax.device_group import DeviceGroup
from ..ops import all_reduce as _all_reduce


@docstring(_all_reduce.OPERATOR.docstring)
def all_reduce(x: jax.typing.ArrayLike, *, group: DeviceGroup) -> jax.Array:
    """The sum of x over the devices of a DeviceGroup, inside jax.shard_map over its mesh.

    Under check_vma the result does not vary along the group's axis, as that of jax.lax.psum; jax 0.7 needs
    check_vma=False.
    """
    return device_group.run(_all_reduce.OPERATOR, group, x=x)


@docstring(_all_reduce.OPERATOR_ADD_RMS_NORM.docstring)
def all_reduce_add_rms_norm(
    x: jax.typing.ArrayLike,
    residual: jax.typing.ArrayLike,
    weight: jax.typing.ArrayLike,
    *,
    eps: float,
    group: DeviceGroup,
) -> tuple[jax.Array, jax.Array]:
    """all_reduce, the residual added, and the RMS norm of that sum, inside jax.shard_map over the group's mesh."""
    out, sum_ = device_group.run(
        _all_reduce.OPERATOR_ADD_RMS_NORM, group, x=x, residual=residual, weight=weight, eps=eps
    )
    return out, sum_
