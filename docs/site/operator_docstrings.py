"""A griffe extension: the docstrings that `@docstring(...)` completes when the package is imported.

The API reference is made from the sources alone, without PyTorch and JAX. The operators' declarations import neither,
so the decorator's argument is looked up in them.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))


class OperatorDocstrings(griffe.Extension):
    """Appends the declaration's Args, Returns and Raises to the docstring of each operator's function."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Called for every function of the package."""
        for decorator in func.decorators:
            call = decorator.value
            if isinstance(call, griffe.ExprCall) and str(call.function) == "docstring":
                alias, *attributes = str(call.arguments[0]).split(".")
                imported = func.parent.imports[alias]
                value: Any = importlib.import_module(imported)
                for attribute in attributes:
                    value = getattr(value, attribute)
                if func.docstring is None:
                    raise ValueError(f"{func.path}: expected a docstring that says what the function does, got none")
                func.docstring.value = f"{inspect.cleandoc(func.docstring.value)}\n{value}"
