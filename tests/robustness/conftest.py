"""Tests that need much memory: one after the other, also where several processes test."""

from __future__ import annotations

import fcntl
import gc
import os
import sys
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def much_memory():
    """The only such test of the machine while it lasts; of what it leaves, PyTorch gives all back."""
    with (Path(tempfile.gettempdir()) / f"xla_gpu_much_memory.{os.getuid()}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        gc.collect()
        if (torch := sys.modules.get("torch")) and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
