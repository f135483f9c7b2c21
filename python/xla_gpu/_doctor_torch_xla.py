"""The doctor's try of the torch_xla doors."""

from typing import Any

import torch

from . import _doctor_door


def attempt(device: str) -> dict[str, Any]:
    """Runs simple_add through the client that PJRT_DEVICE names, and registers all targets with it."""
    import torch_xla

    import xla_gpu.torch

    from . import _targets, _torch_xla, _torch_xla_host

    where = torch_xla.device()
    a, b = torch.tensor(_doctor_door.A, device=where), torch.tensor(_doctor_door.B, device=where)
    _doctor_door.check(xla_gpu.torch.simple_add(a, b).cpu().tolist())
    for target in _targets.registered():
        if target.platform == _torch_xla.platform():
            _torch_xla._register(target)
    if device == "GPU":
        from . import _torch_xla_plugin

        return _doctor_door.plugin_runtime(_torch_xla_plugin.plugin_path())
    return _doctor_door.host_runtime(_torch_xla_host.ffi_api())


if __name__ == "__main__":
    _doctor_door.report(attempt)
