"""vLLM on torch_xla with this library's kernels: the platform plug-in "XLA GPU" (see docs/vllm.md).

vLLM calls ``register`` through the entry-point group "vllm.platform_plugins" in every one of its processes. Nothing
heavy may be imported here.
"""

from __future__ import annotations

import os

from .._core.environment import pjrt_device
from . import versions

__all__ = ["register"]


def register() -> str | None:
    """The platform class that vLLM shall use, or None where PJRT_DEVICE names neither CPU nor GPU.

    What does not fit, another version of vLLM for example, is reported when vLLM creates the platform: it ignores
    errors raised here, and would go on with another platform.
    """
    device = pjrt_device().upper()
    if device not in ("CPU", "GPU"):
        return None
    os.environ["PJRT_DEVICE"] = device  # whoever sets "gpu" has chosen it, and torch_xla would not know the name
    if versions.problem() is not None:
        return f"{__name__}.versions.UnusablePlatform"
    return f"{__name__}.platform.XlaGpuPlatform"
