"""What of vLLM's options this back end does not support: refused at start, by the option's name."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from . import buckets, draft_heads, eagle, images, ngram
from .options import Options

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
QUANTIZATION = "xla_gpu"  # what quantization.py makes of the methods that are taken
CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")

# Of --load-format: weights that no layer of this back end takes, or loaders that copy to CUDA tensors themselves.
LOAD_FORMATS = ("bitsandbytes", "fastsafetensors", "gguf", "tensorizer")

# Models with images whose text is that of a model of text in them.
TEXT_OF = (
    "Gemma3ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "AyaVisionForConditionalGeneration",
    *images.MROPE,
)


def refusals(config: Any) -> list[str]:
    """For each option of a VllmConfig that is not supported a text: option, what is expected, what came."""
    model, scheduler = config.model_config, config.scheduler_config
    found = _parallel_refusals(config)
    if config.lora_config is not None:
        found += _lora_refusals(config)
    if (speculative := config.speculative_config) is not None:
        if speculative.method in draft_heads.METHODS:
            found += draft_heads.refusals(config)
        elif speculative.method != ngram.METHOD:
            found += _unexpected("--speculative-config: method", "ngram, eagle, eagle3 or mtp", speculative.method)
        # Until vLLM 0.16; since 0.16; since 0.17.
        for name in ("disable_by_batch_size", "parallel_drafting", "draft_load_config"):
            found += _given(f"--speculative-config: {name}", getattr(speculative, name, None))
        method = getattr(speculative, "rejection_sample_method", "strict")  # of vLLM 0.18
        found += _unexpected("--speculative-config: rejection_sample_method", "strict", method)
    found += _given("--kv-transfer-config", config.kv_transfer_config)
    found += _given("--ec-transfer-config", config.ec_transfer_config)
    found += _given("--weight-transfer-config", getattr(config, "weight_transfer_config", None))  # of vLLM 0.16
    found += _cache_refusals(config)
    load_format = str(config.load_config.load_format)
    # vLLM sets it for a checkpoint of that quantisation, which is refused below.
    if load_format in LOAD_FORMATS and (model is None or model.quantization != load_format):
        found += _unexpected("--load-format", f"none of {', '.join(LOAD_FORMATS)}", load_format)
    if scheduler.enable_chunked_prefill is False and not pools(model):  # vLLM's default for some poolers
        found += _unexpected("--enable-chunked-prefill", True, False)
    if model is not None:
        found += _model_refusals(config)
        if pools(model):
            found += _pooling_refusals(config)
    try:
        chosen = Options.of(config).token_buckets
        buckets.token_buckets(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, chosen)
    except ValueError as error:
        found.append(str(error).removeprefix("xla_gpu.vllm: "))
    return found


def pools(model: Any) -> bool:
    """Whether vLLM's ModelConfig, or None, is of a model that pools its prompts, and generates nothing."""
    return model is not None and model.runner_type == "pooling"


def takes_token_types(model: Any) -> bool:
    """Whether the model of a ModelConfig is told which text of a pair a token is of."""
    from vllm.model_executor.model_loader import get_model_cls

    return "token_type_ids" in inspect.signature(get_model_cls(model).forward).parameters


def _pooling_refusals(config: Any) -> list[str]:
    model, found = config.model_config, []
    reason = "a pooling that reads all rows"
    if model.attn_type == "encoder_only":
        reason = "attention in both directions"
        if getattr(model.hf_config, "moe_every_n_layers", 0):  # of Nomic's, by a kernel of vLLM's own
            found.append(f"a mixture of experts in {model.architecture}: not supported")
        if config.scheduler_config.enable_chunked_prefill:
            found.append(f"--enable-chunked-prefill: expected false with {reason}, got true")
        if (size := config.parallel_config.tensor_parallel_size) > 1:
            found.append(f"--tensor-parallel-size: expected 1 with {reason}, got {size}")
    if config.cache_config.enable_prefix_caching and not model.is_prefix_caching_supported:
        found.append(f"--enable-prefix-caching: expected false with {reason}, got true")
    if config.lora_config is not None:
        found.append("--enable-lora: expected a model that generates, got --runner pooling")
    if config.speculative_config is not None:
        found.append("--speculative-config: expected a model that generates, got --runner pooling")
    return found


def _unexpected(option: str, expected: Any, got: Any) -> list[str]:
    return [f"{option}: expected {expected}, got {got}"] if got != expected else []


def _given(option: str, got: Any) -> list[str]:
    return [f"{option}: not supported"] if got is not None and got is not False else []


def _parallel_refusals(config: Any) -> list[str]:
    model, parallel = config.model_config, config.parallel_config
    found = _tensor_parallel_refusals(config) if parallel.tensor_parallel_size > 1 else []
    found += _unexpected("--pipeline-parallel-size", 1, parallel.pipeline_parallel_size)
    if parallel.data_parallel_size > 1:
        found += _unexpected("--data-parallel-backend", "mp", parallel.data_parallel_backend)
        if model is not None and model.get_num_experts() > 1:
            found.append("--data-parallel-size: vLLM divides experts over data-parallel ranks; expected 1 with experts")
    found += _unexpected("--prefill-context-parallel-size", 1, parallel.prefill_context_parallel_size)
    found += _unexpected("--decode-context-parallel-size", 1, parallel.decode_context_parallel_size)
    found += _unexpected("--nnodes", 1, parallel.nnodes)
    found += _given("--enable-eplb", parallel.enable_eplb)
    found += _given("--enable-dbo", parallel.enable_dbo)
    # Of vLLM 0.18: leaves out weights while they are loaded, which are divided here afterwards.
    found += _given("--enable-ep-weight-filter", getattr(parallel, "enable_ep_weight_filter", None))
    if (rows := getattr(parallel, "ubatch_size", 0)) > 1:  # of vLLM 0.14
        found += _unexpected("--ubatch-size", 0, rows)
    # "mp" is what vLLM sets itself for several devices.
    executors = (None, "uni", "mp") if parallel.world_size > 1 else (None, "uni")
    if parallel.distributed_executor_backend not in executors:
        found += _unexpected("--distributed-executor-backend", "uni", parallel.distributed_executor_backend)
    return found


def _cache_refusals(config: Any) -> list[str]:
    model, cache = config.model_config, config.cache_config
    found = _offload_refusals(config)
    found += _given("--kv-offloading-size", cache.kv_offloading_size)
    found += _given("--calculate-kv-scales", cache.calculate_kv_scales)
    found += _given("--kv-sharing-fast-prefill", cache.kv_sharing_fast_prefill)
    # vLLM's "bfloat16" is what the caches of such a model have anyway.
    bfloat16 = cache.cache_dtype == "bfloat16" and model is not None and model.dtype == torch.bfloat16
    if model is not None and model.use_mla and cache.cache_dtype != "auto" and not bfloat16:
        found.append(
            "--kv-cache-dtype: expected auto with multi-head latent attention (MLA), whose caches have the model's "
            f"dtype, got {cache.cache_dtype}"
        )
    elif cache.cache_dtype not in CACHE_DTYPES and not bfloat16:
        found += _unexpected("--kv-cache-dtype", " or ".join(CACHE_DTYPES), cache.cache_dtype)
    if model is not None and (blocks := cache.num_gpu_blocks_override) is not None:
        # One block is nobody's.
        least = -(-model.max_model_len // cache.block_size) + 1
        if blocks < least:
            found.append(
                f"--num-gpu-blocks-override: expected at least {least} for --max-model-len {model.max_model_len}, "
                f"got {blocks}: a request of that length would wait for ever"
            )
    return found


def _offload_refusals(config: Any) -> list[str]:
    """Of options that keep weights in the host's memory."""
    offload = getattr(config, "offload_config", None)
    if offload is None:  # before vLLM 0.17
        return _unexpected("--cpu-offload-gb", 0, config.cache_config.cpu_offload_gb)
    found = _unexpected("--cpu-offload-gb", 0, offload.uva.cpu_offload_gb)
    found += _unexpected("--offload-group-size", 0, offload.prefetch.offload_group_size)
    return found + _unexpected("--offload-backend", "auto", offload.offload_backend)


def _lora_refusals(config: Any) -> list[str]:
    model, lora, found = config.model_config, config.lora_config, []
    if lora.default_mm_loras:
        found.append("--default-mm-loras: not supported")
    # Of vLLM 0.14.
    found += _given("--enable-tower-connector-lora", getattr(lora, "enable_tower_connector_lora", None))
    if model is None:
        return found
    if lora.lora_dtype not in ("auto", None, model.dtype, str(model.dtype).removeprefix("torch.")):
        found.append(f"--lora-dtype: expected the model's, {model.dtype}, got {lora.lora_dtype}")
    if model.is_multimodal_model:
        from vllm.model_executor.model_loader import get_model_cls
        from vllm.model_executor.models import supports_lora

        if not supports_lora(get_model_cls(model)):
            found.append(f"--enable-lora: expected a model that vLLM has LoRA for, got {model.architecture}")
    return found


def _tensor_parallel_refusals(config: Any) -> list[str]:
    model, parallel, size = config.model_config, config.parallel_config, config.parallel_config.tensor_parallel_size
    found = []
    if parallel.data_parallel_size > 1:
        found.append(f"--data-parallel-size: expected 1 with --tensor-parallel-size {size}")
    if config.additional_config.get("compile_threads", 1) != 1:
        found.append(f"additional_config: compile_threads: expected 1 with --tensor-parallel-size {size}")
    if model is None:
        return found
    if parallel.enable_expert_parallel and (experts := model.get_num_experts()) % size:
        found.append(
            f"--enable-expert-parallel: expected --tensor-parallel-size to divide the model's {experts} experts, "
            f"got {size}"
        )
    # Latents have no heads, and vLLM sees to it that queries' can be divided.
    parts = {} if model.use_mla else {"the model's": (model, "kv heads")}
    if config.speculative_config is not None and config.speculative_config.method in eagle.METHODS:
        # MTP's heads are the model's. What divides them would divide these matrices.
        head = config.speculative_config.draft_model_config
        parts["the head's"] = head, "kv heads (self_attn.k_proj and v_proj)"
    for owner, (part, name) in parts.items():
        kv_heads = part.get_total_num_kv_heads()
        if kv_heads % size and size % kv_heads:
            found.append(
                f"--tensor-parallel-size: expected a number that divides {owner} {kv_heads} {name}, or is a "
                f"multiple of them, got {size}"
            )
    return found


def _model_refusals(config: Any) -> list[str]:
    found: list[str] = []
    model = config.model_config
    own = model.architecture in (model.architectures or ())
    if model.is_multimodal_model and model.architecture in TEXT_OF and not own:
        return found  # of the text in a model with images, whose own configuration was checked before
    if model.max_model_len < 1:
        found.append(f"--max-model-len: expected a positive number, got {model.max_model_len}")
    if model.seed is not None and model.seed < 0:
        found.append(f"--seed: expected a number from 0, got {model.seed}")
    if model.runner_type not in ("generate", "pooling"):
        found.append(f"--runner: expected generate or pooling, got {model.runner_type}")
    elif model.runner_type == "generate" and model.convert_type != "none":
        found.append(f"--convert: expected none without --runner pooling, got {model.convert_type}")
    if model.quantization not in (None, QUANTIZATION):
        found.append(
            "--quantization: expected none, fp8, or a checkpoint of compressed-tensors, fp8, awq, gptq or mxfp4, "
            f"got {model.quantization}"
        )
    if model.using_transformers_backend():
        # Its programs copy the KV caches in every step.
        found.append(f"--model-impl: expected a model of vLLM's own, got transformers' {model.architectures[0]}")
    if model.dtype not in DTYPES:
        found.append(f"--dtype: expected float32, float16 or bfloat16, got {model.dtype}")
    if model.is_multimodal_model:
        found += _multimodal_refusals(config)
    traits = {
        "--enable-prompt-embeds": model.enable_prompt_embeds,
        "--enable-sleep-mode": model.enable_sleep_mode,
        "--enable-return-routed-experts": getattr(model, "enable_return_routed_experts", False),  # of vLLM 0.14
        "a state-space or hybrid model": model.is_hybrid or model.has_inner_state,
        "an encoder-decoder model": model.is_encoder_decoder,
        "a model without attention": model.is_attention_free,
        "M-RoPE positions": model.uses_mrope and model.architecture not in images.MROPE,
        "chunked local attention": bool(getattr(model, "attention_chunk_size", None)),
    }
    found += [f"{name}: not supported" for name, given in traits.items() if given]
    if model.logits_processors:
        found.append(
            "--logits-processors: not supported: logits are results of an XLA program, and stay on the device; of "
            "requests logit_bias, allowed_token_ids, bad_words, min_p and structured outputs are"
        )
    if getattr(model.hf_text_config, "index_topk", None) is not None:
        found.append("sparse attention (index_topk, DeepSeek V3.2): not supported")
    return found


def _multimodal_refusals(config: Any) -> list[str]:
    if (name := config.model_config.architecture) not in TEXT_OF:
        return [f"a model with images or sound ({name}): expected text alone"]
    if getattr(config.model_config.multimodal_config, "mm_encoder_only", False):  # of vLLM 0.15
        return ["--mm-encoder-only: not supported"]
    return images.refusals(config) if images.are_served(config.model_config) else []


def check(config: Any) -> None:
    """Raises ValueError for a VllmConfig with something that is not supported."""
    if found := refusals(config):
        raise ValueError(f"xla_gpu.vllm: {'; '.join(found)} (see docs/vllm.md)")
