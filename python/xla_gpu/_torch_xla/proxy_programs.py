"""Programs that torch_xla executes by a proxy: a small program, in whose place the PJRT adapter executes them.

The proxy takes the arguments of a call and returns what is new. Captured tensors, and those that are updated in place,
cost torch_xla nothing so (ffi/runtime/proxy_programs.h). All else is as with the program: torch_xla orders, waits for
and reports its execution.

A tensor that a program updates in place keeps its buffer of torch_xla, which has other memory behind it from then on.
That is right where nothing else has this buffer, no computation that is pending, no tensor that was copied lazily. So a
tensor is updated by a proxy where a program of jit that has one made its buffer, and torch_xla no tensor since. Else
the program itself is executed, which takes the memory away from whatever else has it, and makes another buffer.
"""

from __future__ import annotations

import atexit
import ctypes as ct
import itertools
import logging
import os
import threading
from collections.abc import Sequence

import torch
import torch_xla
import torch_xla.core.xla_model as xm

from .._runtime import library
from . import lowering, shared_memory
from .program import _XLAC, Program, compute_pending

logger = logging.getLogger("xla_gpu")

_exiting = False


@atexit.register
def _exit() -> None:
    global _exiting
    _exiting = True


class _References:
    """Whether something may have taken a reference to torch_xla's buffers: by its counters.

    Each operation makes a tensor, but for copies into one of the same shape. A transfer from the host makes one, too,
    and is told apart by what else it counts.

    Attributes:
      lock: held by a call of a program, whose own tensors must be counted.
      generation: another one where something may have.
    """

    _NAMES = ("CreateXlaTensor", "xla::_copy_from", "xla::empty_symint", "xla::copy")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.generation = 0
        self._expected = [0] * (len(self._NAMES) + 1)

    def begin(self) -> int:
        """Before a call: the generation of now."""
        counts = [_XLAC._xla_counter_value(name) or 0 for name in self._NAMES]
        counts.append(library.load().cdll.xla_gpu_host_transfers())
        made, *transfers, into, transferred = (now - then for now, then in zip(counts, self._expected, strict=True))
        if into or (made and any(number != made for number in (*transfers, transferred))):
            self.generation += 1
        self._expected = counts
        return self.generation

    def made(self, tensors: int, transferred: int = 0) -> None:
        """The call has made so many tensors, and transferred some of them from the host."""
        self._expected[0] += tensors
        self._expected[-1] += transferred


references = _References()

# The generation in which a program of jit that has a proxy made the buffer of a tensor, kept on it.
_ATTRIBUTE = "_xla_gpu_generation"


def note_made(tensor: torch.Tensor, generation: int | None) -> None:
    """A program of jit has made the tensor's buffer in a call that began so; None: one that has no proxy."""
    setattr(tensor, _ATTRIBUTE, generation)


def available() -> bool:
    """Whether there are proxies: with XLA_GPU_JIT_PROXIES=1 on a GPU, whose client is behind the adapter.

    They are no default: the host's time that they save lies behind the device's, and that nothing else has a tensor's
    buffer is concluded from counters of torch_xla.
    """
    if os.environ.get("XLA_GPU_JIT_PROXIES") != "1" or os.environ.get("XLA_DISABLE_FUNCTIONALIZATION"):
        return False
    return lowering.platform() == "CUDA" and os.environ.get("PJRT_DEVICE", "").upper() == "GPU"


# Programs of equal computations would be one executable, so that each proxy computes with another size.
_sizes = itertools.count(2)


class ProxyProgram:
    """What is executed in the place of ``program``, once both were recorded.

    Args:
      program: without state.
      given: what it was made with.
      updated: numbers of the inputs that are updated in place. The program's other results are the proxy's.
    """

    def __init__(self, program: Program, given: Sequence[torch.Tensor], updated: Sequence[int]) -> None:
        self._handle = ct.c_void_p()
        self._program = program
        self._updated = list(updated)
        new = ((given[i].shape, given[i].dtype) for i in program.updated if i not in updated)
        self._forms = [*new, *program.outputs]
        read = [index for _, index in program.places()]
        size = next(_sizes)

        def proxy(*tensors: torch.Tensor) -> list[torch.Tensor]:
            device = torch_xla.device()
            total = torch.zeros(size, device=device).sum()
            for index in read:
                total = total + tensors[index].reshape(-1)[:1].to(torch.float32).sum()
            return [torch.zeros(shape, dtype=dtype, device=device) + total.to(dtype) for shape, dtype in self._forms]

        with torch.no_grad():
            self._proxy = Program(f"{program.name}: proxy", proxy, given)

    @classmethod
    def make(cls, program: Program, given: Sequence[torch.Tensor], updated: Sequence[int]) -> ProxyProgram | None:
        """None where the program is executed itself."""
        if not available() or len(program.updated) + len(program.outputs) == len(updated):
            return None
        try:
            return cls(program, given, updated)
        except RuntimeError as error:  # a dtype that torch_xla cannot convert
            logger.debug("%s: no proxy: %s", program.name, error)
            return None

    def record(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Executes proxy and program; the program's results."""
        program = None
        proxy, _ = _record(self._proxy, given, len(self._forms))
        try:
            program, results = _record(self._program, given, len(self._program.updated) + len(self._program.outputs))
            if proxy is not None and program is not None:
                self._put_in_place(proxy, program)
        finally:
            for execution in (proxy, program):
                if execution is not None:
                    library.load().cdll.xla_gpu_execution_destroy(execution)
        return results

    def _put_in_place(self, proxy: int, program: int) -> None:
        argument = {index: at for at, index in self._proxy.places()}
        if not {index for _, index in self._program.places()} <= argument.keys():
            return
        places = [-1] * self._program.num_arguments()
        for at, index in self._program.places():
            places[at] = argument[index]
        new = itertools.count()
        results = [~argument[index] if index in self._updated else next(new) for index in self._program.updated]
        results += [next(new) for _ in self._program.outputs]
        error = library.load().cdll.xla_gpu_proxy_make(
            proxy,
            program,
            (ct.c_int32 * len(places))(*places),
            (ct.c_int32 * len(results))(*results),
            ct.byref(self._handle),
        )
        _raise(error)

    def __bool__(self) -> bool:
        return self._handle.value is not None

    def may_run(self, given: Sequence[torch.Tensor], generation: int) -> bool:
        """Whether nothing else has the buffers of what it updates."""
        return all(getattr(given[index], _ATTRIBUTE, None) == generation for index in self._updated)

    def run(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Launches it: the results that are new ones."""
        return self._proxy.run(given)

    def __del__(self) -> None:
        if self._handle.value is not None and not _exiting:
            try:
                xm.wait_device_ops()  # what was launched needs what was captured
            finally:  # also where that tells of a computation that failed
                library.load().cdll.xla_gpu_proxy_destroy(self._handle)


def _record(program: Program, given: Sequence[torch.Tensor], num_results: int) -> tuple[int | None, list[torch.Tensor]]:
    """The adapter's handle of an execution, None where it cannot have one, and what that returned."""
    cdll = library.load().cdll
    compute_pending(given)
    xm.wait_device_ops()
    cdll.xla_gpu_execution_note()
    try:
        for argument in program.arguments(given):
            shared_memory.wait_for_buffer(argument)
        error = cdll.xla_gpu_execution_record(num_results)
        if error is not None:  # a plug-in without views of buffers
            logger.debug("%s: %s", program.name, error.decode(errors="replace"))
        results = program.run(given)
        xm.wait_device_ops()
    except BaseException:
        cdll.xla_gpu_execution_destroy(cdll.xla_gpu_execution_take())
        raise
    return cdll.xla_gpu_execution_take(), results


def _raise(error: bytes | None) -> None:
    if error is not None:
        raise RuntimeError(error.decode(errors="replace"))
