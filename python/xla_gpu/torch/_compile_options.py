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
    executable_cache.check_options("compile_options: options", options)
    with executable_cache.compile_options(options):
        yield
