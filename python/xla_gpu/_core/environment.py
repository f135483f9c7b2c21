"""What environment variables say."""

from __future__ import annotations

import os
from collections.abc import Mapping


def switch(name: str, default: bool) -> bool:
    """Whether the variable says 1, or 0; ``default`` where it is not set, or empty.

    Raises:
      ValueError: it says something else, as "off", which must not be taken for a 1.
    """
    value = os.environ.get(name, "")
    if value in ("", "0", "1"):
        return default if not value else value == "1"
    raise ValueError(f"{name}: expected 0 or 1, got {value!r}")


def pjrt_device(environ: Mapping[str, str] = os.environ) -> str:
    """The name of torch_xla's platform, "CPU" or "GPU" for ours, as PJRT_DEVICE says it; "" where it is not set.

    torch_xla knows no "gpu" in small letters.
    """
    return environ.get("PJRT_DEVICE", "")
