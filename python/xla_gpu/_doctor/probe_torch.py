"""The doctor's try of the eager PyTorch front ends."""

import torch

from . import probe


def attempt(device: str) -> None:
    """Runs simple_add on ``device``."""
    import xla_gpu.torch

    if device == "GPU" and not torch.cuda.is_available():
        raise RuntimeError(f"PyTorch {torch.__version__} finds no GPU: torch.cuda.is_available() is False")
    where = "cuda" if device == "GPU" else "cpu"
    a, b = torch.tensor(probe.A, device=where), torch.tensor(probe.B, device=where)
    probe.check(xla_gpu.torch.simple_add(a, b).tolist())


if __name__ == "__main__":
    probe.report(attempt)
