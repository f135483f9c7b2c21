"""Programs of an engine, over its devices; see _torch_xla/program.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

import torch

from .._torch_xla import direct_launch, program
from .._torch_xla.counters import FallbackError
from .._torch_xla.program import compilations
from . import tensor_parallel

__all__ = ["FallbackError", "Program", "compilations", "compiled_together"]


class Program(program.Program):
    """A program over the engine's devices."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        state: Sequence[torch.Tensor] = (),
        options: Mapping[str, bool | int] | None = None,
        *,
        lasting: Sequence[int] = (),
    ) -> None:
        devices = tensor_parallel.active()
        super().__init__(name, function, inputs, state, options, devices=devices, lasting=lasting)


def compiled_together(threads: int) -> contextlib.AbstractContextManager[None]:
    """Programs made in here are compiled together, and launched directly where that is possible."""
    devices = tensor_parallel.active()
    direct = direct_launch.available()
    return program.compiled_together(threads, recorded=devices is None, direct=direct)
