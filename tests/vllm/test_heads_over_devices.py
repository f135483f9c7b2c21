"""EAGLE heads over two and four CPU devices: the right tokens and drafts, the head divided, no traffic but sums."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm

from tests.vllm import engines, heads, test_quantization, tiny
from tests.vllm.copied_heads import CLOSE
from tests.vllm.heads_over_devices import NEW_TOKENS, NUM_DRAFTS, PROMPTS, SAMPLED
from tests.vllm.tensor_parallel import ON_A_CPU, exchanged, run_module
from tests.vllm.test_tensor_parallel import Devices
from xla_gpu.vllm.divided_sums import PendingSum, take_sums
from xla_gpu.vllm.residual_streams import ResidualStreams

LAYERS = {"eagle": 2, "eagle3": 6}
FOUR_HEADS = {"num_key_value_heads": 4}
# Models of one form have programs in common, which XLA compiles once for a process: no two cases have.
SIZES = {
    "others": {},
    "eagle3": {**FOUR_HEADS, "intermediate_size": 128},
    "fewer heads": {"intermediate_size": 192},  # two, of which four devices have copies
}
# A vocabulary of its own that vLLM does not pad, another width than the model's, a padded vocabulary, whose logits are
# gathered, more kv heads than the model, positions that end before the longest sequence.
OWN = {"draft_vocab_size": 128}
OTHERS = {
    "hidden_size": 96,
    "target_hidden_size": 64,
    "num_key_value_heads": 4,
    "norm_before_residual": True,
    "max_position_embeddings": 64,
}

RANDOM = ("eagle", "eagle3", "others", "tied", "quantised")
COPIES = ("copy of eagle", "copy of eagle3")
NAMES_OF = {2: (*RANDOM, *COPIES, "16 bits"), 4: ("eagle", "eagle3", "fewer heads", "quantised", "copy of eagle3")}
CASES = [(devices, name) for devices, names in NAMES_OF.items() for name in names]
EXACT = [(devices, name) for devices, name in CASES if name != "16 bits"]


def save(name: str, folder: Path) -> SimpleNamespace:
    """A model, with what its weights mean where they are quantised, a head, and an engine's options."""
    method = "eagle3" if name.endswith(("eagle3", "others", "16 bits")) else "eagle"
    options: dict = {}
    if name.startswith("copy") or name == "16 bits":
        target, head = heads.save_copy(method, folder)
        meant = target
        if name == "16 bits":
            options = {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}
    else:
        if name == "quantised":
            target, meant = map(str, test_quantization.save(folder / "target", "fp8", None, "llama_wide"))
        else:
            sizes = {"num_hidden_layers": LAYERS[method], **SIZES.get(name, FOUR_HEADS)}
            meant = target = tiny.save("qwen2" if name == "tied" else "llama", folder / "target", sizes)
        settings = {"eagle3": OWN, "others": OTHERS}.get(name, {})
        head = heads.save(method, meant, folder / "head", **settings)
    return SimpleNamespace(method=method, target=target, meant=meant, head=head, options=options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[[str], SimpleNamespace]:
    @functools.cache
    def made(name: str) -> SimpleNamespace:
        return save(name, tmp_path_factory.mktemp("case"))

    return made


@pytest.fixture(scope="module")
def found(saved, tmp_path_factory) -> Callable[[int, str], dict]:
    """What an engine over a number of devices did in a case, and the texts of its programs that hold attention."""

    @functools.cache
    def run(devices: int) -> dict[str, dict]:
        cases = []
        for name in NAMES_OF[devices]:
            case = saved(name)
            described = {"target": case.target, "method": case.method, "head": case.head, **case.options}
            cases.append(json.dumps(described))
        result, texts = run_module(
            "heads_over_devices", devices, [str(devices), *cases], tmp_path_factory.mktemp("hlo")
        )
        for case in result["cases"]:
            assert isinstance(case, dict), case
            programs = [texts[name] for name in case["programs"]]
            case["programs"] = [text for text in programs if "xla_gpu_paged_attention" in text]
        return dict(zip(NAMES_OF[devices], result["cases"], strict=True))

    return lambda devices, name: run(devices)[name]


@pytest.fixture(scope="module")
def without_drafts(saved) -> Callable[[str], list[list[list[int]]]]:
    """Greedy tokens of transformers, and drawn ones of an engine on one device without drafts."""

    @functools.cache
    def run(name: str) -> list[list[list[int]]]:
        reference = tiny.Reference(saved(name).meant)
        llm = engines.make(saved(name).target)
        greedy = [reference.greedy(prompt, NEW_TOKENS) for prompt in PROMPTS]
        return [greedy, engines.tokens(llm, PROMPTS[: len(SAMPLED)], SAMPLED)]

    return run


@pytest.mark.parametrize(("devices", "name"), EXACT)
def test_tokens_are_those_without_drafts(devices, name, found, without_drafts):
    case = found(devices, name)
    assert [case["greedy"], case["sampled"]] == without_drafts(name)
    assert case["compiled"] == 0


@pytest.mark.parametrize(("devices", "name"), EXACT)
def test_drafts_are_those_of_the_head(devices, name, found, saved):
    """By its definition, of up to 60 of the steps; acceptance is counted on the devices."""
    case, made = found(devices, name), saved(name)
    reference = heads.Reference(made.method, made.meant, made.head)
    recorded = [(before, drafts) for before, drafts in case["drafts"] if drafts]
    compared = 0
    for before, drafts in recorded[:: -(-len(recorded) // 60)]:
        expected, closest = reference.drafts(before, len(drafts))
        if closest > CLOSE:
            assert drafts == expected, len(before)
            compared += len(drafts)
    assert compared >= (60 if name.startswith("copy") else 100)
    if name == "others":
        past = [drafts for before, drafts in case["drafts"] if len(before) > OTHERS["max_position_embeddings"] + 1]
        assert past and not any(past)


@pytest.mark.parametrize(("devices", "name"), [case for case in CASES if case not in EXACT or "copy" in case[1]])
def test_most_drafts_of_a_copy_are_accepted(devices, name, found):
    """In 16 bits too, with a cache in 8, where a copy's sums differ from the model's."""
    drafted, accepted = found(devices, name)["counts"]
    assert accepted > (0.3 if name == "16 bits" else 0.4) * drafted > 0
    assert [len(ids) for ids in found(devices, name)["greedy"]] == [NEW_TOKENS] * len(PROMPTS)


@pytest.mark.parametrize(("devices", "name"), CASES)
def test_the_head_is_divided(devices, name, found):
    """As the model; the output matrix but for one that is the embedding too. The KV caches get what both leave."""
    case = found(devices, name)
    counted, taken = case["bytes"]
    assert counted == taken > 0
    parts = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "fc.", *(() if name == "tied" else ("lm_head",)))
    assert len(case["weights"]) >= 7
    for weight, spec in case["weights"].items():
        divided = any(part in weight for part in parts)
        assert spec.startswith(f"{{devices=[{devices},1" if divided else "{replicated}"), (weight, spec)
    assert case["caches"] and all(spec.startswith(f"{{devices=[1,1,{devices},1]") for spec in case["caches"])


def expected_traffic(devices: int, name: str, made: SimpleNamespace) -> list[tuple[int, int, int]]:
    """Of each program (sums, choices of the most likely token, gathered logits): three of the model, three of drafts.

    An EAGLE head reads the states by ``fc`` before each draft, one of EAGLE-3 before the first one.
    """
    layers = heads.config_of(made.meant).num_hidden_layers
    whole = name == "tied"  # where each device computes all logits, nothing is exchanged
    padded = name == "others"
    choices = 0 if whole or padded else NUM_DRAFTS
    sums = 2 * NUM_DRAFTS + (1 if made.method == "eagle3" else NUM_DRAFTS)
    return sorted(3 * [(2 * layers, int(not whole), 0)] + 3 * [(sums, choices, NUM_DRAFTS if padded else 0)])


@ON_A_CPU
@pytest.mark.parametrize(("devices", "name"), CASES)
def test_devices_exchange_sums_alone(devices, name, found, saved):
    counts, normed = [], 0
    for text in found(devices, name)["programs"]:
        moved = exchanged(text)
        assert {kind for _, kind in moved} == {"all-gather"}, moved  # on the CPU all_reduce is one, and a call
        shapes = [shape for shape, _ in moved]
        sums = [shape for shape in shapes if re.fullmatch(rf"f32\[{devices},(8|32|64),(64|96|256)\]", shape)]
        chosen = [shape for shape in shapes if re.fullmatch(rf"f32\[{devices},{devices},2,(8|32)\]", shape)]
        logits = [shape for shape in shapes if shape == "f32[8,128]"]
        assert len(sums) + len(chosen) + len(logits) == len(shapes), moved
        counts.append((len(sums), len(chosen), len(logits)))
        normed += text.count('custom_call_target="xla_gpu_all_reduce_add_rms_norm')
    made = saved(name)
    assert sorted(counts) == expected_traffic(devices, name, made)
    # The norms make all of the model's sums, those that a head reads the residual stream of too, and the head's but for
    # that of ``fc`` and, of EAGLE, the MLP's.
    layers = heads.config_of(made.meant).num_hidden_layers
    assert normed == 3 * (2 * layers + NUM_DRAFTS * (2 if made.method == "eagle3" else 1))


def test_a_sum_that_a_norm_made_is_not_made_again():
    with set_current_vllm_config(VllmConfig()):
        norm = RMSNorm(3)
    take_sums(norm)
    devices, parts, residual = Devices(), torch.arange(12.0).reshape(2, 2, 3), torch.arange(1.0, 7.0).reshape(2, 3)
    pending = PendingSum(devices, parts, torch.ones(3))
    expected = parts.sum(0) + 1
    norm(pending, residual)
    torch.testing.assert_close(pending.plus_residual(residual), expected + residual)
    assert (devices.made, devices.normed) == (0, 1)
    torch.testing.assert_close(pending.plus_residual(residual.clone()), expected + residual)
    torch.testing.assert_close(pending.plus_residual(None), expected)
    assert (devices.made, devices.normed) == (1, 1)


def test_residual_streams_are_those_in_front_of_the_layers():
    """Where a layer is given a tensor, a sum that its norm makes, or one that nothing makes."""

    class Layer(torch.nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm

        def forward(self, positions, hidden, residual):
            return (hidden, hidden) if residual is None or self.norm is None else self.norm(hidden, residual)

    with set_current_vllm_config(VllmConfig()):
        norm = RMSNorm(3)
    take_sums(norm)
    layers = torch.nn.ModuleList([Layer(norm), Layer(norm), Layer(None)])
    model = SimpleNamespace(model=SimpleNamespace(layers=layers))
    parts, residual = torch.arange(12.0).reshape(2, 2, 3), torch.arange(1.0, 7.0).reshape(2, 3)
    devices = Devices()
    with ResidualStreams(model, (0, 1, 2)).noted() as noted:
        layers[0](None, residual, None)
        layers[1](None, PendingSum(devices, parts, None), residual)
        layers[2](None, PendingSum(devices, parts, None), residual)
    expected = residual, parts.sum(0) + residual, parts.sum(0) + residual
    for got, wanted in zip(noted, expected, strict=True):
        torch.testing.assert_close(got, wanted)
    assert (devices.made, devices.normed) == (1, 1)


# ---- What is refused -------------------------------------------------------------------------------------------------


def test_refused_before_anything_is_loaded(tmp_path):
    target = tiny.save("llama", tmp_path / "target", FOUR_HEADS)
    head = heads.save("eagle", target, tmp_path / "head", num_key_value_heads=3)
    drafts = {"method": "eagle", "model": head, "num_speculative_tokens": 2}
    text = (
        r"a number that divides the head's 3 kv heads \(self_attn.k_proj and v_proj\), or is a multiple of them, got 4"
    )
    with pytest.raises(Exception, match=text):
        engines.make(target, tensor_parallel_size=4, speculative_config=drafts)
    one = {**drafts, "draft_tensor_parallel_size": 1}
    with pytest.raises(Exception, match="draft_tensor_parallel_size: expected --tensor-parallel-size, 2, got 1"):
        engines.make(target, tensor_parallel_size=2, speculative_config=one)


def test_a_matrix_that_cannot_be_divided(tmp_path):
    """Of the head, by its name."""
    target = tiny.save("llama", tmp_path / "target", FOUR_HEADS)
    head = heads.save("eagle", target, tmp_path / "head", intermediate_size=98)
    case = json.dumps({"target": target, "method": "eagle", "head": head})
    result, _ = run_module("heads_over_devices", 4, ["4", case], tmp_path / "hlo")
    text = "expected a number that divides the head's model.layers.0.mlp.gate_up_proj's outputs, 98, 98, got 4"
    assert f"--tensor-parallel-size: {text}" in result["cases"][0]
