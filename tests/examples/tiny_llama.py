"""A tiny Llama of transformers, in the variants that the serving example's tests load."""

from __future__ import annotations

import pytest
import torch
import transformers

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "plain": {},
    "one-kv-head": {"num_key_value_heads": 1},
    "as-many-kv-heads": {"num_key_value_heads": 4},
    "wide-heads": {"head_dim": 32},
    "odd-vocabulary": {"vocab_size": 97, "num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "rope-linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}},
    "rope-llama3": {"rope_parameters": LLAMA3_ROPE},
}


def tiny_model(vocab_size: int = 96, **changes) -> transformers.LlamaForCausalLM:
    """Transformers' model of two layers, with weights wide enough that attention and biases matter.

    Skips the test where transformers cannot import its models.
    """
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 120,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
        "max_position_embeddings": 2048,
        "eos_token_id": 1,
    }
    torch.manual_seed(1)
    try:  # at the first use, and not where another package is not the version that they want
        config, model_class = transformers.LlamaConfig(**(sizes | changes)), transformers.LlamaForCausalLM
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"the models of transformers: {error}")
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model
