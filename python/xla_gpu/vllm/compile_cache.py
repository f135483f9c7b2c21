"""What of compiling is kept between starts: whole executables, and XLA's choices of kernels for matrix products.

The library's PJRT adapter keeps the executables (see docs/reliability.md). The choices serve where a program changed,
with other buckets for example: finding them is what takes most of a compilation. Of each configuration that has started
a record names its executables, which the next start loads in threads while the weights are read.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
from collections.abc import MutableMapping
from importlib import metadata
from pathlib import Path
from typing import Any

from .._core.environment import pjrt_device
from .._runtime import executable_cache
from . import draft_heads

# The folder; empty: nothing is kept.
ENVIRONMENT = "XLA_GPU_VLLM_CACHE"

_EXECUTABLES = "XLA_GPU_EXECUTABLE_CACHE"
_FLAG = "--xla_gpu_per_fusion_autotune_cache_dir"
_DISTRIBUTIONS = ("torch_xla", "jax-cuda12-pjrt", "jax-cuda13-pjrt")


def use(environ: MutableMapping[str, str]) -> Path | None:
    """Sets the variable and XLA's flag for both caches, before the client starts; returns the folder.

    The versions of torch_xla and of the plug-in name the folder; the rest is in the keys: the GPU, the program, the
    flags. What the user set is kept.
    """
    folder = environ.get(ENVIRONMENT, "~/.cache/xla_gpu/vllm")
    if pjrt_device(environ) != "GPU" or not folder:
        return None
    versions = []
    for name in _DISTRIBUTIONS:
        try:
            versions.append(f"{name}-{metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    path = Path(os.path.expanduser(folder), "_".join(versions))
    try:
        for name in ("autotune", "executables", "starts"):
            (path / name).mkdir(parents=True, exist_ok=True)
    except OSError:
        return None  # a home that cannot be written: compile as without a cache
    flags = environ.get("XLA_FLAGS", "")
    if _FLAG not in flags:
        environ["XLA_FLAGS"] = f"{flags} {_FLAG}={path / 'autotune'}".strip()
    environ.setdefault(_EXECUTABLES, str(path / "executables"))
    return path


class Start:
    """The record of this configuration's last start; without a folder there is none.

    Attributes:
      executables: names of the files that the start took executables from, or wrote.
      kv_cache_bytes: of its KV caches, whose shape is part of the model's programs; 0: unknown.
    """

    # Memory that differs by less between two starts is not worth other programs: loading executables takes some, for
    # example, which compiling does not.
    _MORE_SHARE = 1 / 256
    _LESS_BYTES = 64 << 20

    def __init__(self, folder: Path | None, config: Any) -> None:
        self._path = None if folder is None else folder / "starts" / f"{configuration_hash(config)}.json"
        self.executables: list[str] = []
        self.kv_cache_bytes = 0
        try:
            found = json.loads(self._path.read_text()) if self._path is not None else {}
            self.executables = [str(name) for name in found.get("executables", ())]
            self.kv_cache_bytes = int(found.get("kv_cache_bytes", 0))
        except (OSError, ValueError, TypeError, AttributeError):
            pass  # no start before, or a file of another kind

    def preload(self, device: Any, threads: int) -> None:
        """Begins to load the executables in threads."""
        if not self.executables:
            return
        import torch
        import torch_xla

        import xla_gpu.torch as xg

        xg.register_targets()  # an executable that calls handlers is loaded where they are known
        torch.zeros(1, device=device)
        torch_xla.sync()  # the adapter knows the client then
        atexit.register(executable_cache.finish_preloading)  # where the start fails
        executable_cache.preload(self.executables, threads)

    def choose_cache_bytes(self, available: int) -> int:
        """Bytes for KV caches: as many as last time, if the available ones are hardly more or fewer."""
        if -self._LESS_BYTES <= available - self.kv_cache_bytes <= available * self._MORE_SHARE:
            available = self.kv_cache_bytes or available
        self.kv_cache_bytes = available
        return available

    def finish(self) -> None:
        """Ends the threads, and writes the record of this start."""
        executable_cache.finish_preloading()
        if self._path is None:
            return
        used = sorted(set(executable_cache.used()))
        text = json.dumps({"executables": used, "kv_cache_bytes": self.kv_cache_bytes})
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        try:
            temporary.write_text(text)
            temporary.replace(self._path)
        except OSError:
            pass


def configuration_hash(config: Any) -> str:
    """Names a VllmConfig as far as programs depend on it. Programs have keys of their own: it need not be complete."""
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    described = model.hf_config.to_dict()
    described.pop("_name_or_path", None)
    numbers = [model.max_model_len, model.max_logprobs, scheduler.max_num_seqs, scheduler.max_num_batched_tokens]
    numbers += [cache.block_size, cache.gpu_memory_utilization, config.parallel_config.tensor_parallel_size]
    if config.parallel_config.enable_expert_parallel:
        described["whole_experts"] = True
    if config.speculative_config is not None:
        numbers.append(config.speculative_config.num_speculative_tokens)
        if draft_heads.has_head(config):
            described["head"] = config.speculative_config.draft_model_config.hf_config.to_dict()
    if config.lora_config is not None:
        numbers += [config.lora_config.max_loras, config.lora_config.max_lora_rank]
    options = [model.dtype, cache.cache_dtype, model.quantization, model.logprobs_mode, config.additional_config]
    text = json.dumps([described, numbers, options], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
