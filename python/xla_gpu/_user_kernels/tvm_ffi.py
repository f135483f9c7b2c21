"""tvm-ffi functions as FFI targets: each gets a typed handler of the library, by which every runtime calls it."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from .._runtime import abi, library, targets
from ..errors import CompatibilityError, TargetError

_FUNCTIONS = {
    "function_call": "TVMFFIFunctionCall",
    "env_set_stream": "TVMFFIEnvSetStream",
    "error_move_from_raised": "TVMFFIErrorMoveFromRaised",
    "object_dec_ref": "TVMFFIObjectDecRef",
}


class Registration(NamedTuple):
    """A registered function; kept, since handlers call it as long as the process lives."""

    function: Any
    arguments: tuple[str, ...]
    allow_capture: bool
    address: int  # of the handler


_lock = threading.Lock()
_registered: dict[tuple[str, str], Registration] = {}


def register(name: str, function: Any, platform: str, arguments: Sequence[str], allow_capture: bool) -> int:
    """The address of the handler for a function, registered as a target; see xla_gpu.torch.register_tvm_ffi_target."""
    where = f"register_tvm_ffi_target: {name}"
    if not isinstance(name, str) or not name:
        raise TypeError(f"register_tvm_ffi_target: name: expected a string that is not empty, got {name!r}")
    if platform not in targets.PLATFORMS:
        raise TargetError(f"{where}: platform: expected 'cpu' or 'CUDA', got {platform!r}")
    if isinstance(arguments, str) or not all(isinstance(argument, str) for argument in arguments):
        raise TypeError(f"{where}: arguments: expected a sequence of strings, got {arguments!r}")
    api = _api()
    import tvm_ffi

    if not isinstance(function, tvm_ffi.Function):
        raise TypeError(
            f"{where}: function: expected a tvm_ffi.Function, as a tvm_ffi.Module has them, got "
            f"{type(function).__name__}; Python functions cannot be called by XLA's threads"
        )
    key = (name, platform)
    with _lock:
        known = _registered.get(key)
        if known is not None:
            if (known.function.__chandle__(), known.arguments, known.allow_capture) != (
                *(function.__chandle__(), tuple(arguments), allow_capture),
            ):
                raise TargetError(f"{where}: it is registered on platform {platform!r} already, with another function")
            return known.address
        address = _handler(where, api, name, function, platform, arguments, allow_capture)
        targets.register(name, targets.capsule(address), platform)
        _registered[key] = Registration(function, tuple(arguments), allow_capture, address)
    return address


def _handler(
    where: str,
    api: abi.TvmFfiApi,
    name: str,
    function: Any,
    platform: str,
    arguments: Sequence[str],
    allow_capture: bool,
) -> int:
    texts = (ctypes.c_char_p * len(arguments))(*(argument.encode() for argument in arguments))
    target = abi.TvmFfiTarget(
        struct_size=ctypes.sizeof(abi.TvmFfiTarget),
        name=name.encode(),
        function=function.__chandle__(),
        arguments=texts,
        num_arguments=len(arguments),
        on_cuda=platform == "CUDA",
        allow_capture=allow_capture,
    )
    address = ctypes.c_void_p()
    error = library.load().cdll.xla_gpu_tvm_ffi_register(ctypes.byref(api), ctypes.byref(target), ctypes.byref(address))
    if error is not None:
        raise TargetError(f"{where}: {error.decode(errors='replace')}")
    assert address.value is not None
    return address.value


@functools.cache
def _api() -> abi.TvmFfiApi:
    """The functions of libtvm_ffi.so that handlers need. Raises CompatibilityError without the package."""
    if importlib.util.find_spec("tvm_ffi") is None:
        raise CompatibilityError(
            "register_tvm_ffi_target needs the package tvm_ffi, and it is not installed: pip install apache-tvm-ffi"
        )
    from tvm_ffi import libinfo

    loaded = ctypes.CDLL(libinfo.find_libtvm_ffi())  # the same library that the package has loaded
    addresses = {}
    for field, symbol in _FUNCTIONS.items():
        try:
            addresses[field] = ctypes.cast(getattr(loaded, symbol), ctypes.c_void_p).value
        except AttributeError:
            raise CompatibilityError(
                f"register_tvm_ffi_target needs apache-tvm-ffi 0.1, and the installed one has no {symbol}: "
                "pip install 'apache-tvm-ffi>=0.1,<0.2'"
            ) from None
    return abi.TvmFfiApi(struct_size=ctypes.sizeof(abi.TvmFfiApi), **addresses)
