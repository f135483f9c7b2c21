"""Mixture-of-experts layers in plain operations; registered with vLLM when imported.

Every row gets what its own experts compute for it and nothing else. A few rows gather the weights of their experts;
more rows go through all experts, and what an expert computed for rows that are not its own is dropped before the sum.
That is right, and does num_experts / top_k times the work where there are many rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.fused_moe.layer import FusedMoE
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from . import tensor_parallel

# Rows that go through all experts at once: bounds the memory of what they compute.
_MAX_ROWS = 512

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": F.silu, "gelu": F.gelu}


def route(router_logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float32[rows, top_k] and experts int64[rows, top_k] of each row, by softmax."""
    weights, experts = torch.topk(router_logits.float().softmax(-1), top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts


def experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """The weighted sum of what each row's experts compute.

    Args:
      x: T[rows, hidden].
      w13: T[num_experts, 2 * intermediate, hidden], gate and up.
      w2: T[num_experts, hidden, intermediate], down.
      weights: float32[rows, top_k], of route.
      chosen: int64[rows, top_k], of route.
      activation: vLLM's name of the function of the gate.
    """
    rows, top_k = chosen.shape
    act = _ACTIVATIONS[activation]
    if rows * top_k < w13.shape[0]:
        own13 = w13.index_select(0, chosen.reshape(-1))  # [rows * top_k, 2 * intermediate, hidden]
        own2 = w2.index_select(0, chosen.reshape(-1))
        repeated = x[:, None].expand(rows, top_k, x.shape[1]).reshape(rows * top_k, x.shape[1], 1)
        gate, up = torch.bmm(own13, repeated)[..., 0].chunk(2, -1)
        out = torch.bmm(own2, (act(gate) * up)[..., None])[..., 0].view(rows, top_k, -1)
        return (out * weights[..., None].to(x.dtype)).sum(1)
    parts = []
    everyone = torch.arange(w13.shape[0], device=x.device)
    for part_x, part_weights, part_chosen in zip(
        x.split(_MAX_ROWS), weights.split(_MAX_ROWS), chosen.split(_MAX_ROWS), strict=True
    ):
        gate, up = torch.einsum("th,eoh->eto", part_x, w13).chunk(2, -1)
        out = torch.einsum("eti,ehi->eth", act(gate) * up, w2)
        is_own = part_chosen[..., None] == everyone  # [rows, top_k, num_experts]
        share = torch.where(is_own, part_weights[..., None], torch.zeros_like(part_weights)[..., None]).sum(1)
        own = is_own.any(1).t()[..., None]
        # where, not a product with 0: what is infinite for others must not become NaN here.
        weighted = torch.where(own, out * share.t()[..., None].to(x.dtype), torch.zeros_like(out))
        parts.append(weighted.sum(0))
    return torch.cat(parts)


@UnquantizedFusedMoEMethod.register_oot
class XlaGpuMoEMethod(UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """vLLM's method for unquantized experts."""

    def forward_oot(self, layer: Any, x: torch.Tensor, router_logits: torch.Tensor, **_: Any) -> torch.Tensor:
        """T[rows, hidden] from x: T[rows, hidden].

        vLLM 0.12 passes the layer's options as arguments too; 0.13 passes the layer alone.
        """
        refused = {
            "use_grouped_topk": layer.use_grouped_topk,
            "custom_routing_function": layer.custom_routing_function is not None,
            f"scoring_func={layer.scoring_func}": layer.scoring_func != "softmax",
            "routed_scaling_factor": layer.routed_scaling_factor != 1.0,
            "e_score_correction_bias": layer.e_score_correction_bias is not None,
            "apply_router_weight_on_input": layer.apply_router_weight_on_input,
            f"activation={layer.activation}": layer.activation not in _ACTIVATIONS,
            "bias": self.moe.has_bias,
        }
        if names := [name for name, given in refused.items() if given]:
            raise NotImplementedError(f"xla_gpu.vllm: experts with {', '.join(names)} are not supported")
        weights, chosen = route(router_logits, layer.top_k, layer.renormalize)
        w13, w2, activation = layer.w13_weight, layer.w2_weight, layer.activation
        if (devices := tensor_parallel.active()) is None:
            return experts(x, w13, w2, weights, chosen, activation)
        # Each device has a part of every expert's width.
        parts = devices.on_each(
            lambda x, w13, w2, weights, chosen: experts(x, w13, w2, weights, chosen, activation)[None],
            [(x, None), (w13, 1), (w2, 2), (weights, None), (chosen, None)],
            0,
        )
        return devices.sum(parts)

    forward_native = forward_oot


@FusedMoE.register_oot
class XlaGpuFusedMoE(FusedMoE):  # type: ignore[misc]
    """vLLM's layer without the opaque operator around it, which would hide the experts from XLA."""

    def forward_oot(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """T[rows, hidden] from hidden_states: T[rows, hidden]."""
        if self.shared_experts is not None or self.zero_expert_num not in (0, None):
            raise NotImplementedError("xla_gpu.vllm: shared and zero experts are not supported")
        return self.forward_impl(hidden_states, router_logits)

    forward_native = forward_oot
