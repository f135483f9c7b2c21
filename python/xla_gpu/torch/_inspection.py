"""What torch_xla makes of the calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._runtime import executable_cache
from .._runtime.executable_cache import ExecutableCacheInfo
from .._torch_xla import lowering


def hlo(tensors: torch.Tensor | Sequence[torch.Tensor]) -> str:
    """Returns the HLO text, before optimisation, of the pending lazy graph that computes these XLA tensors.

    Custom calls appear with target, typed attributes, layouts and aliases. Nothing is executed. After
    ``torch_xla.sync()`` a tensor is a parameter, and the text shows no more than that.

    Args:
      tensors: one XLA tensor or a sequence of them.

    Returns:
      The text of one HLO module.

    Raises:
      TypeError: an element is not a tensor on an XLA device.
    """
    if not isinstance(tensors, torch.Tensor | Sequence):
        raise TypeError(f"hlo: tensors: expected XLA tensors, got {type(tensors).__name__}")
    sequence = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    for tensor in sequence:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "xla":
            got = f"one on {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(f"hlo: tensors: expected XLA tensors, got {got}")
    return lowering.hlo(sequence)


def executable_cache_info() -> ExecutableCacheInfo:
    """What torch_xla's programs on GPUs found in the cache of executables that XLA_GPU_EXECUTABLE_CACHE names.

    Returns:
      ``(loaded, compiled, stored, unusable)``: executables that came from a file, that XLA compiled, those of them that
      were written to a file, and files that were damaged or refused. All 0 where the variable is not set, and on the
      CPU, whose client is torch_xla's own.
    """
    return executable_cache.info()
