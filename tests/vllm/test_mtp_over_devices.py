"""MTP layers over two CPU devices: the right tokens and drafts, the layer divided, no traffic but sums."""

from __future__ import annotations

import json
import re

import pytest

from tests.vllm import mtp_heads, tiny
from tests.vllm.copied_heads import CLOSE
from tests.vllm.heads_over_devices import NEW_TOKENS, NUM_DRAFTS, PROMPTS
from tests.vllm.tensor_parallel import ON_A_CPU, exchanged, run_module

DEVICES = 2
# A model whose layer is a copy, so that drafts are accepted, and one with latents and experts.
KINDS = ("mimo", "deepseek")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "mimo": mtp_heads.save_copy("mimo", folder / "mimo"),
        "deepseek": mtp_heads.save("deepseek", folder / "deepseek"),
    }


@pytest.fixture(scope="module")
def found(saved, tmp_path_factory) -> dict[str, dict]:
    """What heads_over_devices.py says of each kind, and the texts of the programs that hold attention."""
    cases = [json.dumps({"target": saved[kind], "method": "mtp", "head": None}) for kind in KINDS]
    result, texts = run_module("heads_over_devices", DEVICES, [str(DEVICES), *cases], tmp_path_factory.mktemp("hlo"))
    for case in result["cases"]:
        assert isinstance(case, dict), case
        programs = [texts[name] for name in case["programs"]]
        case["programs"] = [text for text in programs if re.search("xla_gpu_(paged|mla)_attention", text)]
    return dict(zip(KINDS, result["cases"], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_drafts(kind, found, saved):
    """Those of transformers, and those of the layer by its definition, of up to 60 of the steps."""
    case, plain = found[kind], tiny.Reference(saved[kind])
    assert case["greedy"] == [plain.greedy(prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert case["compiled"] == 0
    reference, compared = mtp_heads.Reference(kind, saved[kind]), 0
    recorded = [(before, drafts) for before, drafts in case["drafts"] if drafts]
    for before, drafts in recorded[:: -(-len(recorded) // 60)]:
        expected, closest = reference.drafts(before, len(drafts))
        if closest > CLOSE:
            assert drafts == expected, len(before)
            compared += len(drafts)
    assert compared >= 60
    drafted, accepted = case["counts"]
    assert drafted > 0 and (kind != "mimo" or accepted > 0.4 * drafted)


@pytest.mark.parametrize("kind", KINDS)
def test_the_layer_is_divided(kind, found):
    """As the model's are, and what joins embedding and state by its inputs; the KV caches get what both leave."""
    case = found[kind]
    counted, taken = case["bytes"]
    assert counted == taken > 0
    whole = ("norm", "embed_tokens", "fused_qkv_a_proj", "gate.", "e_score_correction_bias")
    assert len(case["weights"]) >= 7
    for weight, spec in case["weights"].items():
        assert (spec == "{replicated}") == any(part in weight for part in whole), (weight, spec)
    caches = {"{replicated}"} if kind == "deepseek" else {f"{{devices=[1,1,{DEVICES},1]0,1}}"}
    assert set(case["caches"]) == caches


@ON_A_CPU
@pytest.mark.parametrize("kind", KINDS)
def test_devices_exchange_sums_alone(kind, found):
    """And the most likely tokens: of drafts, for each one sum by ``fc`` and two or three of the layer."""
    of_layer = 3 if kind == "deepseek" else 2  # shared experts have a sum of their own
    counts = []
    for text in found[kind]["programs"]:
        moved = exchanged(text)
        assert {operation for _, operation in moved} == {"all-gather"}, (
            moved
        )  # on the CPU all_reduce is one, and a call
        sums = [shape for shape, _ in moved if re.fullmatch(rf"f32\[{DEVICES},(8|32|64),64\]", shape)]
        chosen = [shape for shape, _ in moved if re.fullmatch(rf"f32\[{DEVICES},{DEVICES},2,(8|32)\]", shape)]
        assert len(sums) + len(chosen) == len(moved), moved
        counts.append((len(sums), len(chosen)))
    of_model = {"mimo": 2, "deepseek": 2 + 3}[kind]
    assert sorted(counts) == sorted(3 * [(of_model, 1)] + 3 * [((1 + of_layer) * NUM_DRAFTS, NUM_DRAFTS)])
