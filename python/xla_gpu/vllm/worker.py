"""vLLM's worker: one process, with one device or with several as one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment, parallel_state
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.worker_base import WorkerBase

from . import compile_cache, memory, tensor_parallel
from .options import Options

if TYPE_CHECKING:
    from .lora import Adapters

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is below its own name


class Worker(WorkerBase):  # type: ignore[misc]
    """Starts torch_xla and passes vLLM's calls on to the runner."""

    def init_device(self) -> None:
        """Starts torch_xla's client."""
        cache = self.cache_config
        memory.set_pool(os.environ, cache.gpu_memory_utilization, cache.kv_cache_memory_bytes)
        memory.keep_activations(os.environ)
        devices = self.parallel_config.tensor_parallel_size
        folder = compile_cache.use(os.environ)
        if folder is not None:
            logger.info("XLA's choices of kernels are kept in %s", folder)
        self._last_start = compile_cache.Start(folder, self.vllm_config)
        tensor_parallel.prepare(os.environ, devices)
        # Imported here: the import reads the environment, and starts the client soon after.
        import torch_xla
        import torch_xla.backends

        if self.model_config.dtype == torch.float32:
            # Otherwise XLA multiplies float32 matrices in TF32, with 10 bits of mantissa.
            torch_xla.backends.set_mat_mul_precision("highest")
        torch.set_grad_enabled(False)
        tensor_parallel.start(devices)
        # One rank, which has all devices.
        init_distributed_environment(
            world_size=1,
            rank=self.rank,
            local_rank=self.local_rank,
            distributed_init_method=self.distributed_init_method,
            backend="gloo",
        )
        if self.model_config.get_num_experts() > 1:
            _forget_groups_without_experts()
        ensure_model_parallel_initialized(1, 1)
        from . import moe  # noqa: F401  (registers its layers)
        from .model_runner import ModelRunner
        from .pooling import PoolingRunner

        self.device = torch_xla.device()
        self.device_config.device = self.device
        torch.manual_seed(self.model_config.seed)
        runner = PoolingRunner if self.model_config.runner_type == "pooling" else ModelRunner
        self.model_runner = runner(self.vllm_config, self.device)

    def load_model(self) -> None:
        """Loads the weights."""
        self._room = memory.Room(self.vllm_config, self.device)
        self._last_start.preload(self.device, Options.of(self.vllm_config).compile_threads)
        self.model_runner.load_model()

    def get_model(self) -> Any:
        """The model."""
        return self.model_runner.model

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """What each layer keeps."""
        from .kv_cache import layer_specs

        return layer_specs(self.vllm_config)

    def determine_available_memory(self) -> int:
        """Bytes for KV caches."""
        available = memory.for_kv_caches(self.vllm_config, self.device, self._room.bytes)
        return self._last_start.choose_cache_bytes(available)

    def update_max_model_len(self, max_model_len: int) -> None:
        """Called where vLLM 0.14 chose a length that the KV caches have room for (``--max-model-len -1``)."""
        self.model_config.max_model_len = max_model_len

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Makes the caches."""
        self.model_runner.initialize(kv_cache_config)
        self._room.give_back()

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """Notes the caches' size."""
        self.cache_config.num_gpu_blocks = num_gpu_blocks
        self.cache_config.num_cpu_blocks = num_cpu_blocks

    def compile_or_warm_up_model(self) -> None:
        """Compiles all programs."""
        self.model_runner.warm_up()
        self._last_start.finish()

    def execute_model(self, scheduler_output: Any) -> Any:
        """Launches a step's model."""
        return self.model_runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Chooses a step's tokens."""
        return self.model_runner.sample_tokens(grammar_output)

    def take_draft_token_ids(self) -> Any:
        """Drafts of the next step's tokens."""
        return self.model_runner.take_draft_token_ids()

    def reset_encoder_cache(self) -> None:
        """Called where vLLM 0.16 has forgotten which images were encoded (``/reset_encoder_cache``)."""
        if self.model_runner.images is not None:
            self.model_runner.images.let_all_go()

    def add_lora(self, lora_request: Any) -> bool:
        """Reads a LoRA adapter."""
        return self._adapters().add(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Forgets a LoRA adapter."""
        return self._adapters().remove(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """Keeps a LoRA adapter in memory."""
        return self._adapters().pin(lora_id)

    def list_loras(self) -> set[int]:
        """The LoRA adapters in memory."""
        return self._adapters().ids()

    def _adapters(self) -> Adapters:
        adapters: Adapters | None = self.model_runner.adapters
        if adapters is None:
            raise RuntimeError("xla_gpu.vllm: adapters: expected --enable-lora at the server's start")
        return adapters

    def execute_dummy_batch(self) -> None:
        """Called where another data-parallel engine has requests and this one none. Their models share nothing."""

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Of vLLM's tasks."""
        return self.model_runner.supported_tasks()

    def profile(self, is_start: bool = True) -> None:
        """VLLM's profiler endpoints are for CUDA."""
        raise NotImplementedError(
            "xla_gpu.vllm: profiling through vLLM is not supported; use torch_xla.debug.profiler, see docs/vllm.md"
        )


def _forget_groups_without_experts() -> None:
    """Lets groups be made anew where an engine of this process, without experts, has left out those of experts.

    vLLM 0.14 makes these for models with experts alone. All have one rank.
    """
    made = parallel_state.model_parallel_is_initialized()
    if made and parallel_state._EP is None:
        parallel_state.destroy_model_parallel()
