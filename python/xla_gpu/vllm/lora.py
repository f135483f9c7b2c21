"""LoRA adapters: read by vLLM's loader, kept on the host, and given a slot on the device while requests use them."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import get_adapter_absolute_path
from vllm.model_executor.model_loader import get_model_cls
from vllm.model_executor.models import supports_lora

from .lora_layers import LoraLayers, Matrices

try:
    from vllm.lora.lora_model import LoRAModel
except ImportError:  # vLLM 0.12
    from vllm.lora.models import LoRAModel

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is below its own name

NO_ADAPTER = -1
FAILED = -2

# Of adapter_config.json: what changes an adapter's numbers, and vLLM's loader does not read.
_NOT_READ = ("rank_pattern", "alpha_pattern", "layer_replication", "trainable_token_indices", "alora_invocation_tokens")

# What vLLM calls the model of text in one that takes images too.
_OF_TEXT = "language_model."

Adapter = dict[str, Matrices]


class Adapters:
    """The adapters of an engine.

    Attributes:
      layers: of the model, with the adapters on the device.
      changes: counts what may have changed an adapter's slot.
    """

    def __init__(
        self, model: nn.Module, config: VllmConfig, device: torch.device, tower: nn.Module | None = None
    ) -> None:
        """Raises ValueError for a model that vLLM has no adapters for.

        Args:
          model: of text.
          config: vLLM's.
          device: an XLA device.
          tower: what is beside the model in one that takes images too; None: no image is taken.
        """
        whole: Any = get_model_cls(config.model_config) if config.model_config.is_multimodal_model else model
        if not supports_lora(whole):
            name = getattr(whole, "__name__", type(whole).__name__)
            raise ValueError(f"xla_gpu.vllm: --enable-lora: expected a model that vLLM has LoRA for, got {name}")
        self._config = config
        # Names in an adapter are those of the whole model.
        self._mapper = getattr(whole, "hf_to_vllm_mapper", None)
        self._prefix = "" if whole is model else _OF_TEXT
        beside = [] if tower is None else [name for name, _ in tower.named_modules()]
        self._beside = {name.rpartition(".")[2] for name in beside}
        self.layers = LoraLayers(model, config, device)
        self._capacity = max(config.lora_config.max_cpu_loras or 0, self.layers.slots)
        # By id, those that were used last at the end.
        self._loaded: OrderedDict[int, Adapter] = OrderedDict()
        self._slots: OrderedDict[int, int] = OrderedDict()
        self._pinned: set[int] = set()
        self.changes = 0

    def add(self, request: Any) -> bool:
        """Reads an adapter; false where it is known already.

        Args:
          request: a LoRARequest.

        Raises:
          ValueError: it is not there, or is not one that this engine takes.
        """
        if request.lora_int_id in self._loaded:
            self._loaded.move_to_end(request.lora_int_id)
            return False
        self._load(request, ())
        return True

    def remove(self, adapter: int) -> bool:
        """Forgets an adapter; false where it is not known. A request that still has it reads it again."""
        if adapter not in self._loaded:
            return False
        del self._loaded[adapter]
        self._slots.pop(adapter, None)
        self._pinned.discard(adapter)
        self.changes += 1
        return True

    def pin(self, adapter: int) -> bool:
        """Keeps an adapter on the host, whatever else is read; false where it is not known."""
        if adapter in self._loaded:
            self._pinned.add(adapter)
        return adapter in self._loaded

    def ids(self) -> set[int]:
        """Of the adapters that are known."""
        return set(self._loaded)

    def slots(self, requests: Sequence[Any]) -> list[int]:
        """The slot of each LoRARequest's adapter; adapters that have none get one.

        Of a step's requests: vLLM sees to it that they have no more adapters than there are slots. NO_ADAPTER for None,
        FAILED where the adapter was to be read again and could not.
        """
        by_id = {request.lora_int_id: request for request in requests if request is not None}
        for adapter, request in by_id.items():
            if adapter not in self._loaded and not self._is_read_again(request, by_id):
                continue
            self._loaded.move_to_end(adapter)
            if adapter not in self._slots:
                self._slots[adapter] = self._free_slot(by_id)
                self.layers.store(self._slots[adapter], self._loaded[adapter])
            self._slots.move_to_end(adapter)
        return [NO_ADAPTER if request is None else self._slots.get(request.lora_int_id, FAILED) for request in requests]

    def _is_read_again(self, request: Any, needed: Iterable[int]) -> bool:
        try:
            self._load(request, needed)
        except Exception as error:  # whatever its files are by now: the other requests of the step go on
            logger.error("xla_gpu.vllm: requests with the adapter %s end: %s", request.lora_name, error)
            return False
        return True

    def _free_slot(self, needed: Iterable[int]) -> int:
        """A slot that no adapter has, or that of the one not needed which was used least recently."""
        free = set(range(self.layers.slots)) - set(self._slots.values())
        if free:
            return min(free)
        wanted = set(needed)
        oldest = next(adapter for adapter in self._slots if adapter not in wanted)
        self.changes += 1
        return self._slots.pop(oldest)

    def _load(self, request: Any, needed: Iterable[int]) -> None:
        loaded = self._read(request)
        kept = {*needed, *self._pinned}
        for adapter in [adapter for adapter in self._loaded if adapter not in kept]:
            if len(self._loaded) < self._capacity:
                break
            self.remove(adapter)
        self._loaded[request.lora_int_id] = loaded
        logger.info("Read the adapter %s from %s", request.lora_name, request.lora_path)

    def _read(self, request: Any) -> Adapter:
        where = f"xla_gpu.vllm: adapter {request.lora_name}"
        if request.tensorizer_config_dict:
            raise ValueError(f"{where}: tensorizer: not supported")
        path = get_adapter_absolute_path(request.lora_path)
        try:
            peft = PEFTHelper.from_local_dir(path, self._config.model_config.max_model_len)
            settings = json.loads((Path(path) / "adapter_config.json").read_text())
        except FileNotFoundError as error:
            # The server answers with 404 for this text.
            raise ValueError(
                f"Loading lora {request.lora_name} failed: No adapter found for {request.lora_path}"
            ) from error
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
            raise ValueError(f"{where}: expected PEFT's settings in adapter_config.json, got {error}") from error
        peft.validate_legal(self._config.lora_config)
        for key in _NOT_READ:
            if settings.get(key):
                raise ValueError(f"{where}: {key}: expected none in adapter_config.json, got {settings[key]!r}")
        parts = self.layers.parts()
        model = LoRAModel.from_local_checkpoint(
            path,
            {name.rpartition(".")[2] for name in parts} | self._beside,
            peft,
            lora_model_id=request.lora_int_id,
            device="cpu",
            weights_mapper=self._mapper,
        )
        dtype = self._config.model_config.dtype
        found = {}
        for name, weights in model.loras.items():
            if not name.startswith(self._prefix):
                raise ValueError(f"{where}: expected modules of the language model alone, got {name}")
            own = name.removeprefix(self._prefix)
            found[own] = _checked(where, own, weights, parts, dtype)
        return found


def _checked(where: str, name: str, weights: Any, parts: dict[str, tuple[int, int]], dtype: torch.dtype) -> Matrices:
    """The matrices of a module, or ValueError."""
    if name not in parts:
        raise ValueError(f"{where}: expected modules of the model, got {name}")
    if weights.lora_a is None or weights.lora_b is None:
        raise ValueError(f"{where}: {name}: expected lora_A and lora_B, got one of them")
    inputs, outputs = parts[name]
    expected = (weights.rank, inputs), (outputs, weights.rank)
    got = tuple(weights.lora_a.shape), tuple(weights.lora_b.shape)
    if got != expected:
        raise ValueError(
            f"{where}: {name}: expected lora_A and lora_B of shapes {expected[0]} and {expected[1]}, got {got[0]} and "
            f"{got[1]}"
        )
    a, b = weights.lora_a.float(), weights.lora_b.float() * weights.scaling
    if not (a.to(dtype).isfinite().all() and b.to(dtype).isfinite().all()):
        raise ValueError(f"{where}: {name}: expected numbers that {dtype} holds, got others")
    return Matrices(a, b)
