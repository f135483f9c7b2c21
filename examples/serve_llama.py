#!/usr/bin/env python3
"""Serves a Llama through xla_gpu: greedy generation with continuous batching over a paged KV cache, in torch_xla.

A small model with random weights, on the CPU:      serve_llama.py --check
A Hugging Face checkpoint, on a GPU:                serve_llama.py --device gpu --model DIR
A large model's speed, with random weights:         see README.md beside this file
"""

from __future__ import annotations

import argparse
import os
import sys

from paged_llama import program


class TorchXla:
    name = "serve_llama.py"

    def start(self, arguments: argparse.Namespace) -> None:
        os.environ["PJRT_DEVICE"] = arguments.device.upper()  # read when torch_xla is imported
        if arguments.device == "cpu" and arguments.tensor_parallel > 1:
            os.environ["CPU_NUM_DEVICES"] = str(arguments.tensor_parallel)
        import torch_xla
        import torch_xla.backends

        if arguments.device == "gpu" and arguments.dtype == "float32":
            # Otherwise XLA multiplies float32 matrices in TF32, with 10 bits of mantissa.
            torch_xla.backends.set_mat_mul_precision("highest")
        if arguments.tensor_parallel > 1:
            import torch_xla.runtime

            torch_xla.runtime.use_spmd()
        try:
            self.device = torch_xla.device()
        except RuntimeError as error:
            raise ValueError(f"--device {arguments.device}: {error}") from error

    def engine(self, arguments, config, theirs, scheduler, max_tokens):
        from paged_llama.engine import Engine  # here, since it imports torch_xla

        return Engine(self.model(arguments, config, theirs, max_tokens), scheduler, self.device)

    def model(self, arguments, config, theirs, max_tokens):
        """The model with its weights on the device, or divided over the devices."""
        import torch
        import torch_xla

        from paged_llama import options, quantized, weights
        from paged_llama.model import PagedLlama

        if wrong := options.check_weights(arguments, config):
            raise ValueError(wrong)
        if arguments.tensor_parallel > 1 and arguments.temperature > 0:
            raise ValueError("--temperature: expected 0 with --tensor-parallel (serve_llama_jax.py has both)")
        group = device_group(arguments.tensor_parallel) if arguments.tensor_parallel > 1 else None
        model = PagedLlama(config, getattr(torch, arguments.dtype), max_tokens, group, arguments.options)
        if arguments.model and options.is_quantized(arguments.model):
            quantized.load_checkpoint(model, arguments.model, self.device)
        elif arguments.model:
            weights.load_checkpoint(model, arguments.model, self.device)
        elif theirs is not None:
            weights.load(model, theirs.state_dict().__getitem__, self.device)
        else:
            torch_xla.manual_seed(arguments.seed)
            weights.randomise(model, self.device, torch_xla.sync)
        for head, weights_of in enumerate((arguments.weights, arguments.head_weights)):
            if weights_of not in (None, "bfloat16"):
                quantized.quantize(model, weights_of, torch_xla.sync, bool(head))
                if theirs is not None:
                    quantized.round_reference(theirs, weights_of, bool(head))
        return model

    def compilations(self) -> int:
        from paged_llama.engine import compilations

        return compilations()


def device_group(devices: int):
    """The first so many devices, which share the model. Raises ValueError where there are fewer."""
    import numpy as np
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime

    import xla_gpu.torch

    there = torch_xla.runtime.global_runtime_device_count()
    if devices != there:  # SPMD runs every program on all devices
        raise ValueError(
            f"--tensor-parallel: expected {there}, the number of devices (CUDA_VISIBLE_DEVICES chooses), got {devices}"
        )
    return xla_gpu.torch.DeviceGroup(xs.Mesh(np.arange(devices), (devices,), ("tp",)), "tp")


if __name__ == "__main__":
    sys.exit(program.main(TorchXla(), __doc__))
