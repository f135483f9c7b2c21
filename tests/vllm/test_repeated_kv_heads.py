"""--tensor-parallel-size with fewer kv heads than devices, over two and four CPU devices: each has a copy of one.

All layouts of quantised weights with XLA_GPU_TEST_ALL_MODELS=1; otherwise one of each kind.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import QKVParallelLinear

from tests.vllm import engines, test_quantization, tiny
from tests.vllm.tensor_parallel import NEW_TOKENS, ON_A_CPU, PROMPTS, draft, exchanged, generate, run_on
from xla_gpu.vllm import repeated_kv_heads

LAYERS = 2

# Two of eight query heads, or of four, for a kv head; one kv head for all.
EIGHT = {"num_attention_heads": 8, "num_key_value_heads": 2}
ONE = {"num_key_value_heads": 1}
PLAIN = {
    "llama": EIGHT,
    "qwen2": ONE,  # biases; the head is the embedding
    "qwen3": {},  # norms of heads
    "gemma3": {"num_hidden_layers": LAYERS, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {},  # one matrix in the checkpoint
    "falcon": {"num_kv_heads": 1},
    "mixtral": {},
}
# Heads of whole blocks, and widths of which four devices have whole groups.
QUANTISED = {"hidden_size": 512, "num_key_value_heads": 2, "head_dim": 128}
FORMATS: tuple[str, ...] = ("awq", "fp8", "fp8-blocks")
if os.environ.get("XLA_GPU_TEST_ALL_MODELS"):
    FORMATS = tuple(sorted(test_quantization.LAYOUTS))
NAMES_OF = {4: (*PLAIN, *FORMATS), 2: ("qwen2", "falcon")}
CASES = [(devices, name) for devices, names in NAMES_OF.items() for name in names]
WHOLE_HEADS = ("qwen2", "gemma3", "falcon")  # output matrices that are the embedding


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, tuple[str, str]]:
    """Checkpoints, and those of the weights that they mean."""

    def save(name: str, folder: Path) -> tuple[str, str]:
        if name in PLAIN:
            return (tiny.save(name, folder, PLAIN[name]),) * 2
        stored, meant = test_quantization.save(folder, name, QUANTISED, "llama_wide")
        return str(stored), str(meant)

    return {name: save(name, tmp_path_factory.mktemp(name)) for name in (*PLAIN, *FORMATS)}


@pytest.fixture(scope="module")
def found(folders, tmp_path_factory) -> Callable[[int], dict]:
    """What engines over a number of devices did."""

    @functools.cache
    def run(devices: int) -> dict:
        return run_on(devices, [folders[name][0] for name in NAMES_OF[devices]], tmp_path_factory.mktemp("hlo"))

    return run


@pytest.mark.parametrize(("devices", "name"), CASES)
def test_tokens(devices, name, found, folders):
    """Those of transformers."""
    reference, index = tiny.Reference(folders[name][1]), NAMES_OF[devices].index(name)
    got = found(devices)["greedy"] if index == 0 else found(devices)["others"][index - 1]
    assert got == [reference.greedy(prompt, NEW_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("devices", NAMES_OF)
def test_same_as_one_device(devices, found, folders):
    """Drawn tokens, log-probabilities and drafts too."""
    llm, case = engines.make(folders[NAMES_OF[devices][0]][0]), found(devices)
    expected = generate(llm)
    assert case["sampled"] == expected["sampled"]
    torch.testing.assert_close(torch.tensor(case["logprobs"]), torch.tensor(expected["logprobs"]))
    assert case["drafted"] == [draft(llm), True]
    assert case["compiled"] == 0


@pytest.mark.parametrize("devices", NAMES_OF)
def test_each_device_has_one_head(devices, found):
    case = found(devices)
    assert case["caches"] == [f"{{devices=[1,1,{devices},1]{','.join(map(str, range(devices)))}}}"]
    assert case["kv_heads"] == [devices] * LAYERS


@ON_A_CPU
@pytest.mark.parametrize("devices", NAMES_OF)
def test_devices_exchange_sums_alone(devices, found):
    """As with a head for each device."""
    programs, counts = found(devices)["programs"], []
    assert len(programs) == 2 * len(NAMES_OF[devices]) + 3  # of 8 and 64 tokens, and three with drafts
    for text in programs:
        moved = exchanged(text)
        assert {kind for _, kind in moved} == {"all-gather"}, moved  # on the CPU all_reduce is one, and a call
        sums = [shape for shape, _ in moved if re.fullmatch(rf"f32\[{devices},(8|32|64),(64|512)\]", shape)]
        chosen = [shape for shape, _ in moved if re.fullmatch(rf"f32\[{devices},{devices},2,(8|32)\]", shape)]
        assert len(sums) + len(chosen) == len(moved), moved
        counts.append((len(sums), len(chosen)))
    of_case = {name: (2 * LAYERS, int(name not in WHOLE_HEADS)) for name in NAMES_OF[devices]}
    first = of_case[NAMES_OF[devices][0]]
    assert sorted(counts) == sorted([*2 * list(of_case.values()), *3 * [first]])


# ---- One layer -------------------------------------------------------------------------------------------------------


class Attention(torch.nn.Module, AttentionLayerBase):
    def __init__(self, kv_heads: int, head_size: int) -> None:
        super().__init__()
        self.num_kv_heads, self.head_size = kv_heads, head_size
        self.impl = SimpleNamespace(num_kv_heads=kv_heads)

    def get_attn_backend(self):
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config):
        raise NotImplementedError


def attention_module(kv_heads: int = 2, head_size: int = 4, rows: int = 1, norm: int = 0) -> torch.nn.Module:
    """Of four query heads; rows: of the matrix, that a scale is for; norm: weights of a norm of keys."""
    projection = QKVParallelLinear.__new__(QKVParallelLinear)
    torch.nn.Module.__init__(projection)
    sizes = [4 * head_size, kv_heads * head_size, kv_heads * head_size]
    projection.output_sizes, projection.output_size, projection.num_kv_heads = sizes, sum(sizes), kv_heads
    number = torch.arange(float(sum(sizes)))
    values = {"weight": number[:, None].expand(-1, 3), "weight_scale": number[::rows, None], "bias": number}
    for name, tensor in values.items():
        projection.register_parameter(name, torch.nn.Parameter(tensor.contiguous(), requires_grad=False))
    module = torch.nn.Module()
    module.qkv_proj, module.attn = projection, Attention(kv_heads, head_size)
    module.num_kv_heads, module.kv_size = kv_heads, kv_heads * head_size
    if norm:
        module.k_norm = torch.nn.LayerNorm(norm)
    return module


def test_rows_of_a_layer():
    module = attention_module()
    repeated_kv_heads.repeat(4, "attention", module, random=False)
    heads = [range(16, 20), range(16, 20), range(20, 24), range(20, 24), range(24, 28), range(24, 28), range(28, 32)]
    expected = [*range(16), *(row for head in [*heads, range(28, 32)] for row in head)]
    projection = module.qkv_proj
    assert projection.bias.tolist() == projection.weight[:, 2].tolist() == projection.weight_scale[:, 0].tolist()
    assert projection.bias.tolist() == expected
    assert (projection.output_sizes, projection.output_size) == ([16, 16, 16], 48)
    heads_of = [owner.num_kv_heads for owner in (module, projection, module.attn, module.attn.impl)]
    assert heads_of == [4] * 4 and module.kv_size == 16
    # What the checkpoint has, of adapters for example.
    assert repeated_kv_heads.output_sizes(projection) == [16, 8, 8]
    assert repeated_kv_heads.of_outputs(projection, torch.arange(32)[None]).tolist() == [expected]


def test_a_scale_for_rows_of_one_head():
    module = attention_module(rows=4)
    repeated_kv_heads.repeat(4, "attention", module, random=False)
    assert module.qkv_proj.weight_scale[:, 0].tolist() == [0, 4, 8, 12, 16, 16, 20, 20, 24, 24, 28, 28]


def test_random_weights_are_not_touched():
    module = attention_module()
    repeated_kv_heads.repeat(8, "attention", module, random=True)
    assert module.qkv_proj.weight.shape == (80, 3) and module.qkv_proj.bias.shape == (80,)


def test_enough_heads_stay():
    module = attention_module(norm=8)
    repeated_kv_heads.repeat(2, "attention", module, random=False)
    assert module.qkv_proj.output_sizes == [16, 8, 8] and module.num_kv_heads == 2
    assert repeated_kv_heads.output_sizes(module.qkv_proj) == [16, 8, 8]
    given = torch.arange(32)
    assert repeated_kv_heads.of_outputs(module.qkv_proj, given) is given


@pytest.mark.parametrize(
    ("size", "sizes", "text"),
    [
        (3, {}, "expected a number that divides a.attn's 2 kv heads, got 3"),
        (
            4,
            {"norm": 8},
            "expected a number that divides a.attn's 2 kv heads, of which this model can have no copies, ",
        ),
        (4, {"rows": 8}, "no copies where a scale is for 8 rows and a head has 4, got 4"),
    ],
)
def test_what_cannot_be_repeated(size, sizes, text):
    with pytest.raises(ValueError, match=text):
        repeated_kv_heads.repeat(size, "a.attn", attention_module(**sizes), random=False)


def test_refused_before_anything_is_loaded(tmp_path):
    """vLLM itself refuses a number that does not divide the query heads."""
    model = tiny.save("llama", tmp_path, {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 16})
    text = "expected a number that divides the model's 4 kv heads, or is a multiple of them, got 6"
    with pytest.raises(Exception, match=text):
        engines.make(model, tensor_parallel_size=6, swap_space=0)
