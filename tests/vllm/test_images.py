"""Prompts with images: greedy tokens equal to transformers' in float32, and what vLLM's scheduler does with images."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.vllm import engines, image_checks, tiny_images
from tests.vllm.image_checks import NEW, ask, make
from tests.vllm.tiny_images import IMAGE, pictures
from xla_gpu.vllm import images, versions

NAMES = sorted(tiny_images.CONFIGS) if os.environ.get("XLA_GPU_TEST_ALL_MODELS") else ("llava",)
# Of these models' images.
TOKENS = (tiny_images.SIZE // tiny_images.PATCH) ** 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return tiny_images.save("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def reference(folder) -> tiny_images.Reference:
    return tiny_images.Reference(folder)


@pytest.fixture(scope="module")
def llm(folder) -> Any:
    return make(folder)


@pytest.fixture
def encoded(llm, monkeypatch) -> list[int]:
    """Tiles of each launch of the encoder."""
    return count_tiles(llm, monkeypatch)


def count_tiles(llm: Any, monkeypatch) -> list[int]:
    found: list[int] = []
    encoder = engines.runner_of(llm).images
    launch = encoder._launch
    monkeypatch.setattr(encoder, "_launch", lambda pixels, places: (found.append(len(pixels)), launch(pixels, places)))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_transformers(name, tmp_path):
    """Read in steps of up to 64 tokens."""
    folder = tiny_images.save(name, tmp_path)
    image_checks.check_prompts(make(folder), tiny_images.Reference(folder), IMAGE, pictures(8, seed=1))


def test_an_image_may_be_split_over_steps(llm, reference, monkeypatch):
    """Where a step ends in an image the next one goes on in it, at each of its rows."""
    parts = image_checks.note_parts(llm, monkeypatch)
    (image,) = pictures(1, seed=2)
    for before in range(64 - TOKENS, 65):
        llm.reset_prefix_cache()
        parts.clear()
        text = f"{'x' * before}{IMAGE}{before}"
        assert ask(llm, [(text, [image])])[0] == reference.greedy(text, [image], NEW)
        in_first = 64 - before
        assert parts == [part for part in (in_first, TOKENS - in_first) if part]
    assert engines.compiled_since_start(llm) == 0


def test_images_whose_tokens_see_each_other_are_read_whole(tmp_path, monkeypatch):
    """Gemma 3's: each image in one step, or what the prefix cache has not of it, whatever else is in the steps."""
    monkeypatch.setattr(images, "MOST_QUERIES", 24)  # of 64, so that the encoder's attention is in parts
    folder = tiny_images.save("gemma3", tmp_path)
    reference, llm = tiny_images.Reference(folder), make(folder)
    encoder, ends = engines.runner_of(llm).images, []
    of_step = encoder.of_step

    def noted(batch, counts, requests):
        for slot, count, request in zip(batch.slots, counts.tolist(), batch.requests, strict=True):
            begin = int(requests.num_computed[slot])
            for image in request.images:
                read = (image.positions >= begin) & (image.positions < begin + count)
                if read.any():
                    ends.append((int(read.sum()), bool(read[-1])))
        return of_step(batch, counts, requests)

    monkeypatch.setattr(encoder, "of_step", noted)
    one, two = pictures(2, seed=8)
    prompts = [(f"{'x' * before}{IMAGE}{before}", [one]) for before in range(30, 62, 3)]
    expected = [reference.greedy(*prompt, NEW) for prompt in prompts]
    assert ask(llm, prompts) == expected
    assert all(last for _, last in ends) and {count for count, _ in ends} == {16}
    # Pages of 16 tokens: of a prompt with the same beginning a part of the image's tokens is in the cache.
    ends.clear()
    again = [(f"{text} again", images) for text, images in prompts]
    assert ask(llm, again) == [reference.greedy(*prompt, NEW) for prompt in again]
    assert all(last for _, last in ends) and {count for count, _ in ends} - {16}
    # What an image's tokens see of it depends on all of it.
    assert ask(llm, [(prompts[0][0], [two])])[0] == reference.greedy(prompts[0][0], [two], NEW) != expected[0]
    assert engines.compiled_since_start(llm) == 0


def test_an_image_is_encoded_once(llm, reference, encoded):
    """Of other prompts, twice in one, and where the prefix cache has all of it."""
    one, two = pictures(2, seed=3)
    first = (f"What is {IMAGE}?", [one])
    expected = reference.greedy(*first, NEW)
    assert ask(llm, [first])[0] == expected
    assert encoded == [1]
    given = {"prompt": first[0], "multi_modal_data": {"image": first[1]}}
    (again,) = llm.generate([given], engines.greedy(NEW), use_tqdm=False)
    assert again.num_cached_tokens == 16 and list(again.outputs[0].token_ids) == expected
    others = [(f"Is {IMAGE} a dog, {IMAGE} too?", [one, one]), (f"And {IMAGE} then {IMAGE}", [two, one])]
    assert ask(llm, others) == [reference.greedy(*other, NEW) for other in others]
    assert encoded == [1, 1]
    # The same text with another image shares no page with it.
    assert ask(llm, [(first[0], [two])])[0] == reference.greedy(first[0], [two], NEW) != expected


def test_images_of_a_step_are_encoded_together(folder, reference, monkeypatch):
    llm = make(folder, max_num_batched_tokens=256, additional_config={"token_buckets": [8, 256]})
    encoded = count_tiles(llm, monkeypatch)
    prompts = [(f"{index}{IMAGE}", [image]) for index, image in enumerate(pictures(6, seed=4))]
    assert ask(llm, prompts) == [reference.greedy(*prompt, NEW) for prompt in prompts]
    assert sorted(encoded) == [1, 1, 4]
    assert engines.compiled_since_start(llm) == 0


def test_images_make_room_for_others(llm, reference, encoded):
    """The encoder's rows are for four images here: of more the oldest ones go, and come back."""
    encoder = engines.runner_of(llm).images
    assert encoder.rows.shape[0] - 2 == 4 * TOKENS
    prompts = [(f"{IMAGE} {index}", [image]) for index, image in enumerate(pictures(9, seed=5))]
    for _ in range(2):
        llm.reset_prefix_cache()
        assert ask(llm, prompts) == [reference.greedy(*prompt, NEW) for prompt in prompts]
    assert sum(encoded) >= 9 + 5
    kept = sum(len(rows) for rows in encoder._rows_of.values())
    assert encoder._num_free + kept == 4 * TOKENS


@pytest.mark.skipif(versions.vllm_version() < "0.16", reason="of vLLM 0.16")
def test_images_are_forgotten_with_the_schedulers_cache(llm, reference, encoded):
    encoder = engines.runner_of(llm).images
    prompts = [(f"{IMAGE} {index}", [image]) for index, image in enumerate(pictures(4, seed=8))]
    expected = [reference.greedy(*prompt, NEW) for prompt in prompts]
    for _ in range(3):
        llm.llm_engine.engine_core.engine_core.reset_encoder_cache()
        llm.reset_prefix_cache()
        assert encoder._num_free == 4 * TOKENS
        assert ask(llm, prompts) == expected
    assert sum(encoded) == 3 * 4


def test_preemption_and_abort(folder, reference):
    """With pages for two of six requests."""
    llm = make(folder, max_model_len=256, num_gpu_blocks_override=18, enable_prefix_caching=False)
    prompts = [(f"{'y' * 20 * index}{IMAGE} and so on", [image]) for index, image in enumerate(pictures(6, seed=6))]
    image_checks.check_preemption_and_abort(llm, reference, prompts)


def test_sampling_and_drafts(folder, reference):
    """Prompt log-probabilities, penalties and drafts beside images."""
    llm = make(folder, speculative_config=image_checks.DRAFTS)
    prompts = [(f"ab ab ab {IMAGE} ab ab", [image]) for image in pictures(3, seed=7)]
    assert ask(llm, prompts) == [reference.greedy(*prompt, NEW) for prompt in prompts]
    given = {"prompt": prompts[0][0], "multi_modal_data": {"image": prompts[0][1]}}
    output = llm.generate([given], engines.greedy(4, prompt_logprobs=0, repetition_penalty=1.3), use_tqdm=False)[0]
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids) == len(prompts[0][0]) - len(IMAGE) + TOKENS
    assert engines.compiled_since_start(llm) == 0


def test_requests_that_change_the_processor_are_refused(llm):
    (image,) = pictures(1)
    given = {"prompt": IMAGE, "multi_modal_data": {"image": [image]}}
    with pytest.raises(ValueError, match="mm_processor_kwargs: expected none"):
        llm.generate([{**given, "mm_processor_kwargs": {"do_rescale": True}}], use_tqdm=False)
    assert len(ask(llm, [(IMAGE, [image])])[0]) == NEW


REFUSED = [
    ({"enable_mm_embeds": True}, "--enable-mm-embeds: not supported"),
    ({"runner": "pooling"}, "--runner pooling: expected --limit-mm-per-prompt"),
    ({"mm_processor_kwargs": {"crop_size": 28}}, "--mm-processor-kwargs: not supported"),
]
if versions.vllm_version() >= "0.15":
    REFUSED.append(({"mm_encoder_only": True}, "--mm-encoder-only: not supported"))


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused(folder, options, message):
    from vllm.engine.arg_utils import EngineArgs

    with pytest.raises(Exception, match=message):
        EngineArgs(model=folder, **options).create_engine_config()


def test_adapters_for_a_model_that_has_none_are_refused(tmp_path):
    """LLaVA has them in vLLM 0.14, LLaVA-NeXT in none."""
    from vllm.engine.arg_utils import EngineArgs

    folder = tiny_images.save("llava_next", tmp_path)
    with pytest.raises(Exception, match="--enable-lora: expected a model that vLLM has LoRA for, got LlavaNext"):
        EngineArgs(model=folder, enable_lora=True).create_engine_config()


@pytest.mark.parametrize("name", NAMES)
def test_over_two_devices(name, tmp_path):
    """--tensor-parallel-size: each device has the whole encoder."""
    image_checks.check_two_devices("test_images", tiny_images.save(name, tmp_path))


def test_pan_and_scan_is_refused(tmp_path):
    import json

    from vllm.engine.arg_utils import EngineArgs

    folder = tiny_images.save("gemma3", tmp_path)
    settings = tmp_path / "preprocessor_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "do_pan_and_scan": True}))
    with pytest.raises(Exception, match="do_pan_and_scan: expected false"):
        EngineArgs(model=folder).create_engine_config()


def test_memory_for_the_encoder(folder, llm):
    """Room for its largest batch, and none where requests have no images."""
    from vllm.engine.arg_utils import EngineArgs

    from xla_gpu.vllm import memory

    config = llm.llm_engine.vllm_config
    encoder, vision = engines.runner_of(llm).images, config.model_config.hf_config.vision_config
    tiles, rows = max(encoder._programs), TOKENS + 1
    assert memory.image_bytes(config) >= tiles * 4 * rows * (vision.num_attention_heads * rows + vision.hidden_size)
    text = EngineArgs(model=folder, limit_mm_per_prompt={"image": 0}, dtype="float32").create_engine_config()
    assert memory.image_bytes(text) == 0
