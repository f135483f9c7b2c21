"""Which installations are taken, and what is said of the others."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata

import pytest

import xla_gpu.vllm
from xla_gpu.vllm import versions


@pytest.fixture
def installed(monkeypatch):
    """Sets what appears to be installed."""

    def set_versions(**known: str) -> None:
        def version(name: str) -> str:
            if name.replace("-", "_") not in known:
                raise metadata.PackageNotFoundError(name)
            return known[name.replace("-", "_")]

        monkeypatch.setattr(versions.metadata, "version", version)

    return set_versions


def test_what_is_taken(installed):
    for vllm in ("0.12.0", "0.12.0+cpu", "0.13.0", "0.13.0+cu129", "0.14.1", "0.15.1", "0.16.0"):
        installed(vllm=vllm, torch_xla="2.9.0")
        assert versions.problem() is None
    installed(vllm_tpu="0.12.0", torch_xla="2.9.0")
    assert versions.problem() is None


@pytest.mark.parametrize(
    ("known", "part"),
    [
        ({"torch_xla": "2.9.0"}, "vLLM is not installed; install it with: pip install 'vllm==0.12.0'"),
        (
            {"vllm": "0.22.1", "torch_xla": "2.9.0"},
            "expected vLLM 0.12.0, 0.13.0, 0.14.1, 0.15.1 or 0.16.0, got 0.22.1; install it with",
        ),
        ({"vllm": "0.12.0"}, "expected torch_xla 2.9.0, got none; install it with: pip install"),
        ({"vllm": "0.12.0", "torch_xla": "2.8.0"}, "expected torch_xla 2.9.0, got 2.8.0"),
    ],
)
def test_what_is_not(installed, monkeypatch, known, part):
    installed(**known)
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert part in versions.problem()
    assert xla_gpu.vllm.register() == "xla_gpu.vllm.versions.UnusablePlatform"
    with pytest.raises(RuntimeError, match=r"^xla_gpu"):
        versions.UnusablePlatform()


@pytest.mark.parametrize("device", [None, "", "TPU"])
def test_other_devices_are_left_alone(monkeypatch, device):
    if device is None:
        monkeypatch.delenv("PJRT_DEVICE", raising=False)
    else:
        monkeypatch.setenv("PJRT_DEVICE", device)
    assert xla_gpu.vllm.register() is None


@pytest.mark.parametrize("device", ["cpu", "Gpu"])
def test_small_letters_choose_a_device_too(monkeypatch, device):
    monkeypatch.setenv("PJRT_DEVICE", device)
    assert xla_gpu.vllm.register() is not None
    assert os.environ["PJRT_DEVICE"] == device.upper()  # torch_xla knows no other name


def test_registration_imports_nothing_heavy():
    code = (
        "import sys, os; os.environ['PJRT_DEVICE'] = 'CPU'; import xla_gpu.vllm; xla_gpu.vllm.register(); "
        "print([m for m in ('torch', 'torch_xla', 'vllm', 'jax') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.skipif(versions.problem() is None, reason="vLLM is installed, and its tests run")
def test_the_other_tests_need_vllm():
    pytest.skip(f"tests/vllm: {versions.problem()}; `make test-vllm` makes an environment with it")
