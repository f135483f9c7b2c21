"""Meshes for tests: of CPU devices, which conftest.py asks JAX for, or of GPUs."""

from __future__ import annotations

import math

import numpy as np
import pytest

PLATFORMS = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]


def infers_replication() -> bool:
    """Whether a custom call can say that its result is the same along a mesh axis; jax 0.7 looks at its operands."""
    import jax

    return jax.__version_info__ >= (0, 8)


def mesh(platform: str, **axes: int):
    """A mesh with these axes; skips the test where there are too few devices."""
    jax = pytest.importorskip("jax")
    count = math.prod(axes.values())
    try:
        devices = jax.devices(platform)
    except RuntimeError as error:
        pytest.skip(f"jax has no platform {platform}: {error}")
    if len(devices) < count:
        pytest.skip(f"needs {count} {platform} devices, and there are {len(devices)}")
    return jax.sharding.Mesh(np.array(devices[:count]).reshape(tuple(axes.values())), tuple(axes))


def shard(mesh, array, *spec):
    import jax

    return jax.device_put(array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))
