"""triton_call for tensors: Triton functions as torch.library operators, so that torch.compile sees through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .._core.operator import OpCall, check_inputs_requested
from .._user_kernels import launch, triton_call
from .dispatch import run
from .kernel_call import Results, call, define_call, described_results, is_tensor, pairs, specs

_SCHEMA = (
    "(Tensor[] operands, {updated}str call, int[] arguments, float[] floats, str[] result_dtypes, int[] result_ranks, "
    "SymInt[] result_sizes, int[] aliases) -> Tensor[]"
)
_WARM_UPS, _REPEATS = 2, 10  # of each configuration that is timed


class TritonCall:
    """What xla_gpu.torch.triton_call returns."""

    def __init__(
        self,
        bound: triton_call.TritonCall,
        result_shape_dtypes: Any,
        input_output_aliases: Mapping[int, int] | None,
        in_place: bool,
    ) -> None:
        self._where = bound.where
        self._bound, self._in_place = bound, in_place
        self._tunable = bool(bound.function.configs) and bound.config is None
        self._key = bound.key
        self._results = Results(self._where, result_shape_dtypes)
        self._aliases = dict(input_output_aliases or {})
        if in_place and not self._aliases:
            raise ValueError(f"{self._where}: input_output_aliases: expected the operands to update, got none")

    def __call__(self, *arguments: Any) -> Any:
        """Launches the function."""
        aliased = list(self._aliases.values())
        results = [i for i in range(len(self._results.shapes)) if i not in aliased]
        encoded = triton_call.encode(self._where, arguments, results, is_tensor)
        if not encoded.arrays:
            raise ValueError(f"{self._where}: expected at least one tensor, whose device says where to run, got none")
        if self._tunable and not torch.compiler.is_compiling() and encoded.arrays[0].device.type == "cuda":
            _tune(self._bound, encoded, self._results, self._aliases)
        return call(
            (encoded.encoded, encoded.floats),
            encoded.arrays,
            self._results,
            self._aliases,
            self._in_place,
            torch.ops.xla_gpu.triton_call,
            torch.ops.xla_gpu._triton_call_,
            (self._key,),
        )


def _tune(
    bound: triton_call.TritonCall, encoded: launch.Arguments, results: Results, aliases: Mapping[int, int]
) -> None:
    """Times the configurations of an autotuned function on these tensors, once for a tuning key.

    Operands keep their values: aliased ones are copied, as in every functional call.
    """
    operands = specs(bound.where, encoded.arrays)
    described = described_results(*results.encoded())
    key = triton_call.tuning_key(bound, operands, encoded.encoded, encoded.floats, described)
    if triton_call.is_tuned(bound, key):
        return
    times: list[tuple[float, int, Any]] = []
    failures: list[str] = []
    for config in bound.function.configs:
        try:
            bind = (operands, encoded.encoded, encoded.floats, described, tuple(aliases.items()), False)
            chosen = triton_call.bind(bound.with_config(config), *bind)
            times.append((_milliseconds(chosen, encoded.arrays), len(times), config))
        except (ValueError, RuntimeError) as error:  # more shared memory than there is, above all
            failures.append(f"{config}: {error}")
    if not times:
        raise ValueError(f"{bound.where}: expected a configuration that runs, got none:\n" + "\n".join(failures))
    triton_call.remember_config(key, min(times)[2])


def _milliseconds(chosen: OpCall, operands: Sequence[torch.Tensor]) -> float:
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
    bound = triton_call.bind(
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
