"""Calls of handlers over memory that is laid out here: buffers full of garbage, between canaries."""

from __future__ import annotations

import numpy as np

from tests.common.arrays import NUMPY_DTYPES, to_numpy, torch
from tests.common.frontends import Frontend

EDGE = 512  # bytes of canary before and behind each buffer
CANARY = 0xA5
# What a buffer may hold before the call: zeros, NaN and -1, huge numbers, anything.
GARBAGE = ("zeros", "ones", "huge", "random")


def bind(operator: str, arrays: dict[str, np.ndarray], options: dict):
    """The custom call of an operator with these arrays."""
    from xla_gpu._core.operator import ArraySpec
    from xla_gpu.ops import OPERATORS

    (declared,) = (op for op in OPERATORS if op.name == operator)
    specs = {name: ArraySpec(tuple(x.shape), x.dtype.name) for name, x in arrays.items()}
    return declared.bind(**specs, **options, check_inputs=False)


class Memory:
    """One buffer for each array, EDGE bytes of canary around it."""

    def __init__(self, frontend: Frontend, shift: int = 0) -> None:
        self._shift = shift
        self._device = torch.device(frontend.device())
        self._blocks: list[tuple[str, torch.Tensor, int]] = []

    def place(self, name: str, size: int) -> torch.Tensor:
        """`size` bytes at an aligned address, or `shift` bytes behind one."""
        block = torch.full((2 * EDGE + size + 256,), CANARY, dtype=torch.uint8, device=self._device)
        start = EDGE + -(block.data_ptr() + EDGE) % 256 + self._shift
        self._blocks.append((name, block, start + size))
        block = block[start : start + size]
        return block

    def check(self) -> None:
        for name, block, end in self._blocks:
            start = EDGE + -(block.data_ptr() + EDGE) % 256 + self._shift
            for edge in (block[:start], block[end:]):
                assert bool((edge == CANARY).all()), f"something was written beside {name}"


def fill(memory: torch.Tensor, garbage: str, rng: np.random.Generator) -> None:
    match garbage:
        case "random":
            memory.copy_(torch.from_numpy(rng.integers(0, 256, memory.numel(), np.uint8)))
        case _:
            memory.fill_({"zeros": 0x00, "ones": 0xFF, "huge": 0x7F}[garbage])


def run(
    frontend: Frontend,
    operator: str,
    arrays: dict[str, np.ndarray],
    options: dict | None = None,
    *,
    garbage: str = "ones",
    alias: bool = True,
    shift: int = 0,
) -> tuple[np.ndarray, ...]:
    """The operator's results, computed in buffers that held garbage; scratch left out. With `alias` a result that may
    share an operand's buffer does. Buffers begin `shift` bytes behind aligned addresses. The canaries are looked at,
    also where the handler returns an error."""
    from xla_gpu._runtime import targets
    from xla_gpu._runtime.call_frame import Frame
    from xla_gpu._runtime.scratch import all_results

    rng = np.random.default_rng(1)
    call = bind(operator, arrays, options or {})
    cuda = frontend.platform == "cuda"
    memory = Memory(frontend, shift)

    def placed(name, spec):
        dtype = getattr(torch, spec.dtype)
        count = int(np.prod(spec.shape, dtype=np.int64))
        return memory.place(name, count * dtype.itemsize), dtype, spec.shape

    operands = []
    for name, spec in zip(call.operand_names, call.operands, strict=True):
        buffer, _, _ = placed(name, spec)
        if buffer.numel():
            buffer.copy_(torch.from_numpy(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).copy()))
        operands.append(buffer)
    results = []
    for i, spec in enumerate(all_results(call)):
        buffer, dtype, shape = placed(f"result {i}", spec)
        if alias and i in [result for _, result in call.aliases]:
            (operand,) = (operand for operand, result in call.aliases if result == i)
            buffer = operands[operand]
        else:
            fill(buffer, garbage, rng)
        results.append((buffer, dtype, shape))

    frame = Frame(call, targets.lookup(call.target, "CUDA" if cuda else "cpu"), all_results(call))
    stream = torch.cuda.current_stream().cuda_stream if cuda else None
    addresses = [x.data_ptr() for x in operands], [x.data_ptr() for x, _, _ in results]
    try:
        frame.run(*addresses, stream, torch.cuda.current_device() if cuda else -1)
    finally:
        if cuda:
            torch.cuda.synchronize()
        memory.check()
    return tuple(
        to_numpy(buffer.view(dtype).reshape(shape)) if buffer.numel() else np.zeros(shape, NUMPY_DTYPES[dtype])
        for buffer, dtype, shape in results[: len(call.results)]
    )
