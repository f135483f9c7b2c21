"""Tensors on torch_xla's device."""

from __future__ import annotations

import torch
import torch_xla


def on_device(*values):
    made = [torch.tensor(value).to(torch_xla.device()) for value in values]
    torch_xla.sync()
    return made if len(made) > 1 else made[0]
