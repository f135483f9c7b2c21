"""vLLM at the shape of a known model with random weights, as vllm_steps.py and vllm_serving.py start it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from argument_types import positive

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# 24 layers, each second one with a window; experts in mxfp4.
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
QWEN_3_0_6B = {  # and of the embedding model of that size
    **LLAMA_3_8B,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "vocab_size": 151669,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
}
QWEN_3_30B_A3B = {
    **QWEN_3_0_6B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
# Of latents; the first of its layers has no experts.
DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 40.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
# 61 layers, the first three without experts.
DEEPSEEK_V3 = {
    **DEEPSEEK_V2_LITE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "vocab_size": 129280,
    "rope_scaling": {**DEEPSEEK_V2_LITE["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0},
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": False}
QUANTIZATIONS = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4, "input_activations": None}},
    },
}
MODELS = {
    "llama-3-8b": LLAMA_3_8B,
    "gpt-oss-20b": GPT_OSS_20B,
    "deepseek-v2-lite": DEEPSEEK_V2_LITE,
    "deepseek-v3": {**DEEPSEEK_V3, "quantization_config": QUANTIZATIONS["fp8"]},
    "qwen3-0.6b": QWEN_3_0_6B,
    "qwen3-30b-a3b": QWEN_3_30B_A3B,
    **{f"qwen3-30b-a3b-{n}": {**QWEN_3_30B_A3B, "quantization_config": q} for n, q in QUANTIZATIONS.items()},
}
TINY = {
    **LLAMA_3_8B,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}


def emit(**values) -> None:
    print("R " + json.dumps(values), flush=True)


def add_options(parser: argparse.ArgumentParser, *, max_seqs: int) -> None:
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to check the script")
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b", help="whose shape (default %(default)s)")
    parser.add_argument("--layers", type=positive, help="in the place of the model's number of them")
    parser.add_argument("--max-tokens", type=positive, default=8192, help="of a step (default %(default)s)")
    parser.add_argument("--max-seqs", type=positive, default=max_seqs, help="in a step (default %(default)s)")
    parser.add_argument(
        "--buckets", type=positive, nargs="*", help="token buckets of the XLA back end (default: its own)"
    )


@contextlib.contextmanager
def started(arguments: argparse.Namespace, **options: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Starts vLLM in this process; gives it, and its version with the seconds that the start took."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that its runner can be timed
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM, __version__

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model_of(arguments)))
        start = time.perf_counter()
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=4096,
            max_num_seqs=arguments.max_seqs,
            max_num_batched_tokens=arguments.max_tokens,
            enable_prefix_caching=False,
            additional_config={"token_buckets": arguments.buckets} if arguments.buckets else {},
            **options,
        )
        if options.get("speculative_config"):
            from xla_gpu.vllm.speculation import take_drafts

            take_drafts(llm)
        yield llm, {"vllm": __version__, "start_s": round(time.perf_counter() - start, 1)}


def model_of(arguments: argparse.Namespace) -> dict[str, Any]:
    model = TINY if arguments.tiny else MODELS[arguments.model]
    return model if arguments.layers is None else {**model, "num_hidden_layers": arguments.layers}
