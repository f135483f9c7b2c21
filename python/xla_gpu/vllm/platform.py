"""What vLLM asks about the device."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.platforms.interface import Platform, PlatformEnum

from .._core.environment import pjrt_device
from . import images, request_checks, request_limits, supported
from .options import Options

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is below its own name

BLOCK_SIZE = 16


def choose_start_method(environ: MutableMapping[str, str]) -> None:
    """Has vLLM spawn the engine's process where this one has started the device's runtime, which survives no fork.

    Elsewhere vLLM forks, as is its default, and the engine's process need not import everything again.
    """
    torch_xla = sys.modules.get("torch_xla")
    if torch_xla is not None and torch_xla._XLAC._xla_runtime_is_initialized():
        environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"


class XlaGpuPlatform(Platform):  # type: ignore[misc]
    """torch_xla, on the device that PJRT_DEVICE names."""

    _enum = PlatformEnum.OOT
    device_name = "xla"  # vLLM makes torch.device(f"{device_name}:{rank}") of it
    device_type = "xla"
    dispatch_key = "XLA"
    dist_backend = "gloo"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """Lets vLLM find the quantisation of checkpoints; called before it reads a model's configuration."""
        from vllm.model_executor.models import registry

        from . import quantization  # noqa: F401

        # vLLM imports the module of a model in another process, so that this one does not initialise CUDA. Here nothing
        # would, and the other process takes 15 seconds to import vLLM.
        registry._run_in_subprocess = lambda function: function()

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Refuses what is not supported and sets what vLLM leaves to the platform."""
        from vllm.config import CompilationMode, CUDAGraphMode

        if vllm_config.cache_config.block_size is None:
            vllm_config.cache_config.block_size = BLOCK_SIZE
        if getattr(vllm_config.model_config, "quantization", None) == "fp8":
            from . import online_quantization

            online_quantization.take(vllm_config)
        images.leave_out_videos(vllm_config.model_config)
        supported.check(vllm_config)
        compilation = vllm_config.compilation_config
        # The runner compiles whole steps itself.
        compilation.mode = CompilationMode.NONE
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        compilation.custom_ops = ["none"]
        parallel = vllm_config.parallel_config
        # The worker's process has all devices; vLLM's default for several is a process for each.
        parallel.distributed_executor_backend = "uni"
        if parallel.worker_cls == "auto":
            parallel.worker_cls = "xla_gpu.vllm.worker.Worker"
        # The tokens of a step are what drafts of the next one are made from (vLLM decides the same), and what a prompt
        # is pooled to ends its request.
        waits = vllm_config.speculative_config is not None or supported.pools(vllm_config.model_config)
        vllm_config.scheduler_config.async_scheduling = Options.of(vllm_config).async_scheduling and not waits
        if images.are_served(vllm_config.model_config):
            # The engine's process would be told of an image once. Where that request is refused the engine has no image
            # for the next one, which ends its input (vLLM 0.12, 0.13) or is an error (0.14).
            vllm_config.model_config.multimodal_config.mm_processor_cache_gb = 0
            request_checks.watch_renderer()
        request_limits.RequestLimits.keep(vllm_config)
        from . import scheduler

        scheduler.choose(vllm_config)
        choose_start_method(os.environ)
        logger.info_once("xla_gpu.vllm: serving through torch_xla, PJRT_DEVICE=%s", pjrt_device())

    @classmethod
    def validate_request(cls, prompt: Any, params: Any, processed_inputs: Any = None) -> None:
        """Raises ValueError for a request that a step could not take; the server answers with 400.

        Since vLLM 0.18 ``prompt`` is what the prompt became, and there is no other argument.
        """
        from vllm.sampling_params import SamplingParams

        processed_inputs = prompt if processed_inputs is None else processed_inputs
        if request_limits.has_more_to_come():
            raise ValueError("xla_gpu.vllm: a prompt: expected it whole, got a part of one (StreamingInput)")
        prompt_token_ids = processed_inputs.get("prompt_token_ids") or []
        limits = request_limits.of_the_request_being_processed()
        if isinstance(params, SamplingParams):
            request_checks.check(params, prompt_token_ids, limits.vocab_size)
        else:  # of a pooling model
            request_checks.check_prompt(prompt_token_ids, limits.vocab_size)
            request_checks.check_late_interaction(params)
            request_checks.check_token_types(params, prompt_token_ids, limits.takes_token_types)
        request_checks.check_images(prompt, processed_inputs, limits.image_tokens, limits.image_room)

    @classmethod
    def import_kernels(cls) -> None:
        """VLLM's own kernels are for CUDA tensors."""

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, *others: Any, **named: Any) -> str:
        """The attention backend of a layer; the second argument was the head's size before vLLM 0.13."""
        before = ("dtype", "kv_cache_dtype", "block_size", "use_mla")
        named = dict(zip(before, others, strict=False)) | named
        if getattr(attn_selector_config, "use_mla", named.get("use_mla", False)):
            return "xla_gpu.vllm.latent_attention.XlaGpuLatentBackend"
        return "xla_gpu.vllm.attention.XlaGpuAttentionBackend"

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """For logs and reports."""
        return f"XLA {pjrt_device()}"

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """One process has one device."""

    @classmethod
    def inference_mode(cls) -> Any:
        """torch_xla's tensors are no inference tensors."""
        return torch.no_grad()

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """PJRT stages transfers itself."""
        return False

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Raises ValueError for a dtype that the kernels do not take."""
        if dtype not in supported.DTYPES:
            raise ValueError(f"xla_gpu.vllm: --dtype: expected float32, float16 or bfloat16, got {dtype}")

    @classmethod
    def can_update_inplace(cls) -> bool:
        """Whether weights may be updated in place; XLA's tensors are values."""
        return False

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """Sliding-window layers have block tables of their own and keep their window alone."""
        return True
