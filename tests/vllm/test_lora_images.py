"""LoRA adapters of the language model beside images: tokens equal to transformers' with the adapter in the weights.

All models with XLA_GPU_TEST_ALL_MODELS=1.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from tests.vllm import engines, image_checks, test_lora, tiny_images
from tests.vllm.image_checks import NEW

pytest.importorskip("torchvision", reason="the processors of some of these models")

from tests.vllm import tiny_pixtral, tiny_qwen_vl

# Of each what writes it, and which pictures it takes; Gemma 3's images are read whole.
MODELS = {
    "gemma3": tiny_images,
    "mistral3": tiny_pixtral,
    "qwen2_5_vl": tiny_qwen_vl,
    "qwen3_vl_moe": tiny_qwen_vl,
}
EVERY_TIME = ("gemma3", "qwen2_5_vl")
NAMES = sorted(MODELS) if os.environ.get("XLA_GPU_TEST_ALL_MODELS") else EVERY_TIME

# Modules of adapters, and their ranks.
KINDS = [(test_lora.ATTENTION, 4), (("v_proj", "o_proj"), 3)]


def make(folder: str, **options: Any) -> Any:
    return image_checks.make(folder, enable_lora=True, max_loras=1, max_lora_rank=8, **options)


def ask(llm: Any, requests: list[tuple[image_checks.Prompt, LoRARequest | None]]) -> list[list[int]]:
    given = [{"prompt": text, "multi_modal_data": {"image": shown}} if shown else text for (text, shown), _ in requests]
    outputs = llm.generate(given, engines.greedy(NEW), lora_request=[one for _, one in requests], use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_transformers(name, tmp_path):
    """With each of two adapters and with none, of which a step takes one; then out of the prefix cache."""
    folder, image = MODELS[name].save(name, tmp_path / "model"), MODELS[name].IMAGE
    one, two = tiny_images.pictures(2, seed=1)
    prompts = [(f"What is in {image}?", [one]), (f"{image} and {image}: {'x' * 60}", [two, one]), ("no image", [])]
    adapters, expected = [None], [tiny_images.Reference(folder)]
    for index, (modules, rank) in enumerate(KINDS):
        reference = tiny_images.Reference(folder)
        path = test_lora.write(tmp_path / str(index), reference._model, modules, rank, index, part="language_model")
        test_lora.add(reference._model, path)
        adapters.append(LoRARequest(f"adapter-{index}", index + 1, path))
        expected.append(reference)
    requests = [(prompt, one) for prompt in prompts for one in adapters]
    wanted = [reference.greedy(*prompt, NEW) for prompt in prompts for reference in expected]
    assert len({tuple(tokens) for tokens in wanted}) == len(wanted)
    llm = make(folder)
    encoder, encoded = engines.runner_of(llm).images, []
    encode = encoder._encode
    encoder._encode = lambda found: (encoded.extend(image.identifier for image in found), encode(found))
    assert ask(llm, requests) == wanted
    assert ask(llm, requests) == wanted
    assert engines.compiled_since_start(llm) == 0
    assert len(set(encoded)) == 2  # adapters change nothing of an image's rows


def test_adapters_of_the_encoder_are_refused(tmp_path):
    """As vLLM has it: it would leave them out."""
    folder = tiny_qwen_vl.save("qwen2_5_vl", tmp_path / "model")
    model = tiny_images.Reference(folder)._model
    llm = make(folder)
    for index, modules in enumerate((("mlp.gate_proj",), ("attn.qkv",))):
        path = test_lora.write(tmp_path / str(index), model, modules, 2, index, part="visual")
        with pytest.raises(Exception, match="expected modules of the language model alone, got visual"):
            llm.llm_engine.add_lora(LoRARequest(f"adapter-{index}", index + 1, path))
    assert Path(path).exists() and llm.llm_engine.list_loras() == set()
