"""EAGLE heads: one or more decoder layers that draft tokens from the states of the model that they were trained for.

A head's row at a position reads the model's state there and the token after it, and predicts the token after that one.
Its layers keep keys and values at the same positions and in the same pages as the model's. EAGLE heads read the state
that the model's logits are computed from, EAGLE-3 heads the residual stream in front of three of its layers.
"""

from __future__ import annotations

from typing import Any

import torch

METHODS = ("eagle", "eagle3")  # vLLM's names

# vLLM's heads, by method, and the models that these are for: layers of which the residual stream is an argument.
HEADS = {
    "eagle": ("EagleLlamaForCausalLM",),
    "eagle3": ("Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"),
}
TARGETS = ("LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

# Layers whose residual stream an EAGLE-3 head reads.
NUM_STREAMS = 3


def refusals(config: Any) -> list[str]:
    """What of a VllmConfig with such a head is not supported."""
    model, speculative, found = config.model_config, config.speculative_config, []
    if model.architecture not in TARGETS:
        name = f"--speculative-config: {speculative.method}"
        found.append(f"{name}: expected a model of {', '.join(TARGETS)}, got {model.architecture}")
    return found + _head_refusals(model, speculative)


def _head_refusals(model: Any, speculative: Any) -> list[str]:
    head, method, found = speculative.draft_model_config, speculative.method, []
    name = f"--speculative-config: model {head.model}"
    architecture = (head.hf_config.architectures or ["none"])[0]
    if architecture not in HEADS[method]:
        found.append(f"{name}: expected a head of {' or '.join(HEADS[method])}, got {architecture}")
    if head.quantization is not None:
        found.append(f"{name}: expected a head that is not quantised, got {head.quantization}")
    settings = getattr(head.hf_config, "eagle_config", None) or {}
    if not settings.get("use_aux_hidden_state", True):
        found.append(f"{name}: use_aux_hidden_state: expected true, got false")
    sizes = {
        "hidden_size": (getattr(head.hf_config, "target_hidden_size", head.get_hidden_size()), model.get_hidden_size()),
        "vocab_size": (head.get_vocab_size(), model.get_vocab_size()),
    }
    for size, (got, expected) in sizes.items():
        if got != expected:
            found.append(f"{name}: {size}: expected the model's, {expected}, got {got}")
    return found


def share_weights(model: Any, head: Any, random: bool) -> None:
    """Gives the head the model's embedding and output matrix where its checkpoint has none, or the same numbers.

    Args:
      model: on the host, like the head.
      head: of it.
      random: there is no checkpoint; a matrix of another size than the model's stays the head's.

    Raises:
      ValueError: the head's checkpoint has none, and the model's has another size.
    """
    for name, owner, theirs, is_own in (
        ("embed_tokens", head.model, model.model.embed_tokens, head.has_own_embed_tokens),
        ("lm_head", head, model.lm_head, head.has_own_lm_head),
    ):
        mine = getattr(owner, name, None)
        if mine is None or (_size(mine) == _size(theirs) and (not is_own or same_matrix(mine, theirs))):
            setattr(owner, name, theirs)
        elif not is_own and not random:
            raise ValueError(
                f"xla_gpu.vllm: --speculative-config: model: expected a head with {name} of its own, since its "
                f"(tokens, hidden_size) are {_size(mine)} and the model's {_size(theirs)}, got none"
            )


def _size(matrix: Any) -> tuple[int, int]:
    """Without padding, which the model's and the head's may have more or less of."""
    return int(matrix.org_vocab_size), int(matrix.embedding_dim)


def same_matrix(one: Any, other: Any) -> bool:
    """Whether two embeddings or output matrices have the same numbers."""
    return bool(one.weight.shape == other.weight.shape and torch.equal(one.weight, other.weight))


def stream_layers(config: Any, model: Any) -> tuple[int, ...]:
    """Layers of the model in front of which the head reads the residual stream; none for EAGLE heads.

    Raises:
      ValueError: they are not three of the model's.
    """
    if config.speculative_config is None or config.speculative_config.method != "eagle3":
        return ()
    settings = config.speculative_config.draft_model_config.hf_config
    chosen = getattr(settings, "eagle_aux_hidden_state_layer_ids", None) or model.get_eagle3_aux_hidden_state_layers()
    layers, count = tuple(sorted(set(chosen))), len(model.model.layers)
    if len(layers) != NUM_STREAMS or not 0 <= layers[0] <= layers[-1] < count:
        raise ValueError(
            f"xla_gpu.vllm: --speculative-config: eagle_aux_hidden_state_layer_ids: expected {NUM_STREAMS} of the "
            f"model's {count} layers, got {list(chosen)}"
        )
    return layers
