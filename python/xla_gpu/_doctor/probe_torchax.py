"""The doctor's try of the torchax front end."""

from typing import Any

import jax.numpy as jnp
import torchax

from . import probe, probe_jax


def attempt(device: str) -> dict[str, Any]:
    """Runs simple_add on torchax tensors, on the platform that JAX_PLATFORMS names."""
    import xla_gpu.torch
    import xla_gpu.torchax

    with torchax.default_env() as environment:
        a, b = environment.j2t_iso((jnp.array(probe.A), jnp.array(probe.B)))
        probe.check(xla_gpu.torch.simple_add(a, b).tolist())
    return probe_jax.runtime(device)


if __name__ == "__main__":
    probe.report(attempt)
