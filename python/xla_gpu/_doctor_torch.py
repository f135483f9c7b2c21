"""The doctor's try of the eager PyTorch doors."""

import torch

from . import _doctor_door


def attempt(device: str) -> None:
    """Runs simple_add on ``device``."""
    import xla_gpu.torch

    if device == "GPU" and not torch.cuda.is_available():
        raise RuntimeError(f"PyTorch {torch.__version__} finds no GPU: torch.cuda.is_available() is False")
    where = "cuda" if device == "GPU" else "cpu"
    a, b = torch.tensor(_doctor_door.A, device=where), torch.tensor(_doctor_door.B, device=where)
    _doctor_door.check(xla_gpu.torch.simple_add(a, b).tolist())


if __name__ == "__main__":
    _doctor_door.report(attempt)
