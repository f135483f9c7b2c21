"""XLA's options for some of torch_xla's programs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from .._runtime import executable_cache


@contextlib.contextmanager
def compile_options(options: Mapping[str, bool | int]) -> Iterator[None]:
    """Gives programs that torch_xla compiles for GPUs in this context XLA's options.

    The counterpart of ``jax.jit(..., compiler_options=...)``; XLA_FLAGS sets options for the whole process. A program
    that has been compiled before keeps its own. The options are the process's: no other thread may compile meanwhile.
    A context inside of another adds its options to those of the other, or replaces them by name, until its end. On the
    CPU, whose client is torch_xla's own, they have no effect. The executable cache has an entry for each set
    of options.

    Args:
      options: by the names that XLA_FLAGS has for them, without dashes in front: ``{"xla_gpu_enable_triton_gemm":
        False}``.

    Raises:
      TypeError: ``options`` is not a mapping, a name is not a str, or a value is neither a bool nor an int.
      ValueError: an int does not fit into 64 bits.
      RuntimeError, ValueError: from torch_xla, where a program is compiled: XLA has no such option.
    """
    if not isinstance(options, Mapping):
        raise TypeError(f"compile_options: options: expected a mapping, got {type(options).__name__}")
    for name, value in options.items():
        if not isinstance(name, str) or not isinstance(value, bool | int):
            got = f"{name!r}: {value!r}"
            raise TypeError(f"compile_options: options: expected names of options and bools or ints, got {got}")
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"compile_options: options: expected {name} to be of 64 bits, got {value}")
    with executable_cache.compile_options(options):
        yield
