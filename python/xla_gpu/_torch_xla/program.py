"""Programs captured from lazy tensors, which then run without tracing, guards or hashing.

A function is traced once with torch_xla's lazy tensors. What it computes is compiled as one XLA program and from then
on called by its hash, as torch_xla's own bridge to torch.compile does; but nothing of Dynamo is involved, tracing takes
tenths of a second instead of many, and state that is updated in place is handed over without a copy_ for each tensor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
from torch_xla._dynamo.dynamo_bridge import alias_with_buffer_donor_config

from .._runtime import executable_cache
from . import direct_launch
from .counters import fallback_error, fallbacks, fallbacks_since
from .direct_launch import Array, DirectLaunch

_XLAC = torch_xla._XLAC

logger = logging.getLogger("xla_gpu")


# The programs that are made together, and whether each is compiled; None: each is complete where it is made.
_made: dict[Program, bool] | None = None
_recorded = True

# Compilations that ended with recording the program, or with an error.
_failed = 0


class Devices(Protocol):
    """Several devices, over which torch_xla's SPMD runs each program."""

    def mark_whole(self, tensors: Sequence[torch.Tensor]) -> None:
        """Makes tensors whole on each device where nothing says how they are divided."""


# Whether programs that are made together run on their inputs at the end. Those of up to this size are kept until then:
# later calls may have them too.
_rehearsed = False
_KEPT_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class _Form:
    """What is kept of an input until it is needed again: the tensor would take memory that XLA tries kernels in."""

    shape: torch.Size
    dtype: torch.dtype

    def tensor(self) -> torch.Tensor:
        """A tensor of this form."""
        return torch.zeros(self.shape, dtype=self.dtype).to(torch_xla.device())

    @property
    def nbytes(self) -> int:
        """Of the tensor."""
        return int(self.shape.numel() * self.dtype.itemsize)


def _kept(tensor: torch.Tensor) -> torch.Tensor | _Form:
    """What is kept of an input of a program that is made beside others."""
    form = _Form(tensor.shape, tensor.dtype)
    return tensor if _rehearsed and form.nbytes <= _KEPT_BYTES else form


@contextlib.contextmanager
def compiled_together(threads: int, *, recorded: bool = True, direct: bool = False) -> Iterator[None]:
    """Programs made in here are compiled in ``threads`` threads beside this one, on GPUs. None may run before the end.

    torch_xla compiles one program after the other, and takes half a second to read what XLA made of it. So each is
    captured twice: the first time leaves what is to be compiled, the second one gets its executable while the next
    programs are compiled. What the cache has is complete the first time. Where the body raises, nothing is left to be
    compiled.

    XLA tries kernels in the GPU's memory. A program for which several threads left too little is compiled again at the
    end, alone.

    Args:
      threads: how many compile.
      recorded: else each program is captured once, and compiled where it is made, as programs over several devices
        are: their parameters would be others the second time.
      direct: each program runs once at the end, on the inputs and the state that it was made with; from then on they
        are launched directly.
    """
    global _made, _recorded, _rehearsed
    made: dict[Program, bool] = {}
    together = executable_cache.compile_recorded(threads) if recorded else contextlib.nullcontext()
    with together:
        _made, _recorded, _rehearsed = made, recorded, direct
        try:
            yield
        finally:
            _made = None
        waiting = [program for program, complete in made.items() if not complete]
        failed = [program for program in waiting if not _succeeds(program.compile)]
    for program in failed:
        program.compile()
    if direct:
        _launch_directly(list(made))
    else:
        for program in made:
            program._made_with = None


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
      devices: over which it runs; None: one.
      donated: of which inputs the memory becomes the results'. They are gone after a call.
      lasting: which inputs are tensors that live on anyway. They are kept, whatever their size, until the program was
        compiled.

    Attributes:
      outputs: shape and dtype of each output.
      updated: indices of the inputs that the function updates in place. Their new values stand in front of the outputs.

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
        *,
        devices: Devices | None = None,
        donated: Sequence[int] = (),
        lasting: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.direct: DirectLaunch | None = None
        self._devices = devices
        self._donated = donated
        self._num_state = len(state)
        self.updated: list[int] = []
        self._ids: list[int] = []
        self._traced = False
        self._state_order: list[int] = []  # in which the program returns the state
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
        elif not _recorded:
            self.compile()
            _made[self] = True
        else:
            try:
                with executable_cache.recording():
                    self.compile()
                _made[self] = True
            except (RuntimeError, ValueError):
                if not self._traced:
                    raise
                global _failed  # recorded, or an error that comes again
                _failed += 1
                _made[self] = False
            kept = [tensor if index in lasting else _kept(tensor) for index, tensor in enumerate(inputs)]
            self._made_with = function, kept, state, options or {}

    def compile(self) -> None:
        """Captures and compiles it."""
        function, inputs, state, options = self._made_with
        if any(isinstance(made, _Form) for made in inputs):
            inputs = [made.tensor() if isinstance(made, _Form) else made for made in inputs]
            torch_xla.sync()
            xm.wait_device_ops()
        with executable_cache.compile_options(options):
            self._capture(function, inputs, state)

    def input_bytes(self) -> int:
        """Of what it was made with, before its launch is recorded."""
        return sum(tensor.nbytes for tensor in self._made_with[1])

    def record_launch(self) -> DirectLaunch | None:
        """Runs it once on what it was made with, of which the state becomes what it returns; how to launch it directly.

        None where the adapter did not see it.
        """
        _, kept, state, _ = self._made_with
        self._made_with = None
        if self.updated:
            return None
        inputs = [made.tensor() if isinstance(made, _Form) else made for made in kept]
        given = [*inputs, *state]
        torch_xla.sync()
        xm.wait_device_ops()

        def run() -> list[torch.Tensor]:
            results = self.run(given)
            xm.wait_device_ops()
            return results

        num_results = len(self.outputs) + len(state)
        handle, results = direct_launch.record(run, len(self._arguments), num_results)
        if handle is None and results:
            results[0].cpu()  # raises where the execution failed
        for tensor, result in zip(state, results[len(self.outputs) :], strict=True):
            _XLAC._replace_xla_tensor(tensor, result)
        place = {index: at for at, index in self._places}
        if handle is None or len(place) != len(self._places):
            return None
        order = [*range(len(inputs)), *(len(inputs) + index for index in self._state_order)]
        places = [place.get(index, -1) for index in order]
        launch = DirectLaunch(handle, places, self._state_order, self.outputs, self._arguments)
        for index, tensor in enumerate(kept):
            if places[index] >= 0 and not isinstance(tensor, _Form):
                launch.note(tensor, argument=places[index])
        for result, index in enumerate(self._state_order, len(self.outputs)):
            launch.note(state[index], result=result)
        return launch

    def _capture(
        self, function: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], state: Sequence[Any]
    ) -> None:
        before, began = fallbacks(), time.perf_counter()
        given = [*inputs, *state]
        devices = self._devices
        if devices is not None:
            # Otherwise a tensor that was copied from the host is a new parameter at each use.
            devices.mark_whole(given)
        self._ids = [_XLAC._xla_get_tensor_id(tensor) for tensor in given]
        position = {tensor_id: index for index, tensor_id in enumerate(self._ids)}
        aliases = [tensor.clone() for tensor in given] if devices is not None else []
        # A clone that was not computed yet shares the memory; it gives a tensor back what tracing replaces.
        saved = [(tensor, tensor.clone()) for tensor in given]
        donors = [*(inputs[index] for index in self._donated), *state]
        try:
            for tensor in donors:
                torch.ops.xla.dynamo_set_buffer_donor_(tensor, True)
            outputs = list(function(*given))
            self.outputs = [(output.shape, output.dtype) for output in outputs]
            changed = _XLAC._check_tensor_need_materialization(list(inputs))
            self.updated = [index for index, new in enumerate(changed) if new]
            self._order(outputs, inputs, state)
            roots = [*(inputs[i] for i in self.updated), *outputs, *(state[i] for i in self._state_order)]
            if devices is not None:
                devices.mark_whole(roots)
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
            if on_host := fallbacks_since(before):
                raise fallback_error(self.name, on_host)
            self._traced = True
            with alias_with_buffer_donor_config():
                self._hash = _XLAC._get_graph_hash(roots)
                _XLAC._xla_warm_up_cache(roots, [])
            logger.debug("%s: captured in %.2f s", self.name, time.perf_counter() - began)
        finally:
            replaced = _XLAC._check_tensor_need_materialization(given)
            for (tensor, original), new in zip(saved, replaced, strict=True):
                if new:
                    _XLAC._replace_xla_tensor(tensor, original)
            for tensor in donors:  # of this program alone
                torch.ops.xla.dynamo_set_buffer_donor_(tensor, False)
            _XLAC._clear_pending_irs(str(torch_xla.device()))

    def _order(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], state: Sequence[Any]) -> None:
        """Puts updated inputs, and the state, into the order of the program's parameters, which depends on theirs.

        XLA gives the first result of a size the memory of the first donated parameter of that size: another one than
        its own would be copied.
        """
        for _ in range(4):
            ids, _ = _XLAC._get_tensors_xla_device_data_node([*(inputs[i] for i in self.updated), *outputs, *state])
            place = {tensor_id: at for at, tensor_id in enumerate(ids)}
            at = [place.get(tensor_id, len(ids)) for tensor_id in self._ids]
            in_order = sorted(self.updated, key=at.__getitem__)
            if in_order == self.updated:
                break
            self.updated = in_order
        self._state_order = sorted(range(len(state)), key=lambda i: at[len(inputs) + i])

    def __call__(
        self, inputs: Sequence[Array | npt.NDArray[Any]], state: Sequence[Array] = ()
    ) -> tuple[list[Any], list[Any]]:
        """Launches the program; returns at once. The results can be inputs of the next program without waiting."""
        if self.direct is not None:
            return self.direct(inputs, state)
        device = torch_xla.device()
        on_device = [torch.from_numpy(value).to(device) if isinstance(value, np.ndarray) else value for value in inputs]
        results = self.run([*on_device, *state])[len(self.updated) :]
        split = len(results) - self._num_state
        return results[:split], results[split:]

    def arguments(self, given: Sequence[Any]) -> list[Any]:
        """What XLA's program takes: tensors that were captured, and inputs and state."""
        arguments = self._arguments.copy()
        for at, index in self._places:
            arguments[at] = given[index]
        return arguments

    def num_arguments(self) -> int:
        """Of XLA's program."""
        return len(self._arguments)

    def places(self) -> list[tuple[int, int]]:
        """Which of these is an input or a part of the state, and its number."""
        return self._places

    def run(self, given: Sequence[Any]) -> list[torch.Tensor]:
        """Launches it through torch_xla: new values of updated inputs, outputs, state, from inputs and state."""
        results: list[torch.Tensor] = _XLAC._run_cached_graph(self._hash, self.arguments(given))
        if self._num_state:
            split = len(results) - self._num_state
            results[split:] = [
                new
                for _, new in sorted(zip(self._state_order, results[split:], strict=True), key=operator.itemgetter(0))
            ]
        return results


def compute_pending(tensors: Sequence[torch.Tensor]) -> None:
    """Computes what is pending, these tensors among it: of a view torch_xla learns so where it is looked at."""
    _XLAC._check_tensor_need_materialization(list(tensors))
    torch_xla.sync()


def compilations() -> int:
    """How many programs XLA has compiled in this process."""
    timed = metrics.metric_data("CompileTime")
    return timed[0] - _failed if timed else 0
