"""Programs that are called without tracing."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .._core import compatibility
from .._runtime.executable_cache import check_options

if TYPE_CHECKING:
    from .._torch_xla.jit import JitFunction


def jit(
    function: Callable[..., Any],
    *,
    donate_argnums: int | Sequence[int] = (),
    compiler_options: Mapping[str, bool | int] | None = None,
) -> JitFunction:
    """Makes one XLA program of a function of XLA tensors, as jax.jit does. For inference.

    The first call traces the function with torch_xla's lazy tensors and compiles it. Later calls run that program,
    without tracing, Dynamo or guards. Other shapes, dtypes, numbers of tensors, nesting or values of what is no tensor
    are another program: the call traces and compiles it, and both are kept.

    * It may decorate a method. The object is then such a constant, by its hash: another object is another program.
    * Arguments are tensors of the XLA device; CPU tensors and NumPy arrays, which each call copies there; lists, tuples
      and dicts of such; and hashable values, which are constants of the program. Keyword arguments are not taken.
    * Tensors that the function updates in place have their new values after the call; what they are views of has not.
    * All other tensors that it reads, a module's parameters for example, are those that it read when it was traced.
      None of them should be an argument of that call, too. ``clear_cache()`` of the result has the next call read them
      anew. The same holds for anything else outside of its arguments: Python code runs at the trace alone, and random
      numbers of PyTorch are the same in each call.
    * It may call other functions of jit, which become part of its program. Tensors that it computes have values in its
      results alone: one that is kept elsewhere cannot be read.
    * Results are XLA tensors in the structure that the function returned. Nothing is waited for.

    Args:
      function: takes and returns what is said above.
      donate_argnums: numbers of the arguments whose memory the program may use for results of the same shape and
        dtype. A donated tensor can be used no more after the call, unless the function updated it in place.
      compiler_options: XLA's, by the names that XLA_FLAGS has for them; see compile_options. On GPUs.

    Returns:
      A callable with the function's arguments and the method ``clear_cache()``.

    Raises:
      TypeError: function cannot be called, donate_argnums is neither an int nor a sequence of such, or compiler_options
        are none, as for compile_options.

    Raises (when called):
      TypeError: an argument, or a part of one, is neither a tensor nor hashable; the function returns a dataclass,
        an iterator or a set of tensors.
      ValueError: a tensor is on another device, is sparse, nested or quantised by PyTorch, requires a gradient, has a
        tangent, or stands in the places of two arguments; the function returns a tensor that is not on the XLA device,
        or updates one in place that is no argument or not on that device; a number in donate_argnums is no argument's.
      RuntimeError: the call is under torch.vmap or torch.func, traced by torch.export or make_fx, or has fake tensors;
        the function needs the value of a tensor, for item(), bool() or cpu() for example, or another thread ran
        programs of torch_xla or read tensors beside three traces of it, which looks the same; an operation of it would
        run on the host; torch_xla's SPMD is on, for which ``torch.compile(backend="openxla")`` is; XLA cannot compile
        the program.
    """
    compatibility.torch_xla("xla_gpu.torch.jit")
    from .._torch_xla.jit import JitFunction

    if not callable(function):
        raise TypeError(f"jit: function: expected a function, got {type(function).__name__}")
    numbers = donate_argnums if isinstance(donate_argnums, Sequence) else [donate_argnums]
    if any(isinstance(number, bool) or not hasattr(number, "__index__") for number in numbers):
        raise TypeError(f"jit: donate_argnums: expected an int or a sequence of ints, got {donate_argnums!r}")
    options = {} if compiler_options is None else compiler_options
    check_options("jit: compiler_options", options)
    return JitFunction(function, [operator.index(number) for number in numbers], options)
