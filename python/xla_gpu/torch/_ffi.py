"""Third-party FFI handlers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._runtime import targets
from .._torch.ffi_call import FfiCall


def register_ffi_target(name: str, fn: Any, platform: str = "cpu", api_version: int = 1) -> None:
    """Registers a typed XLA FFI handler as the target ``name``, for torch_xla and for eager tensors.

    It has the parameters of jax.ffi.register_ffi_target. torch_xla's runtime learns of the target when it is first
    called there.

    Args:
      name: the target's name, for ffi_call.
      fn: the handler: a PyCapsule, a ctypes function pointer, or a dict of these by stage ("instantiate", "prepare",
        "initialize", "execute").
      platform: "cpu" or "CUDA".
      api_version: 1, the typed FFI.

    Raises:
      xla_gpu.errors.TargetError: another function has this name on this platform; platform, api_version or a key of
        the dict is not one of those above; or, on "cpu", the handler was built with a newer FFI API than the
        runtimes accept.
      TypeError: name or fn is of another type.
    """
    targets.register(name, fn, platform, api_version)


def ffi_call(
    target_name: str,
    result_shape_dtypes: Any,
    *,
    has_side_effect: bool = False,
    input_layouts: Sequence[Sequence[int] | None] | None = None,
    output_layouts: Sequence[Sequence[int] | None] | Sequence[int] | None = None,
    input_output_aliases: dict[int, int] | None = None,
) -> FfiCall:
    """Returns a function that calls an FFI target on tensors, with the meaning of jax.ffi.ffi_call.

    ``ffi_call("my_target", x)(x, y, scale=np.float32(2), n=3)`` passes x and y as buffers, and scale and n as
    attributes. It takes XLA, eager CPU, eager CUDA, meta and fake tensors; torch.compile and torch.export trace through
    it.

    Attributes arrive in the handler with the types that jax.ffi gives them: a Python bool, int or float as bool,
    int64_t or double; a NumPy scalar with its own type; a NumPy array as a span of its elements; str and bytes as a
    string; a dict as a dictionary. torch.compile turns NumPy values into tensors, so bind them outside of the compiled
    function: ``f = ffi_call("my_target", x).bind(scale=np.float32(2))``, and call ``f(x, y)`` inside.

    Args:
      target_name: a name given to register_ffi_target.
      result_shape_dtypes: anything with ``shape`` and ``dtype``, such as a tensor on the meta device; or a sequence of
        these, one for each result.
      has_side_effect: XLA neither drops the call nor merges it with an equal one. Still use one of its results:
        torch_xla's lazy graph and torch.compile's Inductor drop a call whose results are unused before XLA sees it.
      input_layouts: for each operand None (row-major) or its axes, major to minor.
      output_layouts: for each result likewise; for a single result that is not in a sequence, its layout itself.
      input_output_aliases: operand index to result index. The handler gets one buffer for both. The caller's operand
        keeps its value: where it is needed later, and for eager tensors, the handler gets a copy of it.

    Returns:
      A function of tensors and attributes. It returns a tensor; or a tuple or list of tensors where result_shape_dtypes
        is a tuple or another sequence.

    Raises:
      xla_gpu.errors.TargetError: by the function returned: the target is not registered on the tensors' platform, or
        the runtime refuses it, for example because it was built with a newer FFI API.
      ValueError: operands, layouts, aliases or attributes do not fit together.
      TypeError: an argument or an attribute is of another type.
    """
    return FfiCall(
        target_name,
        result_shape_dtypes,
        has_side_effect=has_side_effect,
        input_layouts=input_layouts,
        output_layouts=output_layouts,
        input_output_aliases=input_output_aliases,
    )
