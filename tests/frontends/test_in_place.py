"""The KV cache is updated in place: the optimised HLO of a whole model step holds the typed custom calls, the alias
from the cache's parameter to its result, and no other instruction that makes anything of the cache's shape."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.common import cache_cases
from tests.frontends import in_place_program

ROOT = Path(__file__).resolve().parents[2]
# Instructions that give a name to memory that is there already.
NO_MEMORY = {"parameter", "get-tuple-element", "tuple", "bitcast", "custom-call", "opt-barrier"}


# What a front end's program runs, one after the other: (layout, operator that stores).
LAYOUTS = (("combined", "reshape_and_cache"), ("split", "reshape_and_cache"))
OTHERS = (("combined", "rotary_and_cache"), ("combined", "attention_block"), ("latents", "concat_and_cache_mla"))
RUN_OTHERS = ("torch_xla", "torch_xla-compiled", "jax", "torch_xla-cuda-compiled", "jax-cuda")


def run(folder: Path, program: str, runs: Sequence[tuple[str, str]]) -> list[str]:
    """The texts of all optimised modules. Runs the program, which checks its own numbers."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} --xla_dump_hlo_as_text"
    result = subprocess.run(
        [sys.executable, "-m", "tests.frontends.in_place_program", program, *(":".join(pair) for pair in runs)],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return [path.read_text() for path in sorted(folder.glob("*after_optimizations.txt"))]


@pytest.fixture(scope="module")
def modules(tmp_path_factory) -> Callable[[str, str, str], list[str]]:
    """The modules of a front end that store into a cache of that layout by that operator: a process each front end."""

    @functools.cache
    def all_of(name: str) -> list[str]:
        return run(tmp_path_factory.mktemp("modules"), name, LAYOUTS + OTHERS if name in RUN_OTHERS else LAYOUTS)

    return lambda name, layout, operator: storing(all_of(name), layout, operator)


def storing(texts: list[str], layout: str, operator: str) -> list[str]:
    target = f'custom_call_target="xla_gpu_{operator}"'
    return [text for text in texts if target in text and f"f32[{cache_shape(layout)}]" in text]


def cache_shape(layout: str) -> str:
    _, _, (cache, *_), _, _ = in_place_program.build(layout)
    return ",".join(map(str, cache.shape))


def makers(text: str, shape: str) -> list[str]:
    """Instructions whose result, or a part of it, has the shape of a cache."""
    found = []
    for line in text.splitlines():
        instruction = re.match(r"\s*(?:ROOT )?%?[\w.-]+ = (\(.*?\)|\S+) ([\w-]+)\(", line)
        if instruction and f"f32[{shape}]" in instruction[1] and instruction[2] not in NO_MEMORY:
            found.append(line.strip()[:200])
    return found


@pytest.mark.parametrize("layout", ["combined", "split"])
@pytest.mark.frontends(
    *("torch_xla", "torch_xla-compiled", "jax", "torchax-jit"),
    *("torch_xla-cuda", "torch_xla-cuda-compiled", "jax-cuda", "torchax-cuda-jit"),
)
def test_no_copy_of_the_cache(frontend, layout, modules):
    check(modules(frontend.name, layout, "reshape_and_cache"), layout, "reshape_and_cache")


@pytest.mark.frontends(*RUN_OTHERS)
@pytest.mark.parametrize(("layout", "operator"), OTHERS)
def test_no_copy_of_the_cache_by_others(frontend, layout, operator, modules):
    check(modules(frontend.name, layout, operator), layout, operator)


def check(texts: list[str], layout: str, operator: str) -> None:
    assert texts, f"no module with xla_gpu_{operator}"
    for text in texts:
        stores = [line for line in text.splitlines() if f'custom_call_target="xla_gpu_{operator}"' in line]
        attention = "xla_gpu_mla_attention" if layout == "latents" else "xla_gpu_paged_attention"
        reads = [line for line in text.splitlines() if f'custom_call_target="{attention}"' in line]
        assert len(stores) == in_place_program.LAYERS
        assert len(reads) == (0 if operator == "attention_block" else in_place_program.LAYERS)
        for line in stores + reads:
            assert "API_VERSION_TYPED_FFI" in line, line
        assert makers(text, cache_shape(layout)) == []
        # Each cache's parameter is a result's memory.
        header = text.splitlines()[0]
        parameters = re.findall(rf"= f32\[{cache_shape(layout)}\]\S* parameter\((\d+)\)", text)
        assert len(parameters) == in_place_program.LAYERS
        aliased = re.findall(r"\{[\d, ]*\}: \((\d+), \{\}", header[header.index("input_output_alias") :])
        assert set(parameters) <= set(aliased), header


def test_the_check_above_can_fail(tmp_path):
    """Without donation jax.jit must copy, and the reader must see it."""
    pytest.importorskip("jax")
    (text,) = storing(run(tmp_path, "jax-without-donation", LAYOUTS[:1]), *LAYOUTS[0])
    assert [line for line in makers(text, cache_shape("combined")) if "copy" in line]


@pytest.mark.frontends("torch_xla", "torch_xla-compiled", "torch_xla-cuda", "torch_xla-cuda-compiled")
def test_in_place_on_a_slice_of_a_stack_of_caches(frontend):
    """A cache that is a view: its base sees the update."""
    import torch

    from tests.common import compare, reference
    from tests.common.arrays import to_numpy

    arrays = cache_cases.build_cache(cache_cases.CACHE_CASES[1])
    tensors = frontend.tensors(arrays)
    stack = torch.stack([tensors["kv_cache"] * 0, tensors["kv_cache"]])
    ops = frontend.module()

    def step(stack, key, value, slots):
        ops.reshape_and_cache_(key, value, stack[1], slots)
        return stack.sum()

    if frontend.name.endswith("-compiled"):
        torch._dynamo.reset()
        step = torch.compile(step, backend="openxla", fullgraph=True)
    step(stack, tensors["key"], tensors["value"], tensors["slot_mapping"])
    want = reference.reshape_and_cache(**arrays)
    compare.assert_bitwise_equal(to_numpy(stack[1]), want, f"{frontend.name}: the slice")
