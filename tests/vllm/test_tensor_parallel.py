"""--tensor-parallel-size over two CPU devices: the right tokens, the model divided, no traffic but its sums.

All layouts of quantised weights and all models with experts with XLA_GPU_TEST_ALL_MODELS=1; otherwise one of each kind.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from tests.vllm import engines, test_quantization, tiny
from tests.vllm.tensor_parallel import NEW_TOKENS, ON_A_CPU, PROMPTS, draft, exchanged, generate, run_on
from xla_gpu.vllm.divided_layers import Joined
from xla_gpu.vllm.divided_sums import PendingSum, take_sums

LAYERS = 2
LAYER_SUMS = 2 * LAYERS
SHARED = {"glm4_moe": 1, "qwen2_moe": 2}  # layers with shared experts, whose sum is one more
EVERY_TIME = ("awq", "fp8-blocks", "mixtral", "awq of qwen3_moe", "glm4_moe")
OTHERS = EVERY_TIME
if os.environ.get("XLA_GPU_TEST_ALL_MODELS"):
    with_experts = [f"{layout} of {model}" for layout, model in test_quantization.WITH_EXPERTS]
    OTHERS = (*test_quantization.LAYOUTS, "mixtral", "qwen3_moe", "qwen3", "gemma2", "phi3", *with_experts)
    OTHERS += ("glm4_moe", "qwen2_moe")


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> dict[str, tuple[str, Path]]:
    """Folders of checkpoints, and of those with the weights that they mean."""
    folders = {}
    for name in OTHERS:
        folder = tmp_path_factory.mktemp(name)
        layout, _, model = name.partition(" of ")
        if layout in test_quantization.LAYOUTS:
            sizes = test_quantization.EXPERTS.get(model)
            stored, meant = test_quantization.save(folder, layout, sizes, model or "llama_wide")
            folders[name] = str(stored), meant
        else:
            folders[name] = tiny.save(name, folder), folder
    return folders


@pytest.fixture(scope="module")
def too_narrow(tmp_path_factory) -> str:
    """The folder of a model of packed int4 whose attention has 128 inputs of its last matrix, one group."""
    folder = tmp_path_factory.mktemp("narrow")
    stored, _ = test_quantization.save(folder, "awq", {"hidden_size": 128, "head_dim": 32})
    return str(stored)


@pytest.fixture(scope="module")
def two_devices(llama, others, too_narrow, tmp_path_factory) -> dict:
    """What tensor_parallel.py says, and the text of the programs that hold attention."""
    folders = [llama, *(stored for stored, _ in others.values()), too_narrow]
    return run_on(2, folders, tmp_path_factory.mktemp("hlo"))


def test_same_tokens_as_one_device(two_devices, engine):
    expected = generate(engine)
    assert two_devices["greedy"] == expected["greedy"]
    assert two_devices["sampled"] == expected["sampled"]
    for name in ("logprobs", "prompt_logprobs"):
        torch.testing.assert_close(torch.tensor(two_devices[name]), torch.tensor(expected[name]))
    assert two_devices["compiled"] == 0
    assert two_devices["drafted"] == [draft(engine), True]


def test_the_model_is_divided(two_devices):
    assert two_devices["caches"] == ["{devices=[1,1,2,1]0,1}"]  # of all layers
    for name, spec in two_devices["weights"].items():
        divided = any(part in name for part in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"))
        assert spec.startswith("{devices=[2,1" if divided else "{replicated}"), (name, spec)


@pytest.mark.parametrize("name", OTHERS)
def test_quantised_weights_and_experts(name, two_devices, others):
    """Tokens are those of transformers."""
    reference = tiny.Reference(str(others[name][1]))
    expected = [reference.greedy(prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert two_devices["others"][list(others).index(name)] == expected


@ON_A_CPU
def test_devices_exchange_sums_alone(two_devices):
    # Each model's, of 8 and 64 tokens; the first one's with drafts too, of 8, 32 and 64, with up to 32 rows of logits.
    assert len(two_devices["programs"]) == 2 * (1 + len(OTHERS)) + 3
    counts, gathered = [], []
    for text in two_devices["programs"]:
        found = exchanged(text)
        sums = [shape for shape, _ in found if re.fullmatch(r"f32\[2,(8|32|64),\d+\]", shape)]
        chosen = [shape for shape, _ in found if shape not in sums]
        # On the CPU all_reduce is an all-gather and a call. The last one is of each device's most likely tokens, where
        # the head is not the embedding, as Gemma's is.
        assert len(set(sums)) == 1 and {kind for _, kind in found} == {"all-gather"}, found
        counts += [len(sums)]
        gathered += [chosen]
    shared = sorted([LAYER_SUMS + more for name, more in SHARED.items() for _ in range(2 * OTHERS.count(name))])
    assert sorted(counts) == [*[LAYER_SUMS] * (len(counts) - len(shared)), *shared]
    whole = 2 * OTHERS.count("gemma2")
    sizes = [*[["f32[2,2,2,32]"]] * 2, *[["f32[2,2,2,8]"]] * (len(gathered) - whole - 2)]
    assert sorted(gathered) == [*[[]] * whole, *sizes]


def test_norms_make_the_sums(two_devices):
    """All of Llama's; where a layer has experts, their sum is made before the norm, and Gemma's norms are others."""
    found = []
    for text in two_devices["programs"]:
        with_norm = text.count('custom_call_target="xla_gpu_all_reduce_add_rms_norm')
        found += [(with_norm, text.count('custom_call_target="xla_gpu_all_reduce') - with_norm)]
    gemma = 2 * OTHERS.count("gemma2")
    experts = 2 * sum("mixtral" in name or "moe" in name for name in OTHERS if name not in SHARED)
    # A sum more is that of each device's most likely tokens; that of shared experts is made by itself.
    shared = [(LAYER_SUMS - more, 2 * more + 1) for name, more in SHARED.items() for _ in range(2 * OTHERS.count(name))]
    dense = len(found) - gemma - experts - len(shared)
    others = [(0, 2 * LAYERS)] * gemma + [(LAYERS, LAYERS + 1)] * experts + [(2 * LAYERS, 1)] * dense
    assert sorted(found) == sorted(others + shared)


class Devices:
    """The devices of an engine, which count the sums that they make, and the sums that norms make."""

    made = normed = 0

    def sum(self, parts):
        self.made += 1
        return parts.sum(0)

    def sum_add_norm(self, parts, residual, weight, eps):
        assert isinstance(residual, torch.Tensor) and residual.dtype == weight.dtype == parts.dtype
        self.normed += 1
        total = parts.sum(0) + residual
        return torch.nn.functional.rms_norm(total, weight.shape, weight, eps), total


def test_a_pending_sum_is_a_tensor_to_all_else():
    devices, parts = Devices(), torch.arange(12.0).reshape(2, 2, 3)
    pending = PendingSum(devices, parts, torch.ones(3))
    expected = parts.sum(0) + 1
    assert pending.shape == (2, 3) and pending.dtype is torch.float32 and devices.made == 0
    for got in (pending + 0, 0 + pending, torch.zeros(2, 3) + pending, torch.cat([pending])[:2], pending.view(2, 3)):
        torch.testing.assert_close(got, expected)
    torch.testing.assert_close(pending[1], expected[1])
    assert devices.made == 1 and not pending.can_be_normed


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("residual", "sums"), [(torch.float32, 0), (torch.bfloat16, 1), ("pending", 1), (None, 1)], ids=str
)
def test_what_a_norm_makes_itself(residual, sums, with_bias):
    """A sum with a residual of the same dtype; a residual may be a sum that was not made yet."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm

    with set_current_vllm_config(VllmConfig()):
        norm, plain = RMSNorm(3), RMSNorm(3)
    take_sums(norm)
    parts = torch.arange(12.0).reshape(2, 2, 3)
    bias = torch.ones(3) if with_bias else None
    devices, total = Devices(), parts.sum(0) + (1 if with_bias else 0)
    if residual == "pending":
        given, value = PendingSum(devices, parts, bias), total
    else:
        given = value = None if residual is None else torch.arange(1.0, 7.0).reshape(2, 3).to(residual)
    torch.testing.assert_close(norm(PendingSum(devices, parts, bias), given), plain(total, value))
    assert (devices.made, devices.normed) == (sums, int(residual in (torch.float32, "pending")))


def test_one_number_of_devices_for_a_process(engine, llama):
    with pytest.raises(
        Exception, match="--tensor-parallel-size: expected 1, which an engine of this process has, got 2"
    ):
        engines.make(llama, tensor_parallel_size=2)


def test_refused_models(engine, llama, two_devices):
    text = "expected a number that divides model.layers.0.self_attn.o_proj's inputs, 128, into multiples of 128, got 2"
    assert text in two_devices["others"][-1]


def test_joined_outputs():
    gate, up = torch.ones(3, 4), torch.zeros(3, 2)
    joined = Joined([gate, up])
    assert joined.shape == (3, 6)
    assert joined[..., :4] is gate and joined[..., 4:] is up and joined.split([4, 2], dim=-1) == (gate, up)
    assert Joined([gate, gate]).chunk(2, dim=-1) == (gate, gate)
    with pytest.raises(NotImplementedError, match=r"a split into \[3, 3\] along -1, where the parts are \[4, 2\]"):
        joined.chunk(2, dim=-1)
    with pytest.raises(NotImplementedError, match=r"a split into \[3, 3\] along -1, where the parts are \[4, 2\]"):
        joined.split([3, 3], dim=-1)
    with pytest.raises(NotImplementedError, match=r"the element .* of a joined layer's outputs"):
        joined[..., :3]
    with pytest.raises(AttributeError, match="the attribute float"):
        joined.float()
