"""vLLM's kernels for int4 weights: Marlin, and CUTLASS's Machete for Hopper.

VLLM_LIBRARY names `_C.abi3.so` in a vllm wheel that was unpacked (0.22.1 was measured), built for the CUDA and the
PyTorch at hand.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
from collections.abc import Callable
from typing import Any

import torch

import xla_gpu.quantization as quantization

GROUP = 128


def marlin_weight(values: torch.Tensor) -> torch.Tensor:
    """int32[k / 16, 2 n] of int32[k, n], numbers 0 to 15: each lane's values of mma.m16n8k16, four tiles of 16 features
    behind one another."""
    k, n = values.shape
    lanes = torch.arange(32).view(32, 1, 1, 1)
    tiles = torch.arange(4).view(1, 4, 1, 1)
    features = torch.tensor([0, 8]).view(1, 1, 2, 1)
    inner = torch.tensor([0, 1, 8, 9]).view(1, 1, 1, 4)
    order = 16 * (2 * (lanes % 4) + inner) + lanes // 4 + features + 256 * tiles
    order = order.reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1).to(values.device)
    of_tiles = values.view(k // 16, 16, n // 16, 16).transpose(1, 2).reshape(-1, 1024)
    return _packed(of_tiles[:, order].view(k // 16, 2 * n, 8))


def marlin_scale(scale: torch.Tensor) -> torch.Tensor:
    """Of [k / 128, n]: in the order in which lanes have the features."""
    return scale.view(-1, 8, 8).transpose(1, 2).reshape(scale.shape).contiguous()


def _packed(eights: torch.Tensor) -> torch.Tensor:
    """int32[...] of int32[..., 8], the first number in the lowest bits."""
    shifts = torch.arange(0, 32, 4, device=eights.device, dtype=torch.int64)
    words = (eights.to(torch.int64) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


class Int4Peers:
    """Calls of vLLM's kernels for weights as `linear` has them, with zero points of 8."""

    def __init__(self, library: str) -> None:
        torch.ops.load_library(library)
        spec = importlib.util.spec_from_file_location("scalar_type", pathlib.Path(library).with_name("scalar_type.py"))
        if spec is None or spec.loader is None:
            raise FileNotFoundError(f"{library}: expected scalar_type.py of vLLM beside it")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._type = module.scalar_types.uint4b8.id
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        self._workspace = torch.zeros(4 * processors, dtype=torch.int32, device="cuda")
        self._nothing = torch.empty(0, dtype=torch.int32, device="cuda")

    def calls(self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> dict[str, Callable[[], Any]]:
        values = quantization.unpack_weight(weight).T.to(torch.int32).contiguous()  # [k, n]
        scale = weight_scale.T.contiguous()
        k, n = values.shape
        of_marlin, scale_of_marlin = marlin_weight(values), marlin_scale(scale)
        plain = _packed(values.view(k // 8, 8, n).transpose(1, 2))
        of_machete = torch.ops._C.machete_prepack_B(plain.T.contiguous().T, x.dtype, self._type, x.dtype)

        def marlin() -> torch.Tensor:
            nothing = self._nothing
            inputs = [x, None, of_marlin, None, scale_of_marlin, None, None, None, nothing, nothing, self._workspace]
            return torch.ops._C.marlin_gemm(*inputs, self._type, x.shape[0], n, k, True, False, True, False)

        def machete() -> torch.Tensor:
            return torch.ops._C.machete_mm(x, of_machete, self._type, None, scale, None, GROUP, None, None, None)

        return {"Marlin": marlin, "Machete": machete}


def int4_peers() -> Int4Peers | None:
    library = os.environ.get("VLLM_LIBRARY")
    return Int4Peers(library) if library else None
