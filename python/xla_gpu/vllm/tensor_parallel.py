"""Tensor parallelism: one process drives all devices through torch_xla's SPMD.

vLLM sees one rank that holds the whole model; every tensor is one tensor, of which each device keeps a part. The KV
caches are divided by kv heads; divided_layers.py divides the model.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch

import xla_gpu.torch as xg

from .._core.environment import pjrt_device

_AXIS = "tp"

_active: TensorParallel | None = None
_size: int | None = None  # of the process; None: no engine has started yet


def active() -> TensorParallel | None:
    """The devices of this process's engine; None where it has one."""
    return _active


def prepare(environ: MutableMapping[str, str], size: int) -> None:
    """Leaves torch_xla's client ``size`` devices. Comes before torch_xla is imported, and before ``start``.

    Raises:
      ValueError: an engine of this process has another number of devices.
    """
    if _size not in (None, size):
        raise ValueError(
            f"xla_gpu.vllm: --tensor-parallel-size: expected {_size}, which an engine of this process has, got {size}: "
            "start this engine in another process"
        )
    if size == 1:
        return
    if pjrt_device(environ) == "CPU":
        environ.setdefault("CPU_NUM_DEVICES", str(size))
        return
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(index) for index in range(size)] if visible is None else visible.split(",")
    environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[:size])


def start(size: int) -> None:
    """Makes the devices of this process one machine for SPMD. Once for a process, which keeps its number of devices.

    Raises:
      ValueError: there are not ``size`` devices.
    """
    global _active, _size
    if size > 1 and _active is None:
        _active = TensorParallel(size)
    _size = size


class TensorParallel:
    """The devices of an engine, and how its model lies on them.

    Attributes:
      size: the number of devices.
      bytes_per_device: of the parameters and buffers placed so far.
      logits_dim: the dimension along which the model's logits are divided; None: all devices have all.
    """

    def __init__(self, size: int) -> None:
        import numpy as np
        from torch_xla import runtime
        from torch_xla.distributed import spmd

        runtime.use_spmd()
        there = runtime.global_runtime_device_count()
        if there != size:  # every program runs on all devices
            raise ValueError(
                f"xla_gpu.vllm: --tensor-parallel-size: expected at most the number of devices, {there}, got {size}"
                if there < size
                else f"xla_gpu.vllm: --tensor-parallel-size: expected {there}, the number of devices that this process "
                f"has started with, got {size}"
            )
        self.size = size
        self.bytes_per_device = 0
        self.logits_dim: int | None = None
        self._mesh = spmd.Mesh(np.arange(size), (size,), (_AXIS,))
        self._group = xg.DeviceGroup(self._mesh, _AXIS)
        self._divided: dict[int, tuple[torch.Tensor, int]] = {}

    # ---- Tensors -----------------------------------------------------------------------------------------------------

    def mark(self, tensor: torch.Tensor, dim: int | None = None) -> torch.Tensor:
        """Notes that a tensor of the device is divided along ``dim``, or whole on each device; returns it."""
        from torch_xla.distributed import spmd

        spmd.mark_sharding(tensor, self._mesh, self._spec(tensor.dim(), dim))
        return tensor

    def _spec(self, rank: int, dim: int | None) -> tuple[str | None, ...]:
        return tuple(_AXIS if i == dim else None for i in range(rank))

    def mark_whole(self, tensors: Sequence[torch.Tensor]) -> None:
        """Makes tensors whole on each device where nothing says how they are divided."""
        import torch_xla

        for tensor in tensors:
            if not torch_xla._XLAC._get_xla_sharding_spec(tensor):
                self.mark(tensor)

    def divide(self, host: torch.Tensor, dim: int) -> None:
        """Notes along which dimension ``place`` divides a parameter that is on the host still."""
        self._divided[id(host)] = (host, dim)

    def place(self, host: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Marks ``tensor``, a parameter or buffer on the device, as its copy on the host is to be divided."""
        dim = self._divided[id(host)][1] if id(host) in self._divided else None
        self.bytes_per_device += tensor.numel() * tensor.element_size() // (1 if dim is None else self.size)
        return self.mark(tensor, dim)

    def mark_cache(self, cache: torch.Tensor) -> torch.Tensor:
        """Divides a KV cache by its kv heads, of which K and V are neighbours, unless it is of latents; returns it."""
        return self.mark(cache, 2 if cache.dim() == 4 else None)

    def sum(self, parts: torch.Tensor) -> torch.Tensor:
        """The sum of T[size, ...], a part of which each device has."""
        total: torch.Tensor = xg.all_reduce(parts, group=self._group)
        return total

    def sum_add_norm(
        self, parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The RMS norm of residual T[rows, n] and the sum of T[size, rows, n], and what it is the norm of."""
        normed, total = xg.all_reduce_add_rms_norm(parts, residual, weight, eps=eps, group=self._group)
        return normed, total

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """The model's logits, whole on each device."""
        if self.logits_dim is None:
            return logits
        # A clone of an input would keep the input's annotation. XLA drops the multiplication.
        return self.mark(logits * 1)

    def most_likely(self, logits: torch.Tensor) -> torch.Tensor:
        """int32[rows]: where the largest of each row of divided logits T[rows, vocab_size] is, the first of equals."""
        ranks = torch.arange(self.size, device=logits.device)

        def largest(part: torch.Tensor, own: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
            # Each device fills its own place, in which a sum gathers all. Below 2 ** 24 an index is exact in float32.
            pair = torch.stack([part.amax(-1).float(), (part.argmax(-1) + own * part.shape[1]).float()])
            return torch.where((ranks == own)[:, None, None], pair, torch.zeros_like(pair))[None]

        every = self.sum(self.on_each(largest, [(logits, 1), (ranks, 0), (ranks, None)], 0))
        return every[:, 1].gather(0, every[:, 0].argmax(0)[None])[0].to(torch.int32)

    def on_each(
        self,
        function: Callable[..., torch.Tensor],
        operands: Sequence[tuple[torch.Tensor, int | None]],
        dim: int,
    ) -> torch.Tensor:
        """What ``function`` returns for each device's parts of the operands, joined along ``dim``.

        Nothing in it goes between the devices.

        Args:
          function: takes the parts, in the operands' order.
          operands: tensors of the device, and along which dimension each is divided; None: whole on each device.
          dim: along which the result is divided.
        """
        from torch_xla.distributed import spmd

        parts = []
        for tensor, divided in operands:
            # A parameter lies so already. An annotation could move another tensor: it is put on its values alone.
            source = tensor if isinstance(tensor, torch.nn.Parameter) else tensor.clone()
            part: Any = spmd.enable_manual_sharding(source, self._spec(tensor.dim(), divided), mesh=self._mesh)
            parts.append(getattr(part, "global_tensor", part))
        result = function(*parts)
        shape = [size * self.size if i == dim else size for i, size in enumerate(result.shape)]
        spec = self._spec(len(shape), dim)
        whole: Any = spmd.disable_manual_sharding(result, spec, torch.Size(shape), mesh=self._mesh)
        joined: torch.Tensor = getattr(whole, "global_tensor", whole)
        return joined


def pool_bytes(environ: MutableMapping[str, str]) -> int:
    """Bytes of a GPU that the client's pool takes, which torch_xla does not tell under SPMD."""
    from .._runtime import cuda_driver

    least = min(gpu.memory_bytes for gpu in cuda_driver.driver().gpus)
    return int(least * float(environ["XLA_PYTHON_CLIENT_MEM_FRACTION"]))
