"""--enable-expert-parallel over two and four CPU devices: the right tokens, whole experts on each, no traffic but sums.

All layouts of quantised weights with XLA_GPU_TEST_ALL_MODELS=1; otherwise one of each kind.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm import engines, test_gpt_oss, test_quantization, tiny
from tests.vllm.tensor_parallel import NEW_TOKENS, ON_A_CPU, PROMPTS, exchanged, run_on

LAYERS = 2

# Heads for four devices; widths that neither two nor four divide as their format needs: odd, three groups of 32, one
# group or block of 128.
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
PLAIN = {
    "mixtral": HEADS,
    "qwen3_moe": {**HEADS, "moe_intermediate_size": 45},
    "glm4_moe": HEADS,  # with shared experts
    "gpt_oss": HEADS,
}
QUANTISED = {**HEADS, "hidden_size": 256, "head_dim": 128, "moe_intermediate_size": 128}
FORMATS: tuple[str, ...] = ("fp8-blocks", "gptq")
OF_FOUR: tuple[str, ...] = ("qwen3_moe", "mxfp4", "fp8-blocks")
if os.environ.get("XLA_GPU_TEST_ALL_MODELS"):
    FORMATS = tuple(sorted(test_quantization.LAYOUTS))
    OF_FOUR = (*PLAIN, "mxfp4", *FORMATS)
NAMES = (*PLAIN, "mxfp4", *FORMATS)
NAMES_OF = {2: NAMES, 4: OF_FOUR}  # by the number of devices

# Sums of a program: of each layer that of attention and that of experts; of GLM 4.5, whose first layer has no experts,
# that of shared experts too.
SUMS = {name: 2 * LAYERS + (name == "glm4_moe") for name in NAMES}


def save(name: str, folder: Path) -> tuple[str, str]:
    """A checkpoint, and one of the weights that it means."""
    if name in PLAIN:
        return (tiny.save(name, folder, PLAIN[name]),) * 2
    if name == "mxfp4":
        return test_gpt_oss.save(folder, **HEADS)
    stored, meant = test_quantization.save(folder, name, QUANTISED, "qwen3_moe")
    return str(stored), str(meant)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, tuple[str, str]]:
    return {name: save(name, tmp_path_factory.mktemp(name)) for name in NAMES}


@pytest.fixture(scope="module")
def expected(folders) -> dict[str, list[list[int]]]:
    """Of transformers."""
    references = {name: tiny.Reference(meant) for name, (_, meant) in folders.items()}
    return {name: [made.greedy(prompt, NEW_TOKENS) for prompt in PROMPTS] for name, made in references.items()}


@pytest.fixture(scope="module")
def found(folders, tmp_path_factory) -> Callable[[int], dict]:
    """What engines over a number of devices did."""

    @functools.cache
    def run(devices: int) -> dict:
        stored = [folders[name][0] for name in NAMES_OF[devices]]
        return run_on(devices, stored, tmp_path_factory.mktemp("hlo"), "--enable-expert-parallel")

    return run


@pytest.mark.parametrize(("devices", "name"), [(devices, name) for devices in NAMES_OF for name in NAMES_OF[devices]])
def test_tokens(devices, name, found, expected):
    """Those of transformers."""
    assert found(devices)["tokens"][NAMES_OF[devices].index(name)] == expected[name]


@pytest.mark.parametrize("devices", NAMES_OF)
def test_each_device_has_whole_experts(devices, found):
    """But for the bias of the second products, which is added to the sum."""
    lines = [line.split(" ", 1) for line in found(devices)["sharding"]]
    kinds = {name.rpartition(".")[2] for name, _ in lines}
    assert kinds >= {"w13_weight", "w13_weight_scale", "w13_bias", "w2_weight", "w2_weight_scale", "w2_bias"}
    for name, spec in lines:
        whole = name.endswith("w2_bias")
        assert spec.startswith("{replicated}" if whole else f"{{devices=[{devices},1"), (name, spec)


@ON_A_CPU
@pytest.mark.parametrize("devices", NAMES_OF)
def test_devices_exchange_sums_alone(devices, found):
    programs, counts = found(devices)["programs"], []
    assert len(programs) == 2 * len(NAMES_OF[devices])  # of 8 and 64 tokens
    for text in programs:
        moved = exchanged(text)
        sums = [shape for shape, _ in moved if re.fullmatch(rf"f32\[{devices},(8|64),(64|256)\]", shape)]
        # On the CPU all_reduce is an all-gather and a call. The last one is of each device's most likely tokens.
        assert {kind for _, kind in moved} == {"all-gather"}, moved
        assert [shape for shape, _ in moved if shape not in sums] == [f"f32[{devices},{devices},2,8]"], moved
        counts.append(len(sums))
    assert sorted(counts) == sorted(2 * [SUMS[name] for name in NAMES_OF[devices]])


@pytest.mark.parametrize("devices", NAMES_OF)
def test_grouped_experts(devices, found):
    """In bfloat16, in a layer by itself."""
    assert found(devices)["grouped"] < 1e-2


@ON_A_CPU
@pytest.mark.parametrize("devices", NAMES_OF)
def test_grouped_experts_exchange_one_sum(devices, found):
    (program,) = found(devices)["grouped_layers"]
    assert exchanged(program) == [(f"f32[{devices},40,64]", "all-gather")]  # on a CPU XLA moves bfloat16 as float32


def test_refused(tmp_path, llama):
    model = tiny.save("qwen3_moe", tmp_path, {**HEADS, "num_experts": 6})
    text = "--enable-expert-parallel: expected --tensor-parallel-size to divide the model's 6 experts, got 4"
    with pytest.raises(Exception, match=text):
        engines.make(model, tensor_parallel_size=4, enable_expert_parallel=True)
    with pytest.raises(Exception, match="Number of experts in the model must be greater than 0"):
        engines.make(llama, tensor_parallel_size=2, enable_expert_parallel=True)


def test_one_device_has_all_experts(folders, expected):
    llm = engines.make(folders["mixtral"][0], enable_expert_parallel=True)
    assert engines.tokens(llm, PROMPTS, engines.greedy(NEW_TOKENS)) == expected["mixtral"]
