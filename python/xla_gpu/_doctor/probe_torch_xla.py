"""The doctor's try of the torch_xla front ends."""

from typing import Any

import torch

from . import probe


def attempt(device: str) -> dict[str, Any]:
    """Runs simple_add through the client that PJRT_DEVICE names, and registers all targets with it."""
    import torch_xla

    import xla_gpu.torch

    from .._torch_xla import host_ffi_api

    where = torch_xla.device()
    a, b = torch.tensor(probe.A, device=where), torch.tensor(probe.B, device=where)
    probe.check(xla_gpu.torch.simple_add(a, b).cpu().tolist())
    xla_gpu.torch.register_targets()
    if device == "GPU":
        from .._torch_xla import plugin

        return probe.plugin_runtime(plugin.plugin_path())
    return probe.host_runtime(host_ffi_api.ffi_api())


if __name__ == "__main__":
    probe.report(attempt)
