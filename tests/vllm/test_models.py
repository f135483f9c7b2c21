"""Families of models, tiny and random: greedy tokens equal to transformers' in float32.

All of them with XLA_GPU_TEST_ALL_MODELS=1; otherwise those whose layers differ most.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.vllm import processes, tiny

EVERY_TIME = ("qwen3", "gemma3", "mixtral", "glm4_moe", "gpt_oss", "deepseek_v2_lite", "deepseek_v3", "cohere2")
NAMES = sorted(tiny.CONFIGS) if os.environ.get("XLA_GPU_TEST_ALL_MODELS") else EVERY_TIME

# Whose layers are two calls each in steps of few rows.
OF_TWO_CALLS = ("llama", "llama_wide", "llama3", "qwen2", "qwen3", "mistral", "phi3")

# A process for each: an engine does not give its memory and its settings back.
PROGRAM = """
import sys, torch
from tests.vllm import engines, tiny
from xla_gpu.vllm import attention, layer_blocks, layer_operators
layer_operators.MIN_ROWS = 64  # so that steps of prompts have the operators of large steps, and others not
attention.MAX_BLOCK_ROWS = layer_blocks.MAX_ROWS = 8  # and steps of few rows theirs
layer_blocks.PLAIN_DTYPES += (torch.float32,)
calls = set()
for name in ("gated_mlp", "attention_block_"):
    def block(*operands, name=name, function=getattr(layer_blocks.xg, name), **others):
        if others.get("norm_weight") is not None and others.get("residual") is not None:
            calls.add(name)
        return function(*operands, **others)
    setattr(layer_blocks.xg, name, block)
folder, options = sys.argv[1], eval(sys.argv[2])
prompts = tiny.prompts((5, 37, 130))
expected = [tiny.Reference(folder).greedy(prompt, 16) for prompt in prompts]
llm = engines.make(folder, **options)
got = engines.tokens(llm, prompts, engines.greedy(16))
groups = len(engines.runner_of(llm).caches.block_sizes)
print("RESULT", got == expected, groups, engines.compiled_since_start(llm), len(calls), got, expected)
"""


def serve(name: str, folder, program: str = PROGRAM, latents: bool = True, **options) -> list[str]:
    """latents: where the model has latent attention, its caches have latents, and not whole keys and values."""
    saved = tiny.save(name, folder)
    command = ["-c", program, saved, repr(options)]
    result = processes.run(command) if latents else processes.run_anew(command, VLLM_MLA_DISABLE="1")
    return result.line().split(maxsplit=4)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_transformers(name, tmp_path):
    equal, groups, compiled, calls, tokens = serve(name, tmp_path)
    assert equal == "True", tokens
    assert compiled == "0"
    assert int(calls) == (2 if name in OF_TWO_CALLS else 0)
    # Layers with a window beside others have block tables of their own, and keep their window alone.
    assert (int(groups) > 1) == (name in ("gemma2", "gemma3", "gpt_oss", "cohere2", "olmo3"))


@pytest.mark.parametrize("name", ["deepseek_v3"])
def test_whole_keys_and_values_in_the_place_of_latents(name, tmp_path):
    equal, _, compiled, _, tokens = serve(name, tmp_path, latents=False)
    assert equal == "True", tokens
    assert compiled == "0"


WITH_IMAGES = sorted(tiny.WITH_IMAGES) if os.environ.get("XLA_GPU_TEST_ALL_MODELS") else ("gemma3_images",)


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_text_of_a_model_with_images(name, tmp_path):
    equal, _, compiled, _, tokens = serve(name, tmp_path, limit_mm_per_prompt={"image": 0})
    assert equal == "True", tokens
    assert compiled == "0"


def test_images_by_another_encoder_are_refused(tmp_path):
    from vllm.engine.arg_utils import EngineArgs

    folder = tiny.save("gemma3_images", tmp_path)
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text())
    config["vision_config"] = {"model_type": "pixtral"}
    path.write_text(json.dumps(config))
    text = r"--limit-mm-per-prompt: expected '{\"image\": 0}' with Gemma3\w+ and an encoder of pixtral"
    with pytest.raises(Exception, match=text):
        EngineArgs(model=folder).create_engine_config()


# Options, and by how much the logit of a token may fall short of the largest one. Keys are rotated in float32 here and
# in the model's dtype there: where they end in two float16, a float8 with two bits of mantissa may differ by a quarter.
PRECISIONS = [
    ({"kv_cache_dtype": "fp8"}, 0.01),
    ({"dtype": "float16", "kv_cache_dtype": "fp8_e5m2"}, 0.1),
    ({"dtype": "float16"}, 0.05),
    ({"dtype": "bfloat16"}, 0.4),
]
ROUNDED_PROGRAM = """
import sys, torch
from tests.vllm import engines, tiny
from xla_gpu.vllm import layer_operators
layer_operators.MIN_ROWS = 64
folder, options = sys.argv[1], eval(sys.argv[2])
prompts = tiny.prompts((5, 37, 130))
llm = engines.make(folder, **options)
got = engines.tokens(llm, prompts, engines.greedy(16))
cache = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}.get(options.get("kv_cache_dtype"))
reference = tiny.Reference(folder, getattr(torch, options.get("dtype", "float32")), cache)
short = []
for prompt, tokens in zip(prompts, got):
    logits = reference.logits(prompt + tokens)[len(prompt) - 1 : -1]
    short.append(max(row.max().item() - row[token].item() for row, token in zip(logits, tokens)))
print("RESULT", max(short), 0, engines.compiled_since_start(llm), 0, short, got)
"""


@pytest.mark.parametrize(
    ("options", "tolerance"), PRECISIONS if os.environ.get("XLA_GPU_TEST_ALL_MODELS") else PRECISIONS[:2], ids=str
)
def test_less_precision(options, tolerance, tmp_path):
    """Tokens are those of transformers in that dtype, with keys and values rounded to the cache's."""
    short, _, compiled, _, details = serve("llama", tmp_path, ROUNDED_PROGRAM, **options)
    assert compiled == "0"
    assert float(short) < tolerance, details
