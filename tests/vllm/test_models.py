"""Families of models, tiny and random: greedy tokens equal to transformers' in float32.

All of them with XLA_GPU_TEST_ALL_MODELS=1; otherwise those whose layers differ most.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.vllm import tiny

EVERY_TIME = ("qwen3", "gemma3", "mixtral")
NAMES = sorted(tiny.CONFIGS) if os.environ.get("XLA_GPU_TEST_ALL_MODELS") else EVERY_TIME

# A process for each: an engine does not give its memory and its settings back.
PROGRAM = """
import sys
from tests.vllm import engines, tiny
folder, options = sys.argv[1], eval(sys.argv[2])
prompts = tiny.prompts((5, 37, 130))
expected = [tiny.Reference(folder).greedy(prompt, 16) for prompt in prompts]
llm = engines.make(folder, **options)
got = engines.tokens(llm, prompts, engines.greedy(16))
groups = len(engines.runner_of(llm).caches.block_sizes)
print("RESULT", got == expected, groups, engines.compiled_since_start(llm), got, expected)
"""


def serve(name: str, folder, **options) -> list[str]:
    saved = tiny.save(name, folder)
    command = [sys.executable, "-c", PROGRAM, saved, repr(options)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, result.stderr[-3000:]
    return lines[-1].split(maxsplit=4)[1:]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_transformers(name, tmp_path):
    equal, groups, compiled, tokens = serve(name, tmp_path)
    assert equal == "True", tokens
    assert compiled == "0"
    # Gemma 3: layers with a window have block tables of their own, and keep their window alone.
    assert (int(groups) > 1) == (name in ("gemma2", "gemma3"))


PRECISIONS = [
    {"kv_cache_dtype": "fp8"},
    {"dtype": "float16"},
    {"dtype": "bfloat16"},
]


@pytest.mark.parametrize(
    "options", PRECISIONS if os.environ.get("XLA_GPU_TEST_ALL_MODELS") else PRECISIONS[:2], ids=str
)
def test_less_precision_changes_little(options, tmp_path):
    """Tokens differ from transformers' where logits are close, so that the first ones of each prompt are compared."""
    _, _, compiled, tokens = serve("llama", tmp_path, **options)
    got, expected = eval(f"({tokens.replace(']] [[', ']], [[')})")
    assert compiled == "0"
    assert [row[0] for row in got] == [row[0] for row in expected]
