"""The FFI targets that this process knows, by name and platform: the library's own and those of users.

XLA runtimes have their own tables; the front ends copy a target into a runtime when it is first called there.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import TargetError
from . import abi, library

PLATFORMS = ("cpu", "CUDA")  # as jax.ffi spells them
_OF_LIBRARY = {"Host": "cpu", "CUDA": "CUDA"}
_RUNTIME_NAMES = {"cpu": "Host", "CUDA": "CUDA"}

STAGES = ("instantiate", "prepare", "initialize", "execute")


class Target(NamedTuple):
    """Addresses of a handler's stages, 0 for those that it has not."""

    name: str
    platform: str
    instantiate: int
    prepare: int
    initialize: int
    execute: int

    def stages(self) -> abi.Stages:
        return abi.Stages(*(getattr(self, stage) or None for stage in STAGES))

    @property
    def runtime_platform(self) -> str:
        return _RUNTIME_NAMES[self.platform]

    def version(self) -> tuple[int, int]:
        """The newest FFI API version that one of the handler's stages was built against. Raises TargetError."""
        versions = []
        for stage in STAGES:
            if address := getattr(self, stage):
                try:
                    versions.append(library.load().handler_version(address))
                except ValueError as error:
                    raise TargetError(f"FFI target {self.name!r}: its {stage} function: {error}") from None
        return max(versions)


_lock = threading.Lock()
_targets: dict[tuple[str, str], Target] = {}
# What users registered: a ctypes callback or a capsule may own the code behind its address.
_kept_alive: list[Any] = []

# A PyDLL of our own: argtypes set on ctypes.pythonapi's functions would be shared with every other user of it.
_python = ctypes.PyDLL(None)
_python.PyCapsule_New.restype = ctypes.py_object
_python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_python.PyCapsule_GetName.restype = ctypes.c_char_p
_python.PyCapsule_GetName.argtypes = [ctypes.py_object]
_python.PyCapsule_GetPointer.restype = ctypes.c_void_p
_python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def register(name: str, fn: Any, platform: str = "cpu", api_version: int = 1) -> None:
    """See xla_gpu.torch.register_ffi_target."""
    if not isinstance(name, str) or not name:
        raise TypeError(f"register_ffi_target: name: expected a string that is not empty, got {name!r}")
    if platform not in PLATFORMS:
        raise TargetError(f"register_ffi_target: platform: expected 'cpu' or 'CUDA', got {platform!r}")
    if api_version != 1:
        raise TargetError(
            f"register_ffi_target: api_version: expected 1, the typed FFI, got {api_version!r}; "
            "the untyped custom calls of api_version 0 have no way to report errors"
        )
    functions = fn if isinstance(fn, Mapping) else {"execute": fn}
    unknown = sorted(set(functions) - set(STAGES))
    if unknown or "execute" not in functions:
        raise TargetError(
            f"register_ffi_target: fn: expected a dict with 'execute' and optionally "
            f"{', '.join(map(repr, STAGES[:3]))}, got the keys {sorted(functions)}"
        )
    target = Target(name, platform, *(_address(stage, functions.get(stage)) for stage in STAGES))
    if not target.execute:
        raise TypeError("register_ffi_target: fn: expected a function for the stage 'execute', got None")
    _own()
    if platform == "cpu":
        # Both callers on the host, torch_xla 2.9's runtime and the library itself, are of this version. CUDA plug-ins
        # may be newer; they are asked when the target is first called.
        check_version(target, library.load().ffi_api(), "the host's runtime")
    _add(target)
    _kept_alive.append(fn)


def check_version(target: Target, api: tuple[int, int], whose: str) -> None:
    """Raises TargetError if ``target`` was built against a newer FFI API than ``api``."""
    built = target.version()
    if built > api:
        raise TargetError(
            f"FFI target {target.name!r} was built with XLA FFI API {built[0]}.{built[1]}, but {whose} has "
            f"{api[0]}.{api[1]}; build it with headers of that version or older (jaxlib 0.7 ships 0.1)"
        )


def lookup(name: str, platform: str) -> Target:
    """The target for ``platform``. Raises TargetError, naming the platforms that have it, if there is none."""
    _own()
    target = _targets.get((name, platform))
    if target is None:
        others = [known for known in PLATFORMS if (name, known) in _targets]
        where = f"it is registered on {' and '.join(others)}" if others else "it is not registered anywhere"
        hint = ""
        if name in _own() and platform == "CUDA":
            hint = "; the library was built without CUDA (XLA_GPU_CUDA=OFF)"
        raise TargetError(f"FFI target {name!r} is not registered on platform {platform!r}: {where}{hint}")
    return target


def registered() -> list[Target]:
    """All known targets, sorted by name and platform."""
    _own()
    return sorted(_targets.values())


def _add(target: Target) -> None:
    key = (target.name, target.platform)
    with _lock:
        known = _targets.setdefault(key, target)
    if known != target:
        raise TargetError(
            f"FFI target {target.name!r} is already registered on platform {target.platform!r} with another function; "
            "XLA runtimes keep the first for the life of the process"
        )


@functools.cache
def _own() -> frozenset[str]:
    """Registers the library's own handlers, in the same table as users' handlers."""
    handlers = library.load().handlers()
    for handler in handlers:
        _add(Target(handler.target, _OF_LIBRARY[handler.platform], 0, 0, 0, handler.execute))
    return frozenset(handler.target for handler in handlers)


def _address(stage: str, fn: Any) -> int:
    if fn is None:
        return 0
    if type(fn).__name__ == "PyCapsule":
        return int(_python.PyCapsule_GetPointer(fn, _python.PyCapsule_GetName(fn)))
    try:
        address = ctypes.cast(fn, ctypes.c_void_p).value
    except (ctypes.ArgumentError, TypeError):
        address = None
    if not address or isinstance(fn, int | str | bytes):
        raise TypeError(
            f"register_ffi_target: fn: expected a PyCapsule, a ctypes function pointer or a dict of them for "
            f"{stage!r}, got {type(fn).__name__}"
        )
    return address


def capsule(address: int) -> Any:
    """A PyCapsule around a handler, as jax.ffi.register_ffi_target takes it."""
    return _python.PyCapsule_New(address, None, None)
