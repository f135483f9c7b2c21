"""Which experts a row is sent to, and with what weight: vLLM's ways of routing, in plain operations."""

from __future__ import annotations

from typing import Any

import torch


def softmax(router_logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float32[rows, top_k] and experts int64[rows, top_k] of each row, the most likely ones."""
    weights, experts = torch.topk(router_logits.float().softmax(-1), top_k, dim=-1)
    return _finished(weights, experts, renormalize, 1.0)


def biased(
    router_logits: torch.Tensor,
    top_k: int,
    renormalize: bool,
    *,
    scoring_func: str = "softmax",
    bias: torch.Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of scores that a bias may order, in the best groups of experts: DeepSeek's way.

    Args:
      router_logits: [rows, num_experts].
      top_k: experts of a row.
      renormalize: whether a row's weights are to add up to 1, before ``scale``.
      scoring_func: "softmax" or "sigmoid".
      bias: [num_experts], added to the scores to choose by, not to the weights.
      groups: of experts, of equal size. Each counts as the best expert in it; with a bias as the sum of the best two.
      top_groups: groups that a row's experts are in.
      scale: of the weights.
    """
    logits = router_logits.float()
    scores = logits.sigmoid() if scoring_func == "sigmoid" else logits.softmax(-1)
    order = scores if bias is None else scores + bias.float()
    if groups > 1:
        rows, num_experts = scores.shape
        by_group = order.view(rows, groups, -1)
        of_group = by_group.amax(-1) if bias is None else by_group.topk(2, dim=-1)[0].sum(-1)
        best = of_group.topk(top_groups, dim=-1)[1].reshape(rows, top_groups)
        everyone = torch.arange(num_experts, device=order.device) // (num_experts // groups)
        kept = (best[:, :, None] == everyone).any(1)
        order = torch.where(kept, order, torch.full_like(order, float("-inf")))
    experts = order.topk(top_k, dim=-1)[1].reshape(-1, top_k)
    return _finished(scores.gather(1, experts), experts, renormalize, scale)


def _finished(
    weights: torch.Tensor, experts: torch.Tensor, renormalize: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights if scale == 1.0 else weights * scale, experts


def of_layer(layer: Any, x: torch.Tensor, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float32[rows, top_k] and experts int64[rows, top_k] as vLLM's layer of experts wants them."""
    if layer.custom_routing_function is not None:
        weights, experts = layer.custom_routing_function(
            hidden_states=x, gating_output=router_logits, topk=layer.top_k, renormalize=layer.renormalize
        )
        return weights.float(), experts.to(torch.int64)
    bias, scoring, scale = layer.e_score_correction_bias, layer.scoring_func, layer.routed_scaling_factor
    if not layer.use_grouped_topk and bias is None:
        return softmax(router_logits, layer.top_k, layer.renormalize)
    groups, top_groups = (layer.num_expert_group, layer.topk_group) if layer.use_grouped_topk else (1, 1)
    return biased(
        router_logits,
        layer.top_k,
        layer.renormalize,
        scoring_func=scoring,
        bias=bias,
        groups=groups,
        top_groups=top_groups,
        scale=scale,
    )
