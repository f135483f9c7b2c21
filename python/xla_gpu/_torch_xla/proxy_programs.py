"""Programs that torch_xla executes by a proxy: a small program, in whose place the PJRT adapter executes them.

The proxy takes the arguments of a call alone, so that captured tensors cost torch_xla nothing
(ffi/runtime/proxy_programs.h). All else is as with the program: results, donated arguments, order, waits and errors are
those of an execution of torch_xla like all others.
"""

from __future__ import annotations

import atexit
import collections
import ctypes as ct
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm

from .._core.environment import pjrt_device, switch
from .._runtime import library
from . import lowering, shared_memory
from .program import Program, compute_pending

logger = logging.getLogger("xla_gpu")

# With fewer captured tensors a proxy saves less than its compilation takes.
CAPTURED = 16

_exiting = False


@atexit.register
def _exit() -> None:
    global _exiting
    _exiting = True


def available() -> bool:
    """Whether there are proxies: on a GPU whose client is behind the adapter, unless XLA_GPU_JIT_PROXIES=0."""
    if not switch("XLA_GPU_JIT_PROXIES", True) or os.environ.get("XLA_DISABLE_FUNCTIONALIZATION"):
        return False
    return lowering.platform() == "CUDA" and pjrt_device() == "GPU"


# Programs of equal computations would be one executable, so that each proxy computes with another size than those with
# arguments and results of the same shapes: in whichever order functions are called, a process finds what the executable
# cache has of another one.
_sizes: collections.defaultdict[Any, Iterator[int]] = collections.defaultdict(lambda: itertools.count(2))


class ProxyProgram:
    """Runs ``program`` by a proxy from its third call on: the first one is recorded, the second one made the proxy's.

    Args:
      program: without state.
      given: what it was made with.
    """

    def __init__(self, program: Program, given: Sequence[torch.Tensor]) -> None:
        self._handle = ct.c_void_p()
        self._recorded = ct.c_void_p()
        self._program = program
        forms = [*((given[i].shape, given[i].dtype) for i in program.updated), *program.outputs]
        read = [index for _, index in program.places()]
        size = next(_sizes[tuple(given[index].shape for index in read), tuple(shape for shape, _ in forms)])

        def proxy(*tensors: torch.Tensor) -> list[torch.Tensor]:
            device = torch_xla.device()
            total = torch.zeros(size, device=device).sum()
            for index in read:
                total = total + tensors[index].reshape(-1)[:1].to(torch.float32).sum()
            return [torch.zeros(shape, dtype=dtype, device=device) + total.to(dtype) for shape, dtype in forms]

        with torch.no_grad():
            self._proxy: Program | None = Program(f"{program.name}: proxy", proxy, given)

    @classmethod
    def make(cls, program: Program, given: Sequence[torch.Tensor]) -> ProxyProgram | None:
        """None where the program is executed itself."""
        captured = program.num_arguments() - len(program.places())
        if captured < CAPTURED or not (program.updated or program.outputs) or not available():
            return None
        try:
            return cls(program, given)
        except RuntimeError as error:  # a dtype that torch_xla cannot convert
            logger.debug("%s: no proxy: %s", program.name, error)
            return None

    def run(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Launches it."""
        if self._handle.value is not None:
            assert self._proxy is not None
            return self._proxy.run(given)
        if self._proxy is None:
            return self._program.run(given)
        return self._record(given) if self._recorded.value is None else self._put_in_place(given)

    def _record(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        cdll = library.load().cdll
        take = cdll.xla_gpu_execution_take
        results = _awaited(self._program, given, cdll.xla_gpu_execution_record, take, self._recorded)
        if self._recorded.value is None:
            self._give_up("its execution was not seen")
        return results

    def _put_in_place(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        cdll, proxy = library.load().cdll, self._proxy
        assert proxy is not None
        argument = {index: at for at, index in proxy.places()}
        places = [-1] * self._program.num_arguments()
        for at, index in self._program.places():
            places[at] = argument.get(index, -1)
        if not {index for _, index in self._program.places()} <= argument.keys():
            self._give_up("it does not have its arguments")
            return self._program.run(given)
        array = (ct.c_int32 * len(places))(*places)

        def expect() -> bytes | None:
            error: bytes | None = cdll.xla_gpu_proxy_expect(self._recorded, array, len(places))
            return error

        results = _awaited(proxy, given, expect, cdll.xla_gpu_proxy_take, self._handle)
        cdll.xla_gpu_execution_destroy(self._recorded)
        self._recorded.value = None
        if self._handle.value is None:
            self._give_up("it was not seen")
            return self._program.run(given)  # the proxy has left the arguments as they were
        return results

    def _give_up(self, reason: str) -> None:
        logger.debug("%s: no proxy: %s", self._program.name, reason)
        self._proxy = None

    def __del__(self) -> None:
        if _exiting:
            return
        if self._recorded.value is not None:
            library.load().cdll.xla_gpu_execution_destroy(self._recorded)
        if self._handle.value is not None:
            try:
                xm.wait_device_ops()  # what was launched needs what was captured
            finally:  # also where that tells of a computation that failed
                library.load().cdll.xla_gpu_proxy_destroy(self._handle)


def _awaited(
    program: Program,
    given: Sequence[torch.Tensor],
    expect: Callable[[], bytes | None],
    take: Callable[[], int | None],
    taken: ct.c_void_p,
) -> list[torch.Tensor]:
    """What an execution that the adapter expects returns; ``taken`` becomes what the adapter made of it, or null."""
    compute_pending(given)
    xm.wait_device_ops()
    library.load().cdll.xla_gpu_execution_note()
    try:
        for argument in program.arguments(given):
            shared_memory.wait_for_buffer(argument)
        error = expect()
        if error is not None:  # a plug-in without the entries that this needs
            logger.debug("%s: %s", program.name, error.decode(errors="replace"))
        results = program.run(given)
        xm.wait_device_ops()
    finally:
        taken.value = take()
    return results
