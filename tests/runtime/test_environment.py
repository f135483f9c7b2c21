"""Environment variables: the documents name each, and what has no meaning is not taken for one that has."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from xla_gpu._core.environment import switch
from xla_gpu._core.operator import check_inputs_requested

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("default", [False, True])
def test_switches(default, monkeypatch):
    monkeypatch.delenv("XLA_GPU_NO_SUCH", raising=False)
    assert switch("XLA_GPU_NO_SUCH", default) is default
    for value, expected in (("", default), ("0", False), ("1", True)):
        monkeypatch.setenv("XLA_GPU_NO_SUCH", value)
        assert switch("XLA_GPU_NO_SUCH", default) is expected


@pytest.mark.parametrize("value", ["off", "false", "yes", "2", " 1", "01"])
def test_other_values_are_errors(value, monkeypatch):
    monkeypatch.setenv("XLA_GPU_CHECK_INPUTS", value)
    with pytest.raises(ValueError, match=f"XLA_GPU_CHECK_INPUTS: expected 0 or 1, got '{value}'"):
        check_inputs_requested()


@pytest.mark.frontends("eager", "jax")
def test_a_call_names_the_variable(frontend, monkeypatch):
    monkeypatch.setenv("XLA_GPU_CHECK_INPUTS", "off")
    with pytest.raises(ValueError, match="XLA_GPU_CHECK_INPUTS: expected 0 or 1, got 'off'"):
        frontend.call("simple_add", {"a": np.ones(3, np.float32), "b": np.ones(3, np.float32)})


def test_the_documents_name_every_variable():
    """Those that the package and the library read, and no other."""
    read = set()
    for path in (ROOT / "python").rglob("*.py"):
        read |= set(re.findall(r'"(XLA_GPU_[A-Z_]+)"', path.read_text()))
    for path in (ROOT / "ffi").rglob("*.cc"):
        if "testing" not in path.parts:
            read |= set(re.findall(r'getenv\("(XLA_GPU_[A-Z_]+)"', path.read_text()))
    text = (ROOT / "docs/environment.md").read_text().partition("## When the library is built")[0]
    assert read == set(re.findall(r"^\| `(XLA_GPU_[A-Z_]+)", text, re.MULTILINE))
