"""The sums after attention and MLP over several devices, which the next norm makes together with its own work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.layernorm import RMSNorm

from .tensor_parallel import TensorParallel


class PendingSum:
    """A sum over the devices that was not made yet: a layer's output as vLLM's models pass it on.

    RMSNorm with a residual makes it in one kernel with the residual's addition and the norm. Whatever else uses it gets
    the sum, as a tensor.
    """

    def __init__(self, devices: TensorParallel, parts: torch.Tensor, bias: torch.Tensor | None) -> None:
        """parts: T[devices, rows, n], a part of which each device has; bias: T[n], to be added to the sum."""
        self._devices = devices
        self._parts = parts
        self._bias = bias
        self._total: torch.Tensor | None = None
        self._normed: tuple[torch.Tensor, torch.Tensor] | None = None  # a residual, and its sum with this
        self.shape, self.dtype, self.device = parts.shape[1:], parts.dtype, parts.device

    def plus(self, parts: torch.Tensor) -> PendingSum:
        """The sum of these and other parts of the same form."""
        return PendingSum(self._devices, self._parts + parts, self._bias)

    def tensor(self) -> torch.Tensor:
        """T[rows, n]."""
        if self._total is None:
            total = self._devices.sum(self._parts)
            self._total = total if self._bias is None else total + self._bias
        return self._total

    def add_and_norm(self, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, Any]:
        """The norm of the sum with the residual, T[rows, n], and that sum."""
        with_bias = residual if self._bias is None else residual + self._bias
        normed, total = self._devices.sum_add_norm(self._parts, with_bias, weight, eps)
        self._normed = residual, total
        return normed, total

    def plus_residual(self, residual: torch.Tensor | None) -> torch.Tensor:
        """T[rows, n], the sum with a residual: what a norm has made of both, where one did."""
        if self._normed is not None and self._normed[0] is residual:
            return self._normed[1]
        return self.tensor() if residual is None else self.tensor() + residual

    @property
    def can_be_normed(self) -> bool:
        """Whether nothing used it yet."""
        return self._total is None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls PyTorch's function with the sum."""
        return function(*_made(args), **{name: _made(value) for name, value in (kwargs or {}).items()})


def _made(value: Any) -> Any:
    if isinstance(value, PendingSum):
        return value.tensor()
    if isinstance(value, (list, tuple)):
        return type(value)(_made(part) for part in value)
    return value


def _operation(name: str) -> Callable[..., Any]:
    def operation(self: PendingSum, *others: Any) -> Any:
        return getattr(self.tensor(), name)(*_made(others))

    return operation


# Python looks for these in the class alone.
for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "neg", "getitem"):
    setattr(PendingSum, f"__{_name}__", _operation(f"__{_name}__"))


def take_sums(norm: nn.Module) -> None:
    """Has an RMSNorm of vLLM's make the sums that it is given with a residual."""
    if type(norm) is not RMSNorm or not norm.has_weight or norm.variance_size_override is not None:
        return
    alone = norm._forward_method

    def forward(x: Any, residual: torch.Tensor | None = None) -> Any:
        if not isinstance(x, PendingSum):
            return alone(x, residual)
        residual = _made(residual)
        # The kernel takes one dtype. Some models keep the residual, or the norms' weights, in float32.
        if residual is None or not x.can_be_normed or not norm.weight.dtype == residual.dtype == x.dtype:
            return alone(x.tensor(), residual)
        return x.add_and_norm(residual, norm.weight.data, norm.variance_epsilon)

    norm._forward_method = forward
