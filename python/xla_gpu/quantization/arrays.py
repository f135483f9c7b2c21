"""What NumPy, PyTorch and JAX spell differently."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

Array = Any  # of NumPy, PyTorch or JAX

_LIBRARIES = {"numpy": "numpy", "torch": "torch", "jax": "jax.numpy", "jaxlib": "jax.numpy"}  # by the package of a type

_NAMES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "int8", "uint8")  # of dtypes that weights are stored in


def library(array: Array, where: str = "quantization") -> ModuleType:
    """The module whose functions take ``array``: numpy, torch or jax.numpy.

    Raises:
      TypeError: it is of none of them; ``where`` begins the text.
    """
    name = _LIBRARIES.get(_root(type(array)))
    if name is None:  # a class of another package may be derived from an array, as parameters of models are
        name = next((_LIBRARIES[root] for root in map(_root, type(array).__mro__) if root in _LIBRARIES), None)
    if name is None:
        raise TypeError(f"{where}: expected an array of NumPy, PyTorch or JAX, got {type(array).__name__}")
    return sys.modules[name]


def _root(of: type) -> str:
    """The package that defines a class."""
    return of.__module__.partition(".")[0]


def cast(array: Array, dtype: Any) -> Array:
    """``array`` in ``dtype``: a name as NumPy spells it, or the library's own."""
    xp = library(array)
    if isinstance(dtype, str) and dtype not in _NAMES:
        raise TypeError(f"quantization: dtype: expected {', '.join(_NAMES)}, got {dtype!r}")
    if xp.__name__ == "torch":
        return array.to(getattr(xp, dtype) if isinstance(dtype, str) else dtype)
    if isinstance(dtype, str) and dtype in ("bfloat16", "float8_e4m3fn"):
        try:
            import ml_dtypes
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                f"quantization: NumPy has {dtype} with the package ml_dtypes, which is not installed: "
                "pip install ml_dtypes, or pass PyTorch's tensors",
                name="ml_dtypes",
            ) from None

        dtype = getattr(ml_dtypes, dtype)
    return array.astype(dtype)


def dtype_name(array: Array) -> str:
    """As NumPy spells it."""
    return str(array.dtype).removeprefix("torch.")


def detached(array: Array) -> Array:
    """``array`` without PyTorch's graph, which a parameter of a model would bring along."""
    return array.detach() if library(array).__name__ == "torch" else array


def largest(array: Array) -> int | None:
    """The largest element of an array of integers; None where elements are not known, or not yet."""
    xp = library(array)
    if 0 in array.shape:
        return None
    if xp.__name__ == "torch":
        traced = xp.compiler.is_compiling() or is_fake(array) or xp._C._functorch.is_functorch_wrapped_tensor(array)
        unknown = array.device.type not in ("cpu", "cuda") or traced
    else:
        unknown = xp.__name__ == "jax.numpy" and isinstance(array, sys.modules["jax"].core.Tracer)
    return None if unknown else int(array.max())


def is_fake(tensor: Array) -> bool:
    """Whether it is one of torch.compile's tensors without elements."""
    return isinstance(tensor, sys.modules["torch"]._subclasses.FakeTensor)


def concatenate(arrays: list[Array]) -> Array:
    """Joined along the first dimension."""
    xp = library(arrays[0])
    return (xp.cat if xp.__name__ == "torch" else xp.concatenate)(arrays, 0)


def repeat(array: Array, times: int, axis: int) -> Array:
    """Each element ``times`` times in a row."""
    xp = library(array)
    return (xp.repeat_interleave if xp.__name__ == "torch" else xp.repeat)(array, times, axis)
