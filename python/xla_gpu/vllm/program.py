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

import numpy as np
import numpy.typing as npt
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
from torch_xla._dynamo.dynamo_bridge import alias_with_buffer_donor_config
from vllm.logger import init_logger

from .._runtime import executable_cache
from . import direct_launch, tensor_parallel
from .direct_launch import Array, DirectLaunch

_XLAC = torch_xla._XLAC

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is below its own name


# The programs that are made together, and whether each is compiled; None: each is complete where it is made.
_made: dict[Program, bool] | None = None

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

    Over several GPUs each program runs once at the end, on the inputs and the state that it was made with; from then on
    they are launched directly.
    """
    global _made
    made: dict[Program, bool] = {}
    # A program over several devices is captured once: its parameters would be others the second time.
    together = executable_cache.compile_recorded(threads) if _is_recorded() else contextlib.nullcontext()
    with together:
        _made = made
        try:
            yield
        finally:
            _made = None
        waiting = [program for program, complete in made.items() if not complete]
        failed = [program for program in waiting if not _succeeds(program.compile)]
    for program in failed:
        program.compile()
    if direct_launch.available():
        _launch_directly(list(made))
    else:
        for program in made:
            program._made_with = None


def _is_recorded() -> bool:
    return tensor_parallel.active() is None


def _succeeds(capture: Callable[[], None]) -> bool:
    global _failed
    try:
        capture()
    except (RuntimeError, ValueError):
        _failed += 1
        return False
    return True


def _launch_directly(programs: Sequence[Program]) -> None:
    """Records a launch of each program. All are launched directly or none, since they hand arrays to each other."""
    # Those with large inputs first, which are gone then: the model's take the most memory for themselves.
    by_size = sorted(programs, key=Program.input_bytes, reverse=True)
    launches = [(program, program.record_launch()) for program in by_size]
    for program, launch in launches:
        if launch is None:
            logger.warning("%s: the adapter did not see its launch: steps go through torch_xla", program.name)
            return
    for program, launch in launches:
        program.direct = launch


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
        self.direct: DirectLaunch | None = None
        self._num_state = len(state)
        self._hash: Any = None
        self._arguments: list[Any] = []
        self._places: list[tuple[int, int]] = []
        self.outputs: list[tuple[torch.Size, torch.dtype]] = []
        self._made_with: Any = function, inputs, state, options or {}
        torch_xla.sync()
        xm.wait_device_ops()
        if _made is None:
            self.compile()
            self._made_with = None
        elif not _is_recorded():
            self.compile()
            _made[self] = True
        else:
            try:
                with executable_cache.recording():
                    self.compile()
                _made[self] = True
            except FallbackError:
                raise
            except (RuntimeError, ValueError):  # recorded, or an error that comes again
                global _failed
                _failed += 1
                _made[self] = False

    def compile(self) -> None:
        """Captures and compiles it."""
        function, inputs, state, options = self._made_with
        with executable_cache.compile_options(options):
            self._capture(function, inputs, state)

    def input_bytes(self) -> int:
        """Of what it was made with, before its launch is recorded."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._made_with[1])

    def record_launch(self) -> DirectLaunch | None:
        """Runs it once on what it was made with, of which the state becomes what it returns; how to launch it directly.

        None where the adapter did not see it.
        """
        _, inputs, state, _ = self._made_with
        self._made_with = None
        given = [*inputs, *state]
        torch_xla.sync()
        xm.wait_device_ops()

        def run() -> list[torch.Tensor]:
            results = self._run(given)
            xm.wait_device_ops()
            return results

        num_results = len(self.outputs) + len(state)
        handle, results = direct_launch.record(run, len(self._arguments), num_results)
        for tensor, result in zip(state, results[len(self.outputs) :], strict=True):
            _XLAC._replace_xla_tensor(tensor, result)
        place = {index: at for at, index in self._places}
        if handle is None or len(place) != len(self._places):
            return None
        places = [place.get(index, -1) for index in range(len(given))]
        launch = DirectLaunch(handle, places, len(state), self.outputs, self._arguments)
        for index, tensor in enumerate(inputs):
            if places[index] >= 0:
                launch.note(tensor, argument=places[index])
        for index, tensor in enumerate(state, len(self.outputs)):
            launch.note(tensor, result=index)
        return launch

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
        self, inputs: Sequence[Array | npt.NDArray[Any]], state: Sequence[Array] = ()
    ) -> tuple[list[Any], list[Any]]:
        """Launches the program; returns at once. The results can be inputs of the next program without waiting."""
        if self.direct is not None:
            return self.direct(inputs, state)
        device = torch_xla.device()
        on_device = [torch.from_numpy(value).to(device) if isinstance(value, np.ndarray) else value for value in inputs]
        results = self._run([*on_device, *state])
        split = len(results) - self._num_state
        return results[:split], results[split:]

    def _run(self, given: Sequence[Any]) -> list[torch.Tensor]:
        arguments = self._arguments.copy()
        for at, index in self._places:
            arguments[at] = given[index]
        results: list[torch.Tensor] = _XLAC._run_cached_graph(self._hash, arguments)
        return results


def _fallbacks() -> set[str]:
    return {name for name in metrics.counter_names() if name.startswith("aten::")}


def compilations() -> int:
    """How many programs XLA has compiled in this process."""
    timed = metrics.metric_data("CompileTime")
    return timed[0] - _failed if timed else 0
