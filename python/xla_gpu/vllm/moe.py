"""vLLM's layers of experts, whose products are expert_products.py's; registered with vLLM when imported."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.layer import FusedMoE
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from . import routing, tensor_parallel
from .expert_matrices import Matrices
from .expert_products import ACTIVATIONS, bias_of_sum, local_experts, weighted_sum
from .tensor_parallel import TensorParallel

# Activations whose matrices have the rows of gate and up in turn in vLLM, and one behind the other here.
IN_TURN = ("swigluoai",)


def activation_of(layer: Any) -> str:
    """The name of the function of a layer's gates, which is an enumeration's value since vLLM 0.17."""
    return str(getattr(layer.activation, "value", layer.activation))


def apply(layer: Any, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
    """What a layer of vLLM computes.

    Args:
      layer: with the matrices as parameters ``w13_weight`` and ``w2_weight``, and where they are quantised
        ``w13_weight_scale``, ``w13_weight_zero_point`` and so on; biases as ``w13_bias`` and ``w2_bias``. Over several
        devices with ``has_whole_experts``, of divided_layers.divide.
      x: T[rows, hidden].
      router_logits: [rows, num_experts].

    Returns:
      T[rows, hidden].

    Raises:
      NotImplementedError: the layer's experts are not supported.
    """
    refused = {
        "zero experts": bool(getattr(layer, "zero_expert_num", 0)),
        "apply_router_weight_on_input": layer.apply_router_weight_on_input,
        f"activation={activation_of(layer)}": activation_of(layer) not in ACTIVATIONS,
    }
    if names := [name for name, given in refused.items() if given]:
        raise NotImplementedError(f"xla_gpu.vllm: experts with {', '.join(names)} are not supported")
    weights, chosen = routing.of_layer(layer, x, router_logits)
    w13, w2 = matrices(layer, "w13"), matrices(layer, "w2")
    if (devices := tensor_parallel.active()) is None:
        return bias_of_sum(w2, weights, chosen, weighted_sum(x, w13, w2, weights, chosen, activation_of(layer)))
    parts = on_each(devices, layer, x, w13, w2._replace(bias=None), weights, chosen)
    return bias_of_sum(w2, weights, chosen, devices.sum(parts))


def on_each(
    devices: TensorParallel,
    layer: Any,
    x: torch.Tensor,
    w13: Matrices,
    w2: Matrices,
    weights: torch.Tensor,
    chosen: torch.Tensor,
) -> torch.Tensor:
    """T[devices, rows, hidden]: what each device's experts add to the sum, or its part of every expert's width."""
    whole, num_experts = layer.has_whole_experts, w13.weight.shape[0]
    own = num_experts // devices.size  # of whole experts
    operands: list[tuple[torch.Tensor, int | None]] = [(x, None), (weights, None), (chosen, None)]
    if whole:
        operands.append((torch.arange(0, num_experts, own, device=x.device), 0))
    given_of: list[tuple[str, ...]] = []
    for matrix, dim in ((w13, 0 if whole else 1), (w2, 0 if whole else 2)):
        given = {name: part for name, part in matrix._asdict().items() if part is not None}
        operands += [(part, dim if part.dim() > dim else None) for part in given.values()]
        given_of.append(tuple(given))

    def on_one(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        if whole:
            chosen, parts = local_experts(chosen, parts[0], own), parts[1:]
        count = len(given_of[0])
        own13 = Matrices(**dict(zip(given_of[0], parts[:count], strict=True)))
        own2 = Matrices(**dict(zip(given_of[1], parts[count:], strict=True)))
        return weighted_sum(x, own13, own2, weights, chosen, activation_of(layer), whole)[None]

    return devices.on_each(on_one, operands, 0)


def matrices(layer: Any, name: str) -> Matrices:
    """The matrices "w13" or "w2" of a layer of vLLM."""
    scale, zero_point = (getattr(layer, f"{name}_weight_{part}", None) for part in ("scale", "zero_point"))
    return Matrices(getattr(layer, f"{name}_weight"), scale, zero_point, getattr(layer, f"{name}_bias", None))


def in_halves(rows: torch.Tensor) -> torch.Tensor:
    """[num_experts, 2 * intermediate, ...] with the rows of gate and up in turn: gate's before up's."""
    return torch.cat([rows[:, ::2], rows[:, 1::2]], 1)


def order_halves(layer: Any) -> None:
    """Brings the rows of gate and up of plain experts into the order of ``weighted_sum``."""
    if activation_of(layer) in IN_TURN:
        for parameter in (layer.w13_weight, getattr(layer, "w13_bias", None)):
            if parameter is not None:
                parameter.data = in_halves(parameter.data)


class _RoutesItself:
    """A method of vLLM's that is given the router's logits; vLLM 0.12 passes the layer's options as arguments too."""

    # vLLM 0.15 chooses the experts itself for other methods, and calls ``apply`` with them.
    is_monolithic = True

    def apply(self, layer: Any, x: torch.Tensor, router_logits: torch.Tensor, **_: Any) -> torch.Tensor:
        """T[rows, hidden] from x: T[rows, hidden]."""
        return apply(layer, x, router_logits)

    apply_monolithic = apply


class OwnMoEMethod(_RoutesItself, FusedMoEMethodBase):  # type: ignore[misc]
    """Of experts with weights of this back end's own."""

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        """Of vLLM's kernels."""


@UnquantizedFusedMoEMethod.register_oot
class XlaGpuMoEMethod(_RoutesItself, UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """vLLM's method for unquantized experts."""

    def _select_monolithic(self) -> Any:
        """What vLLM 0.16 replaces ``apply_monolithic`` by."""
        return self.apply

    def process_weights_after_loading(self, layer: Any) -> None:
        """Brings the rows of gate and up into the order of ``weighted_sum``."""
        super().process_weights_after_loading(layer)
        order_halves(layer)


def _forward(layer: Any, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> Any:
    """FusedMoE.forward_native without the opaque operator around it, which would hide the experts from XLA."""
    runner = getattr(layer, "runner", None)
    if runner is None:  # before vLLM 0.17
        return layer.forward_impl(hidden_states, router_logits)
    runner.moe_forward = lambda x, logits, shared_input, _: runner.forward_impl(layer, x, logits, shared_input)
    return runner.forward(hidden_states, router_logits)


# Not a class registered in its place: vLLM's subclasses, with shared experts or loaders of their own, would not be it.
FusedMoE.forward_native = _forward
