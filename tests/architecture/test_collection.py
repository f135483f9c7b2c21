"""Test modules can be imported where frameworks are missing: `make test-newest` has no PyTorch, others have it alone.

A module that needs one calls pytest.importorskip before imports that need it, those of tests/common/gradients.py too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.common import process

ROOT = Path(__file__).resolve().parents[2]


def collect_without(modules: tuple[str, ...], *arguments: str) -> str:
    """Collects tests in a process where ``modules`` cannot be imported; fails with pytest's summary of errors."""
    block = f"import sys\nfor name in {modules!r}: sys.modules[name] = None\n"
    options = ["--collect-only", "-qq", "-rE", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    return process.run(
        f"{block}import pytest\nsys.exit(pytest.main({[*options, *arguments]!r}))",
        path=ROOT,
        PYTEST_ADDOPTS="",
    )


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param(("torch", "torch_xla", "torchax", "transformers", "triton", "vllm"), id="PyTorch"),
        pytest.param(("torch_xla", "torchax", "jax", "jaxlib", "triton", "vllm"), id="JAX and torch_xla"),
    ],
)
def test_every_module_is_collected_without(modules):
    assert "tests/ops/test_simple_add.py" in collect_without(modules, str(ROOT / "tests"))


def test_the_check_above_can_fail(tmp_path):
    (tmp_path / "test_that_needs_torch.py").write_text("from tests.common import gradients\n")
    with pytest.raises(AssertionError, match=r"test_that_needs_torch\.py"):
        collect_without(("torch",), str(tmp_path))
