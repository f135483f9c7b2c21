"""Mistral 3 and LLaVA with Pixtral's encoder: greedy tokens equal to transformers' in float32.

All tests with XLA_GPU_TEST_ALL_MODELS=1.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import pytest

from tests.vllm import engines, image_checks, tiny_images
from tests.vllm.image_checks import NEW, SMALL, ask

pytest.importorskip("torchvision", reason="the processor of these models")

from tests.vllm import tiny_pixtral
from tests.vllm.tiny_pixtral import IMAGE, LARGEST, MOST_TOKENS, SIDE

ALL = bool(os.environ.get("XLA_GPU_TEST_ALL_MODELS"))
# What image_checks.main takes of this module, too.
make = image_checks.make_any_size
pictures = functools.partial(image_checks.pictures_of_any_size, least=10)  # from one token to more than the most


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return tiny_pixtral.save("mistral3", tmp_path_factory.mktemp("mistral3"))


@pytest.fixture(scope="module")
def reference(folder) -> tiny_images.Reference:
    return tiny_images.Reference(folder)


@pytest.fixture(scope="module")
def llm(folder) -> Any:
    return make(folder)


def test_tokens_equal_transformers(llm, reference):
    """Read in steps of up to 64 tokens."""
    image_checks.check_prompts(llm, reference, IMAGE, pictures(8, seed=1))
    assert list(engines.runner_of(llm).images._layouts) == [SMALL, MOST_TOKENS]


def test_an_image_may_be_split_over_steps(llm, reference, monkeypatch):
    """Between its lines stand tokens of text: where a step ends in or at one the next one goes on behind."""
    parts = image_checks.note_parts(llm, monkeypatch)
    image = pictures(1)[0].resize((3 * SIDE, 4 * SIDE))
    tokens = np.array([True, True, True, False] * 4)
    for before in range(64 - len(tokens), 65, 3):
        llm.reset_prefix_cache()
        parts.clear()
        text = f"{'x' * before}{IMAGE}{before}"
        assert ask(llm, [(text, [image])])[0] == reference.greedy(text, [image], NEW)
        in_first = int(tokens[: 64 - before].sum())
        assert parts == [part for part in (in_first, 12 - in_first) if part]
    assert engines.compiled_since_start(llm) == 0


def test_an_image_is_encoded_once(llm, reference, monkeypatch):
    """Of other prompts, and twice in one; images of a step together."""
    launched, encoder = [], engines.runner_of(llm).images
    launch = encoder._launch
    monkeypatch.setattr(
        encoder, "_launch", lambda size, frames: (launched.append((size, len(frames))), launch(size, frames))
    )
    one, two = (picture.resize((3 * SIDE, 4 * SIDE)) for picture in pictures(2, seed=3))
    prompts = [(f"What is in {IMAGE}?", [one]), (f"Is {IMAGE} a dog, {IMAGE} too?", [two, one])]
    for prompt in prompts:
        assert ask(llm, [prompt])[0] == reference.greedy(*prompt, NEW)
    assert launched == [(SMALL, 1), (SMALL, 1)]
    launched.clear()
    assert len(ask(llm, [(IMAGE * 3, [picture.rotate(90, expand=True) for picture in (one, two)] + [one])])[0]) == NEW
    assert launched == [(MOST_TOKENS, 2)]


def test_tokens_of_llava_equal_transformers(tmp_path):
    """A patch is a token, and the encoder's last layer is left out."""
    folder = tiny_pixtral.save("pixtral", tmp_path)
    image_checks.check_prompts(make(folder), tiny_images.Reference(folder), IMAGE, pictures(8, seed=1))


@pytest.mark.skipif(not ALL, reason="as with other encoders")
def test_preemption_and_abort(folder, reference):
    """With pages for some of six requests."""
    llm = make(folder, max_model_len=256, num_gpu_blocks_override=18, enable_prefix_caching=False)
    prompts = [(f"{'y' * 20 * index}{IMAGE} and so on", [image]) for index, image in enumerate(pictures(6, seed=6))]
    image_checks.check_preemption_and_abort(llm, reference, prompts)


def test_sizes_of_images_are_options(folder):
    """Of the processor and of the encoder together."""
    smaller, pixels = 3 * SIDE, {"size": {"longest_edge": 3 * SIDE}}
    options = {"mm_processor_kwargs": pixels, "hf_overrides": {"vision_config": {"image_size": smaller}}}
    llm = make(folder, additional_config={"token_buckets": [8, 64]}, **options)
    assert list(engines.runner_of(llm).images._layouts) == [9]
    (image,) = (picture.resize((200, 190)) for picture in pictures(1))
    reference = tiny_images.Reference(folder)
    reference._processor.image_processor.size = pixels["size"]
    assert ask(llm, [(IMAGE, [image])])[0] == reference.greedy(IMAGE, [image], NEW)


def test_requests_that_are_refused(folder, llm):
    (image,) = pictures(1)
    given = {"prompt": IMAGE, "multi_modal_data": {"image": [image]}}
    with pytest.raises(ValueError, match="mm_processor_kwargs: expected none"):
        llm.generate([{**given, "mm_processor_kwargs": {"do_rescale": False}}], use_tqdm=False)
    assert len(ask(llm, [(IMAGE, [image])])[0]) == NEW


OF_SIZES = f"longest_edge to be the encoder's image_size, {LARGEST}, got 84; for smaller images set both"
REFUSED = [
    ({"mm_processor_kwargs": {"do_resize": False}}, "--mm-processor-kwargs: expected size alone, got do_resize"),
    ({"mm_processor_kwargs": {"size": {"longest_edge": 84}}}, OF_SIZES),
    ({"hf_overrides": {"vision_feature_layer": [-1, -2]}}, "vision_feature_layer: expected one layer, got"),
    ({"runner": "pooling"}, "--runner pooling: expected --limit-mm-per-prompt"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused(folder, options, message):
    from vllm.engine.arg_utils import EngineArgs

    with pytest.raises(Exception, match=message):
        EngineArgs(model=folder, **options).create_engine_config()


def test_memory_for_the_encoder(folder, llm):
    """Room for its largest program, and none where requests have no images."""
    from vllm.engine.arg_utils import EngineArgs

    from xla_gpu.vllm import memory

    of_patch = 3 * 14 * 14 * 4 + 3 * 32 * 4 + 3 * 48 * 4
    assert memory.image_bytes(llm.llm_engine.vllm_config) >= 4 * MOST_TOKENS * of_patch
    text = EngineArgs(model=folder, limit_mm_per_prompt={"image": 0}, dtype="float32").create_engine_config()
    assert memory.image_bytes(text) == 0


@pytest.mark.skipif(not ALL, reason="as with other encoders")
def test_over_two_devices(folder):
    """--tensor-parallel-size: each device has the whole encoder."""
    image_checks.check_two_devices("test_pixtral", folder)
