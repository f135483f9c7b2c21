"""triton_call for tensors: Triton functions as torch.library operators, and their tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .._core.operator import OpCall, check_inputs_requested
from .._user_kernels import launch, triton_arguments, triton_bind, triton_call, triton_tuning
from .dispatch import run
from .user_call import Direct, Results, UserCall, define_call, described_results, is_tensor, pairs, specs

_SCHEMA = (
    "(Tensor[] operands, {updated}str call, int[] arguments, float[] floats, str[] result_dtypes, int[] result_ranks, "
    "SymInt[] result_sizes, int[] aliases) -> Tensor[]"
)
_WARM_UPS, _REPEATS = 2, 10  # of each configuration that is timed


class TritonCall(UserCall):
    """What xla_gpu.torch.triton_call returns."""

    def __init__(
        self,
        bound: triton_call.TritonCall,
        result_shape_dtypes: Any,
        input_output_aliases: Mapping[int, int] | None,
        in_place: bool,
    ) -> None:
        super().__init__(bound.where, result_shape_dtypes, input_output_aliases, in_place)
        self._bound = bound
        self._tunable = bool(bound.function.configs) and bound.config is None
        self._functional, self._mutating = torch.ops.xla_gpu.triton_call, torch.ops.xla_gpu._triton_call_
        self._leading = (bound.key,)

    def _encode(self, arguments: Sequence[Any], results: Sequence[int]) -> launch.Arguments:
        return triton_arguments.encode(self._where, arguments, results, is_tensor)

    def _prepare(self, encoded: launch.Arguments) -> None:
        if self._tunable and encoded.arrays[0].device.type == "cuda":
            _tune(self._bound, encoded, self._results, self._aliases)

    def _bind(self, encoded: launch.Arguments) -> Direct:
        operands, results = specs("triton_call", encoded.arrays), described_results(*self._results.encoded())
        arguments = (operands, encoded.encoded, encoded.floats, results)
        call = triton_bind.bind(self._bound, *arguments, tuple(self._aliases.items()), check_inputs_requested())
        if not callable(self._bound.grid):
            return Direct(call, lambda: True)
        bound, meta = triton_bind.prepare(self._bound, *arguments)
        programs = bound.programs(meta)  # a grid function may see variables that change
        return Direct(call, lambda: bound.programs(meta) == programs)


def _tune(
    bound: triton_call.TritonCall, encoded: launch.Arguments, results: Results, aliases: Mapping[int, int]
) -> None:
    """Times the configurations of an autotuned function on these tensors, once for a tuning key.

    Operands keep their values: aliased ones are copied, as in every functional call.
    """
    operands = specs(bound.where, encoded.arrays)
    described = described_results(*results.encoded())
    key = triton_tuning.tuning_key(bound, operands, encoded.encoded, encoded.floats, described)
    if triton_tuning.is_tuned(bound, key):
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{bound.where}: an autotuned function cannot be timed while a CUDA graph is captured: pass config=, or "
            "call it once before with arguments of the same tuning key"
        )
    times: list[tuple[float, int, Any]] = []
    failures: list[str] = []
    for config in triton_tuning.configs_to_time(bound, encoded.encoded, encoded.floats, encoded.arrays, described):
        try:
            bind = (operands, encoded.encoded, encoded.floats, described, tuple(aliases.items()), False)
            chosen = triton_bind.bind(bound.with_config(config), *bind)
            times.append((_milliseconds(chosen, encoded.arrays), len(times), config))
        except (ValueError, RuntimeError) as error:  # more shared memory than there is, above all
            failures.append(f"{config}: {error}")
    if not times and not failures:
        raise ValueError(f"{bound.where}: expected prune_configs_by to leave a configuration, got none")
    if not times:
        raise ValueError(f"{bound.where}: expected a configuration that runs, got none:\n" + "\n".join(failures))
    triton_tuning.remember_config(key, min(times)[2])


def _milliseconds(chosen: OpCall, operands: Sequence[torch.Tensor]) -> float:
    with torch.cuda.device(operands[0].device):  # events are of the current device
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(_WARM_UPS):
            run(chosen, operands)
        start.record()
        for _ in range(_REPEATS):
            run(chosen, operands)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))


def _bind(
    operands: Sequence[torch.Tensor],
    key: str,
    arguments: Sequence[int],
    floats: Sequence[float],
    dtypes: Sequence[str],
    ranks: Sequence[int],
    sizes: Sequence[int],
    aliases: Sequence[int],
) -> tuple[OpCall, int]:
    results = described_results(dtypes, ranks, sizes)
    if operands and isinstance(operands[0], FakeTensor):  # while a program is traced
        triton_call.keep(key)
    bound = triton_bind.bind(
        triton_call.by_key(key),
        specs("triton_call", operands),
        arguments,
        floats,
        results,
        pairs(aliases),
        check_inputs_requested(),
    )
    return bound, len(results)


define_call("triton_call", _SCHEMA, _bind)
