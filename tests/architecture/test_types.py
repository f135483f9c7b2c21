"""The public functions as type checkers see them."""

from __future__ import annotations

import importlib
import typing

import pytest


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_norm_is_one_array_without_a_residual(framework):
    """So that its result can be another operator's operand: a union could not."""
    pytest.importorskip(framework)
    module = importlib.import_module(f"xla_gpu.{framework}")
    array = importlib.import_module(framework).Tensor if framework == "torch" else importlib.import_module("jax").Array
    overloads = [typing.get_type_hints(overload) for overload in typing.get_overloads(module.rms_norm)]
    assert [hints["return"] for hints in overloads] == [array, tuple[array, array]]
    assert [
        type(None) in typing.get_args(hints["residual"]) or hints["residual"] is type(None) for hints in overloads
    ] == [
        True,
        False,
    ]


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_other_functions_return_what_the_next_one_takes(framework):
    pytest.importorskip(framework)
    module = importlib.import_module(f"xla_gpu.{framework}")
    operators = importlib.import_module("xla_gpu.ops").OPERATORS
    unions = [o.name for o in operators if typing.get_origin(_returned(module, o.name)) not in (None, tuple)]
    assert set(unions) <= {"rms_norm"}


def _returned(module, name: str):
    return typing.get_type_hints(getattr(module, name))["return"]
