"""A griffe extension: the docstrings that decorators complete when the package is imported.

The API reference is made from the sources alone, without PyTorch and JAX. The operators' declarations import neither,
so the decorators' arguments are looked up in them; those in other modules must be literals.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import griffe

SOURCES = Path(__file__).resolve().parents[2] / "python"
sys.path.insert(0, str(SOURCES))

PUBLIC = ("xla_gpu.torch.", "xla_gpu.jax.", "xla_gpu._torch.user_kernels.", "xla_gpu._jax.user_kernels.")


class OperatorDocstrings(griffe.Extension):
    """Appends the declaration's Args, Returns and Raises to the docstring of each operator's function."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called before on_function: the operators' functions must be where it looks for them."""
        if pkg.path != "xla_gpu":
            return
        for front_end in ("torch", "jax"):
            for operator in importlib.import_module("xla_gpu.ops").OPERATORS:
                function: Any = pkg[front_end].members[operator.name]
                path = function.target_path if function.is_alias else function.path
                if not _is_public(path):
                    raise ValueError(f"{path}: expected a function below {' or '.join(PUBLIC)}")

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Called for every function of the package."""
        if not _is_public(func.path) or any(str(decorator.value) == "overload" for decorator in func.decorators):
            return
        if func.docstring is None:
            raise ValueError(f"{func.path}: expected a docstring that says what the function does, got none")
        for decorator in func.decorators:
            call = decorator.value
            if isinstance(call, griffe.ExprCall) and str(call.function) in ("docstring", "function"):
                value = _value(func, str(call.arguments[0]))
                text = value if str(call.function) == "docstring" else value.docstring
                func.docstring.value = f"{inspect.cleandoc(func.docstring.value)}\n{text}"
        if "Returns:" not in func.docstring.value and str(func.returns) not in ("None", "Iterator[None]"):
            raise ValueError(f"{func.path}: expected a docstring with Returns, got {func.docstring.value!r}")


def _is_public(path: str) -> bool:
    return path.startswith(PUBLIC) and not path.rpartition(".")[2].startswith("_")


def _value(func: griffe.Function, expression: str) -> Any:
    """The value of `module.ATTRIBUTE`, where module is imported by the function's own."""
    alias, *attributes = expression.split(".")
    assert func.parent is not None
    module = func.parent.imports[alias]
    if not module.startswith("xla_gpu.ops."):  # it imports a framework: a literal of its source
        return _literal(SOURCES / f"{module.replace('.', '/')}.py", ".".join(attributes))
    value: Any = importlib.import_module(module)
    for attribute in attributes:
        value = getattr(value, attribute)
    return value


def _literal(path: Path, name: str) -> Any:
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == [name]:
            return ast.literal_eval(statement.value)
    raise ValueError(f"{path}: expected a literal called {name}")
