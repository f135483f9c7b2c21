"""What the benchmarks do on a machine with less memory than theirs."""

from __future__ import annotations

import pytest
from benchmarks import memory


class OutOfMemoryError(RuntimeError):
    """As PyTorch's."""


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
    ids=range(4),
)
def test_a_load_that_does_not_fit_is_left_out(capsys, error):
    with memory.left_out_if_too_large("64x128k"):
        raise error
    assert capsys.readouterr().out.startswith("64x128k: not measured, needs more memory than is free: ")


def test_other_errors_end_a_benchmark():
    with pytest.raises(AssertionError, match="wrong result"), memory.left_out_if_too_large("64x128k"):
        raise AssertionError("wrong result")
