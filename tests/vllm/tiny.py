"""Tiny models with random weights, and what transformers generates with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as t
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers.models.llama import modeling_llama

VOCAB_SIZE = 320
MAX_POSITIONS = 512
FIRST_TOKEN = 3 + 256  # of those that are no bytes

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Large weights, so that no two logits are close: equal tokens then mean equal models.
    "initializer_range": 0.2,
}
GEMMA = {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 32, "hidden_activation": "gelu_pytorch_tanh"}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 128,
}
_LATENT = {
    **COMMON,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_DEEPSEEK_V3 = {
    **_LATENT,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}

CONFIGS = {
    "llama": lambda: t.LlamaConfig(**COMMON, tie_word_embeddings=False),
    # Sizes that quantised weights have: whole blocks of 128, also of each of two devices.
    "llama_wide": lambda: t.LlamaConfig(
        **{**COMMON, "hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4, "head_dim": 64}
    ),
    "llama3": lambda: t.LlamaConfig(**COMMON, rope_scaling=_LLAMA3_ROPE),
    "qwen2": lambda: t.Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen3": lambda: t.Qwen3Config(**COMMON, head_dim=32),
    "mistral": lambda: t.MistralConfig(**COMMON, sliding_window=24),
    "gemma2": lambda: t.Gemma2Config(**COMMON, **GEMMA),
    # Layers of both kinds: five of six have the window.
    "gemma3": lambda: t.Gemma3TextConfig(**{**COMMON, "num_hidden_layers": 6}, **GEMMA),
    "phi3": lambda: t.Phi3Config(**COMMON, pad_token_id=0),
    "mixtral": lambda: t.MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: t.Qwen3MoeConfig(
        **COMMON, head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48
    ),
    # Shared experts behind a gate.
    "qwen2_moe": lambda: t.Qwen2MoeConfig(
        **COMMON,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=96,
    ),
    # Routing by groups with sigmoid, bias and scale; shared experts; a first layer without experts.
    "glm4_moe": lambda: t.Glm4MoeConfig(
        **COMMON,
        head_dim=16,
        pad_token_id=0,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    ),
    "ernie4_5_moe": lambda: t.Ernie4_5_MoeConfig(
        **COMMON, pad_token_id=0, moe_num_experts=8, moe_k=2, moe_intermediate_size=48, moe_layer_start_index=1
    ),
    # Latent attention, with and without a latent of queries too.
    "deepseek_v2": lambda: t.DeepseekV2Config(**_LATENT, topk_method="group_limited_greedy", n_group=4, topk_group=2),
    "deepseek_v2_lite": lambda: t.DeepseekV2Config(
        **{**_LATENT, "q_lora_rank": None}, topk_method="greedy", n_group=1, topk_group=1
    ),
    "deepseek_v3": lambda: t.DeepseekV3Config(**_DEEPSEEK_V3),
    "deepseek_v3_yarn": lambda: t.DeepseekV3Config(**_DEEPSEEK_V3, rope_scaling=_YARN),
    # Experts with biases, whose products with gate and up are clamped; sinks; windows in every other layer.
    "gpt_oss": lambda: t.GptOssConfig(
        **COMMON, head_dim=16, num_local_experts=8, num_experts_per_tok=2, sliding_window=24, pad_token_id=0
    ),
    # A function of vLLM's model that torch.compile decorates; parallel attention and MLP; windows.
    "cohere2": lambda: t.Cohere2Config(**{**COMMON, "num_hidden_layers": 4}, sliding_window=24),
    "olmo3": lambda: t.Olmo3Config(**{**COMMON, "num_hidden_layers": 4}, pad_token_id=0, sliding_window=24),
    "granite": lambda: t.GraniteConfig(
        **COMMON, embedding_multiplier=2.0, logits_scaling=2.0, residual_multiplier=0.5, attention_multiplier=0.3
    ),
    "gpt2": lambda: t.GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=64, n_layer=2, n_head=4, n_positions=MAX_POSITIONS, initializer_range=0.2
    ),
    "gpt_neox": lambda: t.GPTNeoXConfig(**COMMON),
    "falcon": lambda: t.FalconConfig(**COMMON, new_decoder_architecture=True, num_kv_heads=2),
}

# Models with images, of which the text is served.
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
WITH_IMAGES = {
    "gemma3_images": lambda: t.Gemma3Config(
        text_config={**COMMON, **GEMMA, "num_hidden_layers": 6},
        vision_config=_VISION,
        mm_tokens_per_image=4,
        image_token_index=300,
        boi_token_index=301,
        eoi_token_index=302,
        initializer_range=0.2,
    ),
    "mistral3_images": lambda: t.Mistral3Config(
        text_config=t.MistralConfig(**COMMON, sliding_window=None, head_dim=16),
        vision_config=t.PixtralVisionConfig(**_VISION),
        image_token_index=300,
    ),
}


def save(name: str, folder: Path, sizes: Mapping[str, int] | None = None) -> str:
    """Writes the model and a tokenizer with a token for each byte; sizes: in the place of the configuration's."""
    torch.manual_seed(0)
    config = {**CONFIGS, **WITH_IMAGES}[name]()
    config.update(dict(sizes or {}))
    auto = t.AutoModelForImageTextToText if name in WITH_IMAGES else t.AutoModelForCausalLM
    model = auto.from_config(config).float().eval()
    for tensor_name, tensor in model.named_buffers():
        if tensor_name.endswith("e_score_correction_bias"):  # zero otherwise
            tensor.normal_(std=0.3)
    if name == "gpt_oss":  # zero otherwise, and gates that no clamp would meet
        for tensor_name, tensor in model.named_parameters():
            if tensor_name.endswith("bias"):
                tensor.data.normal_(std=2.0)
    if name.startswith("gemma") and name not in WITH_IMAGES:
        model.config.hidden_act = "gelu_pytorch_tanh"  # as in the files of real checkpoints
    model.save_pretrained(folder)
    save_tokenizer(folder, ("<|end|>",) if name == "gpt_oss" else ())  # which vLLM looks for since 0.17
    return str(folder)


def save_tokenizer(folder: Path, tokens: Sequence[str] = (), *, types: bool = False) -> None:
    """Writes ``tokenizer(tokens)``; types: with BERT's form of one text and of two, told by types."""
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if types else [])]
    saved = tokenizer(tokens, pad_token="<unk>", model_input_names=names)
    if types:
        saved.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s>:0 $A:0 </s>:0",
            pair="<s>:0 $A:0 </s>:0 $B:1 </s>:1",
            special_tokens=[("<s>", 1), ("</s>", 2)],
        )
    saved.save_pretrained(folder)


def tokenizer(tokens: Sequence[str] = (), **options: Any) -> t.PreTrainedTokenizerFast:
    """A token for each byte, and behind them ``tokens``, the first of which is FIRST_TOKEN."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *alphabet, *tokens])}
    found = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    return t.PreTrainedTokenizerFast(
        tokenizer_object=found, unk_token="<unk>", bos_token="<s>", eos_token="</s>", **options
    )


def prompts(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


class Reference:
    """transformers' model of a folder, in float32 unless another dtype is given.

    cache: the dtype that keys and values are rounded to before attention, for a Llama.
    """

    def __init__(self, folder: str, dtype: torch.dtype = torch.float32, cache: torch.dtype | None = None) -> None:
        options = {}
        if cache is not None:
            attend = modeling_llama.eager_attention_forward

            def rounded(module, query, key, value, *others, **named):
                return attend(
                    module, query, key.to(cache).to(key.dtype), value.to(cache).to(value.dtype), *others, **named
                )

            modeling_llama.eager_attention_forward = rounded
            options["attn_implementation"] = "eager"
        config = t.AutoConfig.from_pretrained(folder)
        if getattr(config, "attn_logit_softcapping", None):
            options["attn_implementation"] = "eager"  # others leave the cap out
        with_images = hasattr(config, "vision_config")
        auto = t.AutoModelForImageTextToText if with_images else t.AutoModelForCausalLM
        self.model = auto.from_pretrained(folder, dtype=dtype, **options).eval()

    @torch.no_grad()
    def greedy(self, prompt: list[int], new: int) -> list[int]:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        # Static generation settings of a checkpoint do not matter here: eos is suppressed by min_new_tokens alone.
        self.model.generation_config.eos_token_id = None
        return self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """float32[len(token_ids), vocab_size]."""
        return self.model(torch.tensor([token_ids])).logits[0].float()
