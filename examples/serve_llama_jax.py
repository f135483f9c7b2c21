#!/usr/bin/env python3
"""Serves a Llama through xla_gpu: greedy generation with continuous batching over a paged KV cache, in JAX.

A small model with random weights, on the CPU:      serve_llama_jax.py --check
A Hugging Face checkpoint, on a GPU:                serve_llama_jax.py --device gpu --model DIR
A large model's speed, with random weights:         see README.md beside this file
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys

from paged_llama import program


class Jax:
    name = "serve_llama_jax.py"

    def start(self, arguments: argparse.Namespace) -> None:
        os.environ["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda"}[arguments.device]  # read when jax is imported
        if arguments.device == "cpu":
            os.environ["JAX_NUM_CPU_DEVICES"] = str(arguments.tensor_parallel)
        import jax

        if arguments.dtype == "float32":
            # Otherwise XLA multiplies float32 matrices in TF32 on a GPU, with 10 bits of mantissa.
            jax.config.update("jax_default_matmul_precision", "highest")
        try:
            jax.devices()
        except (RuntimeError, AssertionError) as error:  # the latter where JAX has no plug-in for the device
            raise ValueError(f"--device {arguments.device}: {str(error) or 'JAX finds no such device'}") from error

    def engine(self, arguments, config, theirs, scheduler, max_tokens):
        from paged_llama import jax_weights, options
        from paged_llama.jax_engine import Engine

        if wrong := options.check_weights(arguments, config):
            raise ValueError(wrong)
        given, mesh = (config, arguments.dtype, max_tokens), jax_weights.make_mesh(arguments.tensor_parallel)
        if arguments.model:
            parameters = jax_weights.load_checkpoint(*given, arguments.model, mesh)
        elif theirs is not None:
            parameters = jax_weights.load(*given, theirs.state_dict().__getitem__, mesh)
        else:
            parameters = jax_weights.randomise(*given, arguments.seed, mesh)
        formats = {"layers.": arguments.weights, "head.": arguments.head_weights}
        quantised = {part: chosen for part, chosen in formats.items() if chosen not in (None, "bfloat16")}
        step = arguments.options
        if quantised:
            step = dataclasses.replace(step, features_first=True)
        if step.features_first and arguments.tensor_parallel == 1:
            jax_weights.features_first(parameters)
        for part, chosen in quantised.items():
            jax_weights.quantize(parameters, chosen, part)
            if theirs is not None:
                from paged_llama import quantized

                quantized.round_reference(theirs, chosen, part == "head.")
        return Engine(config, parameters, scheduler, step)

    def compilations(self) -> int:
        from paged_llama.jax_engine import compilations

        return compilations()


if __name__ == "__main__":
    sys.exit(program.main(Jax(), __doc__))
