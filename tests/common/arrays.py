"""NumPy (with ml_dtypes' types) to PyTorch and back, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from tests.common.cases import DTYPES

torch = pytest.importorskip("torch")  # and so skips the modules of tests that need this one
TORCH_DTYPES = {name: getattr(torch, name) for name in DTYPES}
NUMPY_DTYPES = {torch_dtype: DTYPES[name] for name, torch_dtype in TORCH_DTYPES.items()}
_SAME_SIZE = {1: (np.uint8, torch.uint8), 2: (np.int16, torch.int16)}


def to_torch(x: np.ndarray, device: str | torch.device = "cpu") -> torch.Tensor:
    """A copy of x on the device."""
    if x.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        numpy_type, _ = _SAME_SIZE[x.dtype.itemsize]
        host = torch.from_numpy(np.array(x.view(numpy_type))).view(TORCH_DTYPES[x.dtype.name])
    else:
        host = torch.from_numpy(np.array(x))
    return host.to(device)


def to_numpy(x: torch.Tensor) -> np.ndarray:
    x = x.detach().cpu().contiguous()
    if x.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        _, torch_type = _SAME_SIZE[x.element_size()]
        return x.view(torch_type).numpy().view(NUMPY_DTYPES[x.dtype])
    return x.numpy()
