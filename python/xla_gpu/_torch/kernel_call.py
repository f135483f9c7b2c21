"""kernel_call for tensors: users' CUDA kernels as torch.library operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .._core.operator import OpCall, check_inputs_requested
from .._user_kernels import launch
from .._user_kernels.cuda_kernel import CudaKernel
from .user_call import Direct, UserCall, define_call, described_results, is_tensor, pairs, specs

_SCHEMA = (
    "(Tensor[] operands, {updated}str kernel, int[] launch, int[] arguments, float[] floats, str[] result_dtypes, "
    "int[] result_ranks, SymInt[] result_sizes, int[] aliases) -> Tensor[]"
)


class KernelCall(UserCall):
    """What xla_gpu.torch.kernel_call returns."""

    def __init__(
        self,
        kernel: CudaKernel,
        result_shape_dtypes: Any,
        shape: launch.Geometry,
        input_output_aliases: Mapping[int, int] | None,
        in_place: bool,
    ) -> None:
        super().__init__(f"kernel_call: {kernel.name}", result_shape_dtypes, input_output_aliases, in_place)
        self._kernel = kernel
        self._functional, self._mutating = torch.ops.xla_gpu.kernel_call, torch.ops.xla_gpu._kernel_call_
        self._leading = (kernel.key, shape.encoded())

    def _encode(self, arguments: Sequence[Any], results: Sequence[int]) -> launch.Arguments:
        return launch.encode(self._where, self._kernel.parameters, arguments, results, is_tensor)

    def _bind(self, encoded: launch.Arguments) -> Direct:
        aliases = [index for pair in self._aliases.items() for index in pair]
        kernel, numbers = self._leading
        described = self._results.encoded()
        call, _ = _bind(encoded.arrays, kernel, numbers, encoded.encoded, encoded.floats, *described, aliases)
        return Direct(call, lambda: True)


def _bind(
    operands: Sequence[torch.Tensor],
    kernel: str,
    numbers: Sequence[int],
    arguments: Sequence[int],
    floats: Sequence[float],
    dtypes: Sequence[str],
    ranks: Sequence[int],
    sizes: Sequence[int],
    aliases: Sequence[int],
) -> tuple[OpCall, int]:
    results = described_results(dtypes, ranks, sizes)
    call = launch.bind(
        kernel,
        specs("kernel_call", operands),
        tuple(numbers),
        tuple(arguments),
        launch.double_bytes(floats),
        results,
        pairs(aliases),
        check_inputs_requested(),
    )
    return call, len(results)


define_call("kernel_call", _SCHEMA, _bind)
