"""torch.autocast for the operators that have gradients, which is where models of mixed dtypes come from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .._core.operator import Operator

_DEVICES = {"AutocastCPU": "cpu", "AutocastCUDA": "cuda", "AutocastXLA": "xla"}
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
for _key in _DEVICES:  # not all have a name in Python
    _KEYS = _KEYS.add(torch._C._dispatch_key_parse(_key))


# Scales that have the dtype of x where their weight is packed int4.
_INT4_SCALES = {"weight_scale": "weight", "gate_up_scale": "gate_up_weight", "down_scale": "down_weight"}


def _of_the_region(dtypes: set[torch.dtype], device: str) -> torch.dtype:
    """As PyTorch's own products."""
    del dtypes
    return torch.get_autocast_dtype(device)


def _widest(dtypes: set[torch.dtype], device: str) -> torch.dtype:
    """As PyTorch's operators that take operands of several dtypes."""
    del device
    return functools.reduce(torch.promote_types, dtypes)


_RULES = {"linear": _of_the_region, "gated_mlp": _of_the_region, "rms_norm": _widest, "simple_add": _widest}


def define(library: torch.library.Library, operator: Operator) -> None:
    """Defines what torch.autocast does with an operator, if anything."""
    if rule := _RULES.get(operator.name):
        for key, device in _DEVICES.items():
            library.impl(operator.name, _kernel(operator, rule, device), key)


def _kernel(
    operator: Operator, rule: Callable[[set[torch.dtype], str], torch.dtype], device: str
) -> Callable[..., Any]:
    overload = getattr(torch.ops.xla_gpu, operator.name).default

    def converted(*args: Any, **kwargs: Any) -> Any:
        values = dict(zip(operator.arguments, args, strict=False), **kwargs)
        found = {name: x for name, x in values.items() if _is_converted(operator, name, values)}
        if found:
            dtype = rule({x.dtype for x in found.values()}, device)
            values |= {name: x.to(dtype) for name, x in found.items()}
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            return overload(**values)

    return converted


def _is_converted(operator: Operator, name: str, values: dict[str, Any]) -> bool:
    value = values[name]
    # As PyTorch's autocast not float64. Weights of one byte are quantised.
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    weight = values.get(_INT4_SCALES.get(name, ""))
    return name in operator.differentiable or (isinstance(weight, torch.Tensor) and weight.dtype == torch.uint8)
