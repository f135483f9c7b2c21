"""`make sanitize` sees what it looks for: a fault that is planted ends the process with a report."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    "XLA_GPU_SANITIZED" not in os.environ, reason="the library is not built with sanitizers; `make sanitize` does it"
)

# simple_add of n float32, into a result of one element less.
CODE = """
import ctypes, numpy as np
from xla_gpu._runtime import call_frame, targets
from xla_gpu._core.operator import ArraySpec
from xla_gpu.ops import simple_add

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
size = 1000
operands = [libc.malloc(4 * size) for _ in range(2)]
for address in operands:
    ctypes.memset(address, 0, 4 * size)
result = libc.malloc(4 * (size - MISSING))
call = simple_add.OPERATOR.bind(a=ArraySpec((size,), "float32"), b=ArraySpec((size,), "float32"))
call_frame.Frame(call, targets.lookup("xla_gpu_simple_add", "cpu"), call.results).run(operands, [result], None, -1)
print("done")
"""


@pytest.mark.parametrize("missing", [0, 1])
def test_a_write_past_the_end(missing):
    code = CODE.replace("MISSING", str(missing))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if missing:
        assert result.returncode != 0
        assert "heap-buffer-overflow" in result.stderr and "simple_add_cpu.cc" in result.stderr
    else:
        assert result.returncode == 0 and result.stdout == "done\n", result.stderr
