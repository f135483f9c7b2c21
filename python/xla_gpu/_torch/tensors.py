"""Tensors as operands: their specs, and what must hold for every call that takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd import forward_ad

from .._core.dtypes import DTYPES
from .._core.operator import ArraySpec

# float16 is torch.float16 and so on: PyTorch and NumPy agree on the names. Of the rare types, a release may lack some.
TORCH_DTYPES = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def spec(where: str, tensor: torch.Tensor) -> ArraySpec:
    """The shape and dtype of ``tensor``; ``where`` ("operator: argument") begins the error text."""
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise TypeError(f"{where}: expected a dtype that XLA knows, got {tensor.dtype}")
    return ArraySpec(tuple(tensor.shape), name)


def torch_dtype(where: str, name: str) -> torch.dtype:
    """The dtype of that NumPy name."""
    if name not in TORCH_DTYPES:
        raise TypeError(f"{where}: expected a dtype that torch {torch.__version__} has, got {name}")
    dtype: torch.dtype = TORCH_DTYPES[name]
    return dtype


def check_operands(name: str, operand_names: Sequence[str], tensors: Sequence[torch.Tensor]) -> torch.device:
    """The device that all operands of operator ``name`` share.

    Raises:
      ValueError: devices differ.
      TypeError: an operand is sparse or otherwise without one block of memory.
    """
    device = tensors[0].device
    for argument, tensor in zip(operand_names, tensors, strict=True):
        if tensor.device != device:
            raise ValueError(
                f"{name}: {argument}: expected a tensor on {device} (as {operand_names[0]}), got one on {tensor.device}"
            )
        check_dense(name, argument, tensor)
    return device


def check_dense(name: str, argument: str, tensor: torch.Tensor) -> None:
    """Raises TypeError for a tensor without one block of memory."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        got = "a nested one" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(f"{name}: {argument}: expected a dense tensor, got {got}")


def check_no_gradient(name: str, argument: str, tensor: torch.Tensor) -> None:
    """Raises ValueError where a gradient through ``tensor`` is requested, in reverse or in forward mode."""
    if requires_gradient(tensor):
        raise ValueError(
            f"{name}: {argument}: expected a tensor that does not require a gradient, since {name} has none for it; "
            "call it under torch.no_grad() or torch.inference_mode(), or pass a detach()ed tensor"
        )
    check_no_tangent(name, argument, tensor)


def check_no_tangent(name: str, argument: str, tensor: torch.Tensor) -> None:
    """Raises ValueError where a gradient through ``tensor`` is requested in forward mode."""
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise ValueError(
            f"{name}: {argument}: expected a tensor without a tangent, since {name} has no forward-mode gradient in "
            "PyTorch; pass a detach()ed tensor"
        )


def requires_gradient(tensor: torch.Tensor) -> bool:
    return bool(tensor.requires_grad and torch.is_grad_enabled())
