"""The residual stream in front of layers of a model, which a head that drafts reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .divided_sums import PendingSum


class ResidualStreams:
    """The residual streams in front of some layers of a model."""

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        self._layers = [model.model.layers[index] for index in layers]

    @contextlib.contextmanager
    def noted(self) -> Iterator[list[torch.Tensor]]:
        """Gives a list that has T[num_tokens, hidden_size] of each layer once a model was called in here."""
        found: list[torch.Tensor] = []
        noted: list[tuple[torch.Tensor | PendingSum, torch.Tensor | None]] = []

        def before(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            _, hidden, residual = arguments[:3]
            if residual is None or isinstance(hidden, PendingSum):  # a sum that the layer's norm is to make
                noted.append((hidden, residual))
            else:
                noted.append((hidden + residual, None))

        hooks = [layer.register_forward_pre_hook(before) for layer in self._layers]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()
        for hidden, residual in noted:
            found.append(hidden.plus_residual(residual) if isinstance(hidden, PendingSum) else hidden)
