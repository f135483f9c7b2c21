"""Norm weights as one argument of a program instead of one for each norm: a launch costs the host time for each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm


class NormWeights:
    """The weights of a model's norms, one behind the other in one array for each dtype."""

    def __init__(self, model: nn.Module, left_out: Iterable[nn.Module] = ()) -> None:
        """Packs them but for those left out. The model keeps parameters of its own, which take next to no memory."""
        others = set(left_out)
        self._norms: list[tuple[nn.Module, nn.Parameter, int]] = []  # where the weight begins in its dtype's array
        sizes: dict[torch.dtype, int] = {}
        for module in model.modules():
            weight = module._parameters.get("weight") if isinstance(module, (RMSNorm, GemmaRMSNorm)) else None
            if weight is not None and module not in others:
                begin = sizes.setdefault(weight.dtype, 0)
                sizes[weight.dtype] = begin + weight.numel()
                self._norms.append((module, weight, begin))
        self._packed = {
            dtype: torch.cat([weight.data for _, weight, _ in self._norms if weight.dtype == dtype]) for dtype in sizes
        }

    @contextlib.contextmanager
    def sliced(self) -> Iterator[None]:
        """The norms' weights are slices of the arrays in here, which is where a program is traced."""
        for module, weight, begin in self._norms:
            part = self._packed[weight.dtype][begin : begin + weight.numel()]
            module._parameters["weight"] = nn.Parameter(part, requires_grad=False)
        try:
            yield
        finally:
            for module, weight, _ in self._norms:
                module._parameters["weight"] = weight
