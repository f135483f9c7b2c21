"""Heads that draft tokens from the states of a model: EAGLE's, and layers of multi-token prediction (MTP)."""

from __future__ import annotations

from typing import Any

from . import eagle, mtp

METHODS = (*eagle.METHODS, mtp.METHOD)


def has_head(config: Any) -> bool:
    """Whether drafts of a VllmConfig come from a head."""
    return config.speculative_config is not None and config.speculative_config.method in METHODS


def head_length(config: Any) -> int:
    """Positions at which the head drafts: those that it has, and no more than the model's."""
    return int(min(config.speculative_config.draft_model_config.max_model_len, config.model_config.max_model_len))


def refusals(config: Any) -> list[str]:
    """What of a VllmConfig with a head is not supported."""
    speculative, found = config.speculative_config, []
    size, got = config.parallel_config.tensor_parallel_size, speculative.draft_tensor_parallel_size
    if size > 1 and got not in (None, size):  # a head is divided as the model is
        name = "--speculative-config: draft_tensor_parallel_size"
        found.append(f"{name}: expected --tensor-parallel-size, {size}, got {got}")
    chain = [(0,) * (i + 1) for i in range(speculative.num_speculative_tokens)]
    if speculative.speculative_token_tree not in (None, str(chain)):
        found.append("--speculative-config: speculative_token_tree: expected none, got a tree")
    if config.model_config is None:
        return found
    of_method = mtp.refusals if speculative.method == mtp.METHOD else eagle.refusals
    return found + of_method(config)


def fc(head: Any) -> Any:
    """What joins the model's states with the tokens' embeddings, or with each other."""
    return head.fc if hasattr(head, "fc") else head.model.fc


def last_layer(head: Any) -> Any:
    """The decoder layer whose result the drafts are computed from."""
    return head.block if hasattr(head, "block") else head.model.layers[-1]
