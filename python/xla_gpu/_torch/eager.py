"""The eager front ends: handlers called on the memory of CPU and CUDA tensors, on PyTorch's current stream."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from .._core.operator import CACHED_CALLS, OpCall
from .._runtime import library, targets
from .._runtime.call_frame import Frame
from .._runtime.scratch import all_results
from .tensors import torch_dtype

# What kernels may rely on for vector loads. XLA's allocators and PyTorch's give more; views into a tensor may not.
_ALIGNMENT = 16


class _Plan:
    """What is known about a call before the tensors are: made once per OpCall and platform."""

    def __init__(self, call: OpCall, platform: str) -> None:
        self.call = call
        self.target = targets.lookup(call.target, platform)
        targets.check_version(
            self.target, library.load().ffi_api(), "the library, which calls handlers of eager tensors,"
        )
        self.aliased = {result: operand for operand, result in call.aliases}
        self.operand_layouts = [permutation(call.operand_layout(i)) for i in range(len(call.operands))]
        specs = all_results(call)
        self.results = [
            (spec.shape, torch_dtype(f"{call.name}: result {i}", spec.dtype), permutation(call.result_layout(i)))
            for i, spec in enumerate(specs)
        ]
        self._make_frame = functools.partial(Frame, call, self.target, specs)
        # A frame serves one call at a time, and handlers run without the GIL: threads take frames from this list, whose
        # pop and append are atomic.
        self._frames: list[Frame] = []

    def run(self, operands: Sequence[int], results: Sequence[int], stream: int | None, ordinal: int) -> None:
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = self._make_frame()
        try:
            frame.run(operands, results, stream, ordinal)
        finally:
            self._frames.append(frame)


_plan = functools.lru_cache(maxsize=CACHED_CALLS)(_Plan)


def run(call: OpCall, tensors: Sequence[torch.Tensor], in_place: bool = False) -> tuple[torch.Tensor, ...]:
    """Runs ``call`` on the tensors' device and returns its results, scratch left out.

    Operands that are not row-major and dense (or not as their layout asks) are copied first. A result that aliases an
    operand is a copy of it, or with ``in_place`` the operand itself, which then must be dense.
    """
    device = tensors[0].device
    cuda = device.type == "cuda"
    plan = _plan(call, "CUDA" if cuda else "cpu")

    operands = []
    for tensor, order in zip(tensors, plan.operand_layouts, strict=True):
        memory = tensor if order is None else tensor.permute(order)
        if not memory.is_contiguous() or memory.is_neg() or memory.is_conj():
            memory = memory.resolve_conj().resolve_neg().contiguous()
        if memory.data_ptr() % _ALIGNMENT:
            memory = memory.clone()
        operands.append(memory)

    results, memories = [], []
    for i, (shape, dtype, order) in enumerate(plan.results):
        aliased = plan.aliased.get(i)
        if aliased is None:
            memory = empty_memory(shape, dtype, device, order)
        elif in_place:
            _check_in_place(call, tensors, operands, aliased)
            memory = operands[aliased]
        else:
            memory = operands[aliased] = operands[aliased].clone()
        memories.append(memory)
        results.append(array_in(memory, order))

    try:
        plan.run(
            [memory.data_ptr() for memory in operands],
            [memory.data_ptr() for memory in memories],
            torch.cuda.current_stream(device).cuda_stream if cuda else None,
            device.index if cuda else -1,
        )
    except ValueError:
        _check_memory(call, tensors)
        raise
    return tuple(results[: len(call.results)])


def _check_memory(call: OpCall, tensors: Sequence[torch.Tensor]) -> None:
    """Names a tensor whose memory was freed beneath it, as FSDP frees parameters; the library sees addresses alone."""
    for name, tensor in zip(call.operand_names, tensors, strict=True):
        if tensor.numel() and not tensor.data_ptr():
            size = tensor.untyped_storage().nbytes()
            raise ValueError(
                f"{call.name}: {name}: expected a tensor with memory, got one whose storage has {size} bytes"
            )


def _check_in_place(call: OpCall, tensors: Sequence[torch.Tensor], operands: list[torch.Tensor], index: int) -> None:
    where = f"{call.name}: {call.operand_names[index]}"
    target, given = operands[index], tensors[index]
    if target.data_ptr() != given.data_ptr():  # a copy was made above, and writing into it would be lost
        if given.data_ptr() % _ALIGNMENT:
            got = f"one at {given.data_ptr() % _ALIGNMENT} bytes past such an address"
        else:
            got = f"strides {given.stride()}"
        raise ValueError(
            f"{where}: expected a row-major tensor at an address aligned to {_ALIGNMENT} bytes, "
            f"since it is updated in place, got {got}"
        )
    start, end = _extent(target)
    for i, other in enumerate(operands):
        other_start, other_end = _extent(other)
        if i != index and other_start < end and start < other_end:
            raise ValueError(
                f"{where}: expected memory that does not overlap {call.operand_names[i]}, since it is updated in place"
            )


def _extent(memory: torch.Tensor) -> tuple[int, int]:
    """First byte and end of a dense tensor; an empty one overlaps nothing."""
    start = memory.data_ptr()
    return start, start + memory.numel() * memory.element_size()


def permutation(layout: tuple[int, ...]) -> tuple[int, ...] | None:
    """``layout`` as the argument of permute(), None if that would do nothing."""
    return None if layout == tuple(range(len(layout))) else layout


def empty_memory(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, order: tuple[int, ...] | None
) -> torch.Tensor:
    """Memory of a result, whose axes are in the order that ``permutation`` gave for its layout."""
    return torch.empty(shape if order is None else [shape[axis] for axis in order], dtype=dtype, device=device)


def array_in(memory: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """The result whose memory that is."""
    return memory if order is None else memory.permute(sorted(range(len(order)), key=order.__getitem__))
