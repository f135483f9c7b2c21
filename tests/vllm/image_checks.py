"""What tests of all models with images have in common; and as a program, an engine over two devices.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 PJRT_DEVICE=CPU python -m tests.vllm.image_checks test_images FOLDER

SPMD is for a whole process. The program prints "RESULT", whether tokens are transformers', and what was compiled.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.common import machine
from tests.vllm import engines, processes, tiny_images

NEW = 12
SMALL = 16  # tokens of the smaller of two programs of an encoder for images of any size
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}

Prompt = tuple[str, list[Image.Image]]


def make(folder: str, **options: Any) -> Any:
    return engines.make(folder, **{"limit_mm_per_prompt": {"image": 5}, "max_model_len": 512, **options})


def make_any_size(folder: str, **options: Any) -> Any:
    """Of a model with images of any size: with few sizes of steps, and two programs of the encoder."""
    sizes = {"token_buckets": [8, 64], "encoder_buckets": [SMALL]}
    return make(folder, **{"additional_config": sizes, **options})


def pictures_of_any_size(count: int, seed: int = 0, *, least: int) -> list[Image.Image]:
    """Of sides of ``least`` to 259 pixels, some of them long."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(least, 260, (count, 2)).tolist()
    return [Image.fromarray(generator.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]


def ask(llm: Any, prompts: list[Prompt], params: Any = None) -> list[list[int]]:
    """Tokens of prompts that are read together."""
    given = [{"prompt": text, "multi_modal_data": {"image": images}} if images else text for text, images in prompts]
    outputs = llm.generate(given, params or engines.greedy(NEW), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def check(llm: Any, reference: tiny_images.Reference, prompts: list[Prompt]) -> None:
    """Tokens are transformers', one prompt at a time and together, and nothing is compiled."""
    expected = [reference.greedy(text, images, NEW) for text, images in prompts]
    assert [ask(llm, [prompt])[0] for prompt in prompts] == expected
    llm.reset_prefix_cache()
    assert ask(llm, prompts) == expected
    assert engines.compiled_since_start(llm) == 0


def check_prompts(llm: Any, reference: tiny_images.Reference, image: str, pictures: list[Image.Image]) -> None:
    """One image, none, several, at the beginning and at the end. ``image``: what stands for one in a prompt."""
    one, two, three, *five = pictures
    prompts: list[Prompt] = [
        (f"Describe {image} in one word.", [one]),
        ("No image here, only text that goes on.", []),
        (f"{image}", [two]),
        (f"{image}{image} and {image}: which one is brighter?", [three, one, two]),
        (f"{'a long beginning ' * 4}{image}", [three]),
        (" ".join([image] * 5), five),
    ]
    check(llm, reference, prompts)
    others = ask(llm, [(prompts[0][0], [picture]) for picture in (one, two, three)])
    assert len({tuple(tokens) for tokens in others}) == 3  # the image is what they follow from


def note_parts(llm: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of images in each step that has some, from now on."""
    encoder, parts = engines.runner_of(llm).images, []
    of_step = encoder.of_step

    def noted(*arguments):
        found = of_step(*arguments)
        if found is not None:
            parts.append(int((found.rows >= 0).sum()))
        return found

    monkeypatch.setattr(encoder, "of_step", noted)
    return parts


def check_preemption_and_abort(llm: Any, reference: tiny_images.Reference, prompts: list[Prompt]) -> None:
    """Of an engine whose pages are too few for all; of the first three requests one is aborted while it is read."""
    assert ask(llm, prompts, engines.greedy(60)) == [reference.greedy(*prompt, 60) for prompt in prompts]
    assert engines.metric(llm, "vllm:num_preemptions") > 0
    engine, finished, steps = llm.llm_engine, {}, 0
    for index, (text, shown) in enumerate(prompts[:3]):
        engine.add_request(str(index), {"prompt": text, "multi_modal_data": {"image": shown}}, engines.greedy(NEW))
    while engine.has_unfinished_requests():
        if steps == 1:
            engine.abort_request(["1"])
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
    expected = [reference.greedy(*prompt, NEW) for prompt in prompts[:3]]
    assert finished["0"] == expected[0] and finished["2"] == expected[2] and "1" not in finished
    assert engines.compiled_since_start(llm) == 0


def check_two_devices(module: str, folder: str) -> None:
    """--tensor-parallel-size, in a process of its own. ``module``: see main."""
    if os.environ.get("PJRT_DEVICE", "").upper() == "GPU" and machine.gpu_count() < 2:
        pytest.skip(f"2 GPUs are needed, this machine has {machine.gpu_count()}")
    done = processes.run(["-m", "tests.vllm.image_checks", module, folder])
    assert done.line() == "True 0", done.stderr[-3000:]


def main(module: str, folder: str) -> None:
    """Prints the result of an engine over two devices. ``module``: of this package, with IMAGE, make and pictures."""
    tests = importlib.import_module(f"tests.vllm.{module}")
    reference, image = tiny_images.Reference(folder), tests.IMAGE
    one, two, three = tests.pictures(3)
    prompts = [(f"a {image} b", [one]), (f"{image} and {image}", [two, three]), ("no image", [])]
    expected = [reference.greedy(*prompt, NEW) for prompt in prompts]
    llm = tests.make(folder, tensor_parallel_size=2)
    print("RESULT", ask(llm, prompts) == expected, engines.compiled_since_start(llm))


if __name__ == "__main__":
    main(*sys.argv[1:])
