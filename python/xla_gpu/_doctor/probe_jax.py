"""The doctor's try of the JAX front ends."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from .._runtime import cuda_plugin
from . import probe


def attempt(device: str) -> dict[str, Any]:
    """Runs simple_add under jax.jit on the platform that JAX_PLATFORMS names."""
    import xla_gpu.jax

    result = jax.jit(xla_gpu.jax.simple_add)(jnp.array(probe.A), jnp.array(probe.B))
    probe.check(result.tolist())
    return runtime(device)


def runtime(device: str) -> dict[str, Any]:
    """The description of JAX's XLA runtime for ``device``."""
    if device == "GPU":
        plugins = cuda_plugin.installed()
        return probe.plugin_runtime(plugins[max(plugins)])
    # The CPU runtime is part of jaxlib, and so of the version of the headers that come with it.
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    version = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", header) for part in ("MAJOR", "MINOR")]
    return probe.runtime("Host", None, ".".join(number[1] if number else "?" for number in version), None)


if __name__ == "__main__":
    probe.report(attempt)
