"""Which versions of vLLM and torch_xla this back end works with."""

from __future__ import annotations

from importlib import metadata

VLLM = ("0.12.0", "0.13.0", "0.14.1", "0.15.1", "0.16.0")
TORCH_XLA = "2.9.0"

# vLLM's own distribution, and its pure-Python build for TPUs, which has the same modules.
_DISTRIBUTIONS = ("vllm", "vllm-tpu")


def _base_version(distribution: str) -> str | None:
    """The installed version without its local part ("0.12.0+cpu" is "0.12.0"), or None."""
    try:
        return metadata.version(distribution).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def vllm_version() -> str | None:
    """The installed version of vLLM, or None."""
    return next((version for name in _DISTRIBUTIONS if (version := _base_version(name))), None)


def problem() -> str | None:
    """One sentence on what is missing or does not fit, with the remedy; None where all fits."""
    expected = ", ".join(VLLM[:-1]) + f" or {VLLM[-1]}"
    vllm, torch_xla = vllm_version(), _base_version("torch_xla")
    if vllm is None:
        return f"xla_gpu.vllm: vLLM is not installed; install it with: pip install 'vllm=={VLLM[0]}'"
    if vllm not in VLLM:
        return (
            f"xla_gpu.vllm: expected vLLM {expected}, got {vllm}; install it with: pip install 'vllm=={VLLM[0]}', or "
            "unset PJRT_DEVICE to run vLLM without XLA"
        )
    if torch_xla != TORCH_XLA:
        return (
            f"xla_gpu.vllm: expected torch_xla {TORCH_XLA}, got {torch_xla or 'none'}; install it with: "
            f"pip install 'torch=={TORCH_XLA}' 'torch_xla=={TORCH_XLA}', or unset PJRT_DEVICE to run vLLM without XLA"
        )
    return None


class UnusablePlatform:
    """In the platform's place where ``problem`` found one: vLLM shows the error and stops."""

    def __init__(self) -> None:
        raise RuntimeError(
            problem() or "xla_gpu.vllm: the installation changed while vLLM was starting; start it again"
        )
