"""Which versions of a framework a front end takes, said before anything of it is used."""

from __future__ import annotations

import functools
import importlib
import re
from types import ModuleType

from ..errors import CompatibilityError

# torch_xla's FFI API, graph and PJRT structures are used beneath its public interface, and this is its last release.
TORCH_XLA = (2, 9)
TORCH_XLA_REMEDY = "pip install torch==2.9.0 torch_xla==2.9.0"


def framework(
    name: str, frontend: str, oldest: tuple[int, ...], remedy: str, newest: tuple[int, ...] | None = None
) -> ModuleType:
    """The framework's module.

    Args:
      name: of the module.
      frontend: what needs it, for the texts.
      oldest: the first version that fits: major, minor, and a third number where that matters.
      remedy: what to do where it does not.
      newest: the last one that fits; None where every later one is taken.

    Raises:
      ModuleNotFoundError: it is not installed.
      CompatibilityError: its version does not fit.
    """
    needed = f"{name} {_dotted(oldest)}"
    if newest is None:
        needed += " or newer"
    elif newest != oldest:
        needed += f" to {_dotted(newest)}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # the framework is there, and lacks something itself
            raise
        raise ModuleNotFoundError(f"{frontend} needs {needed}, which is not installed: {remedy}", name=name) from None
    found = str(getattr(module, "__version__", "of an unknown version"))
    numbers = re.match(r"\d+(?:\.\d+)+", found)
    version = tuple(map(int, numbers[0].split(".")))[: len(oldest)] if numbers else None
    if version is None or version < oldest or (newest is not None and version > newest):
        raise CompatibilityError(f"{frontend} needs {needed}, and {name} {found} is installed: {remedy}")
    return module


@functools.cache
def torch_xla(frontend: str) -> ModuleType:
    """torch_xla; raises as ``framework``."""
    return framework("torch_xla", frontend, TORCH_XLA, TORCH_XLA_REMEDY, newest=TORCH_XLA)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
