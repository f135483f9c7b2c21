"""The doctor's try of the JAX doors."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from . import _cuda_plugin, _doctor_door


def attempt(device: str) -> dict[str, Any]:
    """Runs simple_add under jax.jit on the platform that JAX_PLATFORMS names."""
    import xla_gpu.jax

    result = jax.jit(xla_gpu.jax.simple_add)(jnp.array(_doctor_door.A), jnp.array(_doctor_door.B))
    _doctor_door.check(result.tolist())
    if device == "GPU":
        plugins = _cuda_plugin.installed()
        return _doctor_door.plugin_runtime(plugins[max(plugins)])
    # The CPU runtime is part of jaxlib, and so of the version of the headers that come with it.
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    version = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", header) for part in ("MAJOR", "MINOR")]
    return _doctor_door.runtime("Host", None, ".".join(number[1] if number else "?" for number in version), None)


if __name__ == "__main__":
    _doctor_door.report(attempt)
