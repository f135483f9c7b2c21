"""all_reduce over a DeviceGroup under torch_xla's SPMD, lazily and compiled: a program of its own, as spmd_program.

PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python -m tests.distributed.spmd_all_reduce
"""

from __future__ import annotations

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime

import xla_gpu.torch as xg
from tests.common import cases

torch_xla.runtime.use_spmd()
DEVICES = torch_xla.runtime.global_runtime_device_count()
ON_CPU = torch_xla.runtime.device_type() == "CPU"
mesh = xs.Mesh(np.arange(DEVICES), (DEVICES,), ("tp",))
group = xg.DeviceGroup(mesh, "tp", timeout_s=20)
print(group)
assert group.size == DEVICES and group.uses_peer_memory != ON_CPU


def normed(x, residual, weight):
    # Of a result, as in a model: nothing but the operator says how it is divided.
    return xg.all_reduce_add_rms_norm(x * 1, residual, weight, eps=1e-5, group=group)


def summed(x):
    return xg.all_reduce(x * 1, group=group)


rng = cases.rng_for("spmd all_reduce")
for dtype in (torch.float32, torch.bfloat16):
    for rows, hidden in ((1, 4096), (3, 40), (64, 1024), (300, 4099)):
        x = torch.from_numpy(rng.standard_normal((DEVICES, rows, hidden)).astype(np.float32)).to(dtype)
        residual, weight = x[0] * 2, x[-1, 0]
        whole = torch.ops.xla_gpu  # on the host, of all parts
        want = (*whole.all_reduce_add_rms_norm(x, residual, weight, eps=1e-5), whole.all_reduce(x))
        parts = x.to("xla")
        xs.mark_sharding(parts, mesh, ("tp", None, None))
        rest = residual.to("xla"), weight.to("xla")
        for compiled in (False, True) if (rows, hidden) == (3, 40) else (False,):
            functions = (normed, summed)
            if compiled:
                functions = tuple(torch.compile(f, backend="openxla", fullgraph=True) for f in functions)
            got = (*functions[0](parts, *rest), functions[1](parts))
            for name, a, b in zip(("out", "sum", "all_reduce"), got, want, strict=True):
                a = a.cpu()
                exact = name != "out" or ON_CPU  # the mean's order of summation is each platform's own
                same = torch.equal(a, b) if exact else torch.allclose(a.float(), b.float(), rtol=0.02, atol=1e-5)
                assert same, (name, dtype, rows, hidden, compiled)
group.check()
print("OK")
wrong = ((torch.ones(DEVICES, 3), "got one on cpu"), (torch.ones(DEVICES + 1, 3).to("xla"), f"[{DEVICES}, ...]"))
for x, text in wrong:
    try:
        xg.all_reduce(x, group=group)
    except (TypeError, ValueError) as error:
        assert text in str(error), error
        print("refused:", error)
