"""Qwen 2, 2.5 and 3 VL: images of any size, M-RoPE positions; greedy tokens equal to transformers' in float32.

All of them with XLA_GPU_TEST_ALL_MODELS=1.
"""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.vllm import engines, image_checks, tiny_images
from tests.vllm.image_checks import NEW, SMALL, ask, check

pytest.importorskip("torchvision", reason="the processors of these models")

from tests.vllm import tiny_qwen_vl
from tests.vllm.tiny_qwen_vl import IMAGE, MOST_TOKENS
from xla_gpu.vllm import images, mrope, patches

EVERY_TIME = ("qwen2_5_vl", "qwen3_vl")
NAMES = sorted(tiny_qwen_vl.CONFIGS) if os.environ.get("XLA_GPU_TEST_ALL_MODELS") else EVERY_TIME
# What image_checks.main takes of this module, too.
make = image_checks.make_any_size
pictures = functools.partial(image_checks.pictures_of_any_size, least=20)  # from the fewest tokens to the most


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return tiny_qwen_vl.save("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


@pytest.fixture(scope="module")
def reference(folder) -> tiny_images.Reference:
    return tiny_images.Reference(folder)


@pytest.fixture(scope="module")
def llm(folder) -> Any:
    return make(folder)


@pytest.fixture
def launched(llm, monkeypatch) -> list[tuple[int, int]]:
    """Of each launch of the encoder its size and how many images it had."""
    return count_launches(llm, monkeypatch)


def count_launches(llm: Any, monkeypatch) -> list[tuple[int, int]]:
    noted: list[tuple[int, int]] = []
    encoder = engines.runner_of(llm).images
    launch = encoder._launch
    monkeypatch.setattr(
        encoder, "_launch", lambda size, *given: (noted.append((size, len(given[0]))), launch(size, *given))
    )
    return noted


@pytest.mark.parametrize("name", sorted({*NAMES, "qwen3_vl_moe"}))
def test_tokens_equal_transformers(name, tmp_path):
    """Read in steps of up to 64 tokens."""
    folder = tiny_qwen_vl.save(name, tmp_path)
    image_checks.check_prompts(make(folder), tiny_images.Reference(folder), IMAGE, pictures(8, seed=1))


def test_an_image_may_be_split_over_steps(llm, reference, monkeypatch):
    """Where a step ends in an image the next one goes on in it, with its lines' and columns' positions."""
    parts = image_checks.note_parts(llm, monkeypatch)
    image = pictures(1)[0].resize((130, 120))
    tokens = 20  # 5 columns in 4 lines
    for before in range(64 - tokens - 2, 64, 3):
        llm.reset_prefix_cache()
        parts.clear()
        text = f"{'x' * before}{IMAGE}{before}"
        assert ask(llm, [(text, [image])])[0] == reference.greedy(text, [image], NEW)
        in_first = 64 - before - 1
        assert parts == [part for part in (min(in_first, tokens), tokens - in_first) if part > 0]
    assert engines.compiled_since_start(llm) == 0


def test_an_image_is_encoded_once(llm, reference, launched):
    """Of other prompts, twice in one, and where the prefix cache has the begin of it."""
    one, two = (picture.resize((130, 120)) for picture in pictures(2, seed=3))
    first = (f"What is in {IMAGE}?", [one])
    expected = reference.greedy(*first, NEW)
    assert ask(llm, [first])[0] == expected
    assert launched == [(MOST_TOKENS, 1)]
    given = {"prompt": first[0], "multi_modal_data": {"image": first[1]}}
    (again,) = llm.generate([given], engines.greedy(NEW), use_tqdm=False)
    assert again.num_cached_tokens == 32 and list(again.outputs[0].token_ids) == expected
    others = [(f"Is {IMAGE} a dog, {IMAGE} too?", [one, one]), (f"And {IMAGE} then {IMAGE}", [two, one])]
    assert ask(llm, others) == [reference.greedy(*other, NEW) for other in others]
    assert launched == [(MOST_TOKENS, 1)] * 2
    # The same text with another image shares no page with it.
    assert ask(llm, [(first[0], [two])])[0] == reference.greedy(first[0], [two], NEW) != expected


def test_images_of_a_step_are_encoded_together(folder, reference, monkeypatch):
    """As many as the largest program takes, in the smallest that holds them."""
    sizes = {"token_buckets": [8, 256], "encoder_buckets": [SMALL]}
    llm = make(folder, max_num_batched_tokens=256, additional_config=sizes)
    launched = count_launches(llm, monkeypatch)
    tall, small = pictures(1)[0].resize((60, 280)), pictures(1, seed=1)[0].resize((56, 56))  # 20 tokens, and 4
    prompts = [(f"{IMAGE}{IMAGE}{IMAGE}", [tall, small, tall.rotate(180)]), (f"{IMAGE} only", [small.rotate(180)])]
    assert ask(llm, prompts) == [reference.greedy(*prompt, NEW) for prompt in prompts]
    assert launched == [(MOST_TOKENS, 2), (MOST_TOKENS, 2)]
    launched.clear()
    llm.reset_prefix_cache()
    nine = [(f"{index}{IMAGE}", [small.rotate(index)]) for index in range(9, 18)]
    assert ask(llm, nine) == [reference.greedy(*prompt, NEW) for prompt in nine]
    assert sum(count for _, count in launched) == 9 and max(count for _, count in launched) == patches.MOST_FRAMES
    assert engines.compiled_since_start(llm) == 0


def test_preemption_and_abort(folder, reference):
    """With pages for some of six requests."""
    llm = make(folder, max_model_len=256, num_gpu_blocks_override=18, enable_prefix_caching=False)
    prompts = [(f"{'y' * 20 * index}{IMAGE} and so on", [image]) for index, image in enumerate(pictures(6, seed=6))]
    image_checks.check_preemption_and_abort(llm, reference, prompts)


def test_sampling_and_drafts(folder, reference):
    """Drafts behind images, whose positions are less than their numbers; prompt log-probabilities."""
    llm = make(folder, speculative_config=image_checks.DRAFTS)
    prompts = [(f"ab ab ab {IMAGE} ab ab", [image]) for image in pictures(3, seed=7)]
    assert ask(llm, prompts, engines.greedy(40)) == [reference.greedy(*prompt, 40) for prompt in prompts]
    assert engines.metric(llm, "vllm:spec_decode_num_draft_tokens") > 0
    given = {"prompt": prompts[0][0], "multi_modal_data": {"image": prompts[0][1]}}
    output = llm.generate([given], engines.greedy(4, prompt_logprobs=0, repetition_penalty=1.3), use_tqdm=False)[0]
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert engines.compiled_since_start(llm) == 0


@pytest.mark.parametrize("name", EVERY_TIME)
def test_sizes_of_images_are_an_option(name, tmp_path):
    """--mm-processor-kwargs: smaller images, and smaller programs."""
    folder, most = tiny_qwen_vl.save(name, tmp_path), 9
    pixels = {"max_pixels": most * 28 * 28}
    if name == "qwen3_vl":
        with pytest.raises(Exception, match="expected both of min_pixels and max_pixels"):
            make(folder, mm_processor_kwargs=pixels)
        pixels["min_pixels"] = 4 * 28 * 28
    llm = make(folder, mm_processor_kwargs=pixels, additional_config={"token_buckets": [8, 64]})
    assert list(engines.runner_of(llm).images._layouts) == [most]
    (image,) = (picture.resize((200, 190)) for picture in pictures(1))
    reference = tiny_images.Reference(folder)
    reference._processor.image_processor.max_pixels = most * 28 * 28
    reference._processor.image_processor.size = {"shortest_edge": 4 * 28 * 28, "longest_edge": most * 28 * 28}
    expected = reference.greedy(IMAGE, [image], NEW)
    assert ask(llm, [(IMAGE, [image])])[0] == expected


@pytest.mark.parametrize("name", NAMES)
def test_text_alone(name, tmp_path):
    """Without images there is no encoder."""
    folder = tiny_qwen_vl.save(name, tmp_path)
    llm = make(folder, limit_mm_per_prompt={"image": 0})
    assert engines.runner_of(llm).images is None
    prompts = [("Only text, of which there is enough for two steps. " * 2, []), ("And some more.", [])]
    check(llm, tiny_images.Reference(folder), prompts)


def test_requests_that_are_refused(llm, reference):
    (image,) = pictures(1)
    given = {"prompt": IMAGE, "multi_modal_data": {"image": [image]}}
    with pytest.raises(ValueError, match="mm_processor_kwargs: expected none"):
        llm.generate([{**given, "mm_processor_kwargs": {"max_pixels": 10000}}], use_tqdm=False)
    # One so long that its few lines have more than max_pixels.
    with pytest.raises(ValueError, match=f"image: expected one of at most {MOST_TOKENS} tokens, got 63"):
        llm.generate([{**given, "multi_modal_data": {"image": [image.resize((2000, 20))]}}], use_tqdm=False)
    video = {"prompt": "<|vision_start|><|video_pad|>", "multi_modal_data": {"video": [np.zeros((4, 56, 56, 3))]}}
    with pytest.raises(ValueError, match="At most 0 video"):
        llm.generate([video], use_tqdm=False)
    # What looks like an image and is none.
    for text in ("<|vision_start|>", "a<|vision_start|><|vision_end|>b"):
        assert ask(llm, [(text, [])])[0] == reference.greedy(text, [], NEW)


def test_limits_are_those_of_the_engine_that_is_asked(llm, folder):
    """Another one in the process takes smaller images."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm import SamplingParams

    smaller = {"mm_processor_kwargs": {"min_pixels": 56 * 56, "max_pixels": 56 * 56}}
    config = EngineArgs(model=folder, limit_mm_per_prompt={"image": 1}, **smaller).create_engine_config()
    other = InputProcessor(config, llm.get_tokenizer())
    long = {"prompt": IMAGE, "multi_modal_data": {"image": [pictures(1)[0].resize((2000, 20))]}}
    with pytest.raises(ValueError, match="image: expected one of at most 4 tokens, got"):
        other.process_inputs("0", long, SamplingParams())
    with pytest.raises(ValueError, match=f"image: expected one of at most {MOST_TOKENS} tokens, got"):
        llm.generate([long], use_tqdm=False)


REFUSED = [
    ({"enable_mm_embeds": True}, "--enable-mm-embeds: not supported"),
    ({"runner": "pooling"}, "--runner pooling: expected --limit-mm-per-prompt"),
    ({"mm_processor_kwargs": {"fps": 2}}, "--mm-processor-kwargs: expected min_pixels and max_pixels alone, got fps"),
    (
        {"limit_mm_per_prompt": {"video": 1}, "scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
        "--scheduler-cls: expected none with videos of Qwen2_5_VLForConditionalGeneration, got vllm",
    ),
    ({"video_pruning_rate": 0.5}, "--video-pruning-rate: not supported"),
    ({"additional_config": {"encoder_buckets": [0]}}, "encoder_buckets: expected a list of positive integers"),
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

    config = llm.llm_engine.vllm_config
    layout = max(engines.runner_of(llm).images._layouts.values(), key=lambda layout: layout.num_patches)
    assert layout.num_patches == 4 * MOST_TOKENS
    assert memory.image_bytes(config) >= layout.num_patches * (3 * 2 * 14 * 14 * 4 + 3 * 32 * 4 + 2 * 48 * 4)
    text = EngineArgs(model=folder, limit_mm_per_prompt={"image": 0}, dtype="float32").create_engine_config()
    assert memory.image_bytes(text) == 0


# ---- Without an engine -----------------------------------------------------------------------------------------------


def grids(count: int) -> list[tuple[int, int, int]]:
    """Of patches."""
    generator = np.random.default_rng(0)
    return [(1, *(2 * size for size in sizes)) for sizes in generator.integers(1, 12, (count, 2)).tolist()]


def test_positions_are_transformers(reference):
    """Of prompts with up to three images, and of what is generated behind."""
    start, pad, end = (tiny_qwen_vl.TOKEN_IDS[f"{name}_token_id"] for name in ("vision_start", "image", "vision_end"))
    generator = np.random.default_rng(1)
    for count in (0, 1, 1, 2, 3, 3):
        shown, found, tokens = grids(20)[:count], [], [3, 4]
        generator.shuffle(shown)
        for grid in shown:
            size = grid[1] * grid[2] // 4
            found.append(images.Image("", np.arange(len(tokens) + 1, len(tokens) + 1 + size, dtype=np.int32), {}, grid))
            tokens += [start, *[pad] * size, end, *[5] * int(generator.integers(0, 4))]
        ids, of_images = torch.tensor([tokens]), torch.tensor(shown).reshape(-1, 3)
        expected, delta = reference._model.model.get_rope_index(ids, of_images if count else None)
        rotary = mrope.RotaryPositions(2)
        rotary.admit(1, found)
        slots, all_of = np.array([0, 1], np.int32), len(tokens) + 4
        for begin in (0, 2, len(tokens) // 2, len(tokens) - 1):
            counts = np.array([2, all_of - begin], np.int32)
            rows = rotary.of_rows(slots, np.array([7, begin], np.int32), counts)
            behind = torch.arange(len(tokens), all_of) + delta[0]
            every = torch.cat([expected[:, 0], behind.expand(3, -1)], 1)
            assert rows[:, :2].tolist() == [[7, 8]] * 3 and rows[:, 2:].tolist() == every[:, begin:].tolist()
            assert rotary.of_next(slots, np.array([7, begin], np.int32)).tolist() == [7, int(every[0, begin])]
        assert rotary.of_next(slots, np.array([0, all_of], np.int32)).tolist() == [0, all_of + int(delta[0])]


def test_windows_are_vllms():
    """The order of tokens, the ends of windows, and how many there may be."""
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VisionTransformer

    form = patches.PatchForm(merged=4, values=3 * 2 * 14 * 14, pixels=28 * 28, window=4)
    sizes = {"window_size": 112, "spatial_merge_size": 2, "patch_size": 14, "spatial_merge_unit": 4}
    for grid in grids(60):
        order, ends = patches.window_order((1, grid[1] // 2, grid[2] // 2), form.window)
        theirs, their_ends = Qwen2_5_VisionTransformer.get_window_index_thw(SimpleNamespace(**sizes), *grid)
        assert order.tolist() == theirs.tolist() and (4 * ends).tolist() == their_ends.tolist()
        layout = patches.PatchLayout(len(order), form)
        # The other images of a launch may be of one token each.
        assert (
            len(ends) + patches.MOST_FRAMES - 1
            <= patches.PatchLayout(len(order) + patches.MOST_FRAMES - 1, form).max_windows
        )
        assert len(ends) <= layout.max_windows


def test_sizes_of_the_encoders_programs(folder):
    """Powers of two from 256 tokens on up to the largest image, which max_pixels and lengths limit."""
    from vllm.engine.arg_utils import EngineArgs

    def sizes(tokens: int, rows: int, **options: Any) -> list[int]:
        pixels = {"max_pixels": tokens * 28 * 28}
        config = EngineArgs(model=folder, mm_processor_kwargs=pixels, dtype="float32", **options).create_engine_config()
        return patches.token_buckets(config, rows)

    assert sizes(40, 8192) == [40]
    assert sizes(1280, 8192, max_model_len=512) == [256, 512]
    assert sizes(1280, 8192, max_model_len=500) == [256, 500]
    assert sizes(400, 300) == [256, 300]
    assert sizes(500, 8192, additional_config={"encoder_buckets": [100, 700]}) == [100, 500]


def test_launches_of_the_encoder():
    def of_tokens(*sizes: int) -> list[patches.Frame]:
        return [patches.Frame(None, 2, 2 * size, np.arange(size, dtype=np.int32)) for size in sizes]

    def together(*sizes: int) -> list[list[int]]:
        return [[len(frame.rows) for frame in launch] for launch in patches.launches(of_tokens(*sizes), 100)]

    assert together() == []
    assert together(60, 40, 1, 99, 100) == [[60, 40], [1, 99], [100]]
    assert [len(launch) for launch in together(*[1] * 20)] == [8, 8, 4]
    with pytest.raises(RuntimeError, match="an image of 101 tokens: expected at most 100"):
        together(101)


@pytest.mark.parametrize("name", NAMES)
def test_over_two_devices(name, tmp_path):
    """--tensor-parallel-size: each device has the whole encoder."""
    image_checks.check_two_devices("test_qwen_vl", tiny_qwen_vl.save(name, tmp_path))
