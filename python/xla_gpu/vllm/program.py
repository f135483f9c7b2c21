"""Programs captured from lazy tensors, which then run without tracing, guards or hashing.

A function is traced once with torch_xla's lazy tensors. What it computes is compiled as one XLA program and from then
on called by its hash, as torch_xla's own bridge to torch.compile does; but nothing of Dynamo is involved, tracing takes
tenths of a second instead of many, and state that is updated in place is handed over without a copy_ for each tensor.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
from torch_xla._dynamo.dynamo_bridge import alias_with_buffer_donor_config
from vllm.logger import init_logger

from .._runtime import executable_cache
from . import tensor_parallel

_XLAC = torch_xla._XLAC

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is below its own name


# What captures the programs that are to be compiled together; None: each is compiled where it is made.
_waiting: list[Callable[[], None]] | None = None

# Compilations that ended with recording the program, or with an error.
_failed = 0


@contextlib.contextmanager
def compiled_together(threads: int) -> Iterator[None]:
    """Programs made in here are compiled in ``threads`` threads beside this one, on GPUs. None may run before the end.

    torch_xla compiles one program after the other, and takes half a second to read what XLA made of it. So each is
    captured twice: the first time leaves what is to be compiled, the second one gets its executable while the next
    programs are compiled. What the cache has is complete the first time. Where the body raises, nothing is left to be
    compiled.

    XLA tries kernels in the GPU's memory. A program for which several threads left too little is compiled again at the
    end, alone.
    """
    global _waiting
    if tensor_parallel.active() is not None:
        # A program over several devices is captured once: its parameters would be others the second time.
        yield
        return
    captures: list[Callable[[], None]] = []
    with executable_cache.compile_recorded(threads):
        _waiting = captures
        try:
            yield
        finally:
            _waiting = None
        failed = [capture for capture in captures if not _succeeds(capture)]
    for capture in failed:
        capture()


def _succeeds(capture: Callable[[], None]) -> bool:
    global _failed
    try:
        capture()
    except (RuntimeError, ValueError):
        _failed += 1
        return False
    return True


class FallbackError(RuntimeError):
    """A program needs an operation that torch_xla cannot run on the device."""


class Program:
    """One compiled XLA program: ``(outputs, new_state) = program(inputs, state)``.

    Args:
      name: for error texts.
      function: called once as ``function(*inputs, *state)``. It returns the outputs and may update the tensors of
        ``state`` in place; any other tensor that it reads, the weights for example, is captured as it is.
      inputs: XLA tensors with the shapes and dtypes of later calls.
      state: XLA tensors whose memory the program takes over: after each call its owner must go on with those that the
        call returned.
      options: XLA's, for this program alone; see executable_cache.compile_options.

    Attributes:
      outputs: shape and dtype of each output.

    Raises:
      FallbackError: an operation would run on the host.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        state: Sequence[torch.Tensor] = (),
        options: Mapping[str, bool | int] | None = None,
    ) -> None:
        self.name = name
        self._num_state = len(state)
        self._hash: Any = None
        self._arguments: list[Any] = []
        self._places: list[tuple[int, int]] = []
        self.outputs: list[tuple[torch.Size, torch.dtype]] = []
        torch_xla.sync()
        xm.wait_device_ops()

        def capture() -> None:
            with executable_cache.compile_options(options or {}):
                self._capture(function, inputs, state)

        if _waiting is None:
            capture()
            return
        try:
            with executable_cache.recording():
                capture()
        except FallbackError:
            raise
        except (RuntimeError, ValueError):  # recorded, or an error that comes again
            global _failed
            _failed += 1
            _waiting.append(capture)

    def _capture(
        self, function: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], state: Sequence[Any]
    ) -> None:
        fallbacks, began = _fallbacks(), time.perf_counter()
        given = [*inputs, *state]
        if (devices := tensor_parallel.active()) is not None:
            # Otherwise a tensor that was copied from the host is a new parameter at each use.
            devices.mark_whole(given)
        position = {_XLAC._xla_get_tensor_id(tensor): index for index, tensor in enumerate(given)}
        aliases = [tensor.clone() for tensor in given] if devices is not None else []
        # A clone that was not computed yet shares the memory; it gives the state back what tracing replaces.
        saved = [tensor.clone() for tensor in state]
        try:
            for tensor in state:
                torch.ops.xla.dynamo_set_buffer_donor_(tensor, True)
            outputs = list(function(*given))
            self.outputs = [(output.shape, output.dtype) for output in outputs]
            if devices is not None:
                devices.mark_whole([*outputs, *state])
            roots = [*outputs, *state]
            for index, alias in enumerate(aliases):
                # Under SPMD a buffer's id becomes that of the tensor that this call makes of it.
                _, values = _XLAC._get_tensors_xla_device_data_node([alias])
                position[_XLAC._xla_get_tensor_id(values[0])] = index
            ids, values = _XLAC._get_tensors_xla_device_data_node(roots)
            # The parameters of the program: tensors that were captured, and places for the arguments of each call.
            self._arguments = list(values)
            self._places = [(at, position[tensor_id]) for at, tensor_id in enumerate(ids) if tensor_id in position]
            for at, _ in self._places:
                self._arguments[at] = None
            if new := _fallbacks() - fallbacks:
                raise FallbackError(
                    f"{self.name}: torch_xla has no lowering for {', '.join(sorted(new))}, which would run on the host "
                    "in every step: this model is not supported"
                )
            with alias_with_buffer_donor_config():
                self._hash = _XLAC._get_graph_hash(roots)
                _XLAC._xla_warm_up_cache(roots, [])
            logger.debug("%s: captured in %.2f s", self.name, time.perf_counter() - began)
        finally:
            for tensor, original in zip(state, saved, strict=True):
                _XLAC._replace_xla_tensor(tensor, original)
            _XLAC._clear_pending_irs(str(torch_xla.device()))

    def __call__(
        self, inputs: Sequence[torch.Tensor], state: Sequence[torch.Tensor] = ()
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Launches the program; returns at once. The results can be inputs of the next program without waiting."""
        given = [*inputs, *state]
        arguments = self._arguments.copy()
        for at, index in self._places:
            arguments[at] = given[index]
        results = _XLAC._run_cached_graph(self._hash, arguments)
        split = len(results) - self._num_state
        return results[:split], results[split:]


def _fallbacks() -> set[str]:
    return {name for name in metrics.counter_names() if name.startswith("aten::")}


def compilations() -> int:
    """How many programs XLA has compiled in this process."""
    timed = metrics.metric_data("CompileTime")
    return timed[0] - _failed if timed else 0
