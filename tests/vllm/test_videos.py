"""Videos in Qwen 2, 2.5 and 3 VL: greedy tokens equal to transformers' in float32.

All of them with XLA_GPU_TEST_ALL_MODELS=1.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.vllm import engines, image_checks, tiny_images
from tests.vllm.image_checks import NEW

pytest.importorskip("torchvision", reason="the processors of these models")

from tests.vllm import tiny_qwen_vl
from tests.vllm.tiny_qwen_vl import IMAGE, MOST_TOKENS, VIDEO
from xla_gpu.vllm import images, mrope, request_checks

EVERY_TIME = ("qwen2_5_vl", "qwen3_vl")
NAMES = sorted(tiny_qwen_vl.CONFIGS) if os.environ.get("XLA_GPU_TEST_ALL_MODELS") else EVERY_TIME
RATE = 2.0  # frames per second

Prompt = tuple[str, list[Any], list[Any]]  # text, images, videos


def make(folder: str, **options: Any) -> Any:
    limits = {"image": 2, "video": 2}
    return image_checks.make_any_size(folder, **{"limit_mm_per_prompt": limits, **options})


def videos(*forms: tuple[int, int, int], seed: int = 0) -> list[Any]:
    """Frames, height and width of each."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, (*form, 3), dtype=np.uint8) for form in forms]


class Model:
    """A tiny one, what vLLM is given for it, and what transformers makes of the same."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = tiny_qwen_vl.save(name, folder)
        self._told = name.startswith("qwen3_vl")  # when its frames were
        self.reference = tiny_images.Reference(self.folder)

    def ask(self, llm: Any, prompts: list[Prompt], new: int = NEW) -> list[list[int]]:
        outputs = llm.generate([self.given(*prompt) for prompt in prompts], engines.greedy(new), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def given(self, text: str, shown: list[Any], played: list[Any]) -> Any:
        found = {"image": shown, "video": [(video, _times(video)) if self._told else video for video in played]}
        return {"prompt": text, "multi_modal_data": {kind: items for kind, items in found.items() if items}}

    def expected(self, text: str, shown: list[Any], played: list[Any], new: int = NEW, **options: Any) -> list[int]:
        options |= {"videos": played} if played else {}
        if played and self._told:
            times = [
                {key: value for key, value in _times(video).items() if key != "do_sample_frames"} for video in played
            ]
            options |= {"video_metadata": times, "do_sample_frames": False}
        return self.reference.greedy(text, shown, new, **options)


def _times(video: Any) -> dict[str, Any]:
    """What vLLM's loaders say of a video."""
    count = len(video)
    return {
        "fps": RATE,
        "duration": count / RATE,
        "total_num_frames": count,
        "frames_indices": list(range(count)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    return Model("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


@pytest.fixture(scope="module")
def llm(model) -> Any:
    return make(model.folder)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_transformers(name, tmp_path):
    """One, several, of an odd number of frames, beside images, in steps of up to 64 tokens; nothing is compiled."""
    model = Model(name, tmp_path)
    one, two, short = videos((8, 60, 90), (5, 100, 70), (2, 56, 56))
    (picture,) = tiny_images.pictures(1)
    prompts: list[Prompt] = [
        (f"What happens in {VIDEO} there?", [], [one]),
        (f"{'x' * 50}{VIDEO}{IMAGE} and {VIDEO}", [picture], [two, short]),
        ("no video", [], []),
        (f"{IMAGE}", [picture], []),
        (f"{VIDEO}", [], [one[::-1].copy()]),  # backwards
    ]
    expected = [model.expected(*prompt) for prompt in prompts]
    assert len({tuple(tokens) for tokens in expected}) == len(prompts)
    llm = make(model.folder)
    assert [model.ask(llm, [prompt])[0] for prompt in prompts] == expected
    llm.reset_prefix_cache()
    assert model.ask(llm, prompts) == expected
    # More than there are rows for; by vLLM's estimate of the largest one there would be room for all.
    assert engines.runner_of(llm).images.rows.shape[0] - 2 <= 512
    many: list[Prompt] = [(f"{VIDEO} {index}", [], [video]) for index, video in enumerate(videos(*[(8, 84, 112)] * 12))]
    assert model.ask(llm, many) == [model.expected(*prompt) for prompt in many]
    assert engines.compiled_since_start(llm) == 0


def test_a_video_is_encoded_once_and_makes_room_for_others(model, llm):
    """Two frames are as an image."""
    encoder, launched = engines.runner_of(llm).images, []
    launch = encoder._launch
    encoder._launch = lambda size, frames: (launched.append(len(frames)), launch(size, frames))
    played = videos(*[(8, 84, 112)] * 9, seed=2)
    prompts: list[Prompt] = [(f"{VIDEO} {index}", [], [video]) for index, video in enumerate(played)]
    expected = [model.expected(*prompt) for prompt in prompts]
    assert model.ask(llm, prompts[:1]) == model.ask(llm, prompts[:1]) == expected[:1]
    assert sum(launched) == 4
    for _ in range(2):
        llm.reset_prefix_cache()
        assert model.ask(llm, prompts) == expected
    assert sum(launched) >= 4 * len(played)
    assert engines.compiled_since_start(llm) == 0


def test_requests_that_are_refused(model, llm):
    """Of more tokens than the scheduler has room for, which would wait for ever, or the encoder in two frames."""
    room = engines.runner_of(llm).images.rows.shape[0] - 2
    (long,) = videos((2 * (room // 12) + 2, 84, 112))
    with pytest.raises(ValueError, match=f"video: expected one of at most {room} tokens in all, got|longer than"):
        model.ask(llm, [(VIDEO, [], [long])])
    (wide,) = videos((2, 15, 2900))
    with pytest.raises(ValueError, match=f"video: expected pairs of frames of at most {MOST_TOKENS} tokens, got"):
        model.ask(llm, [(VIDEO, [], [wide])])
    with pytest.raises(ValueError, match="At most 2 video"):
        model.ask(llm, [(VIDEO * 3, [], videos(*[(2, 56, 56)] * 3))])
    assert len(model.ask(llm, [(VIDEO, [], videos((2, 56, 56)))])[0]) == NEW


def test_frames_per_second(model):
    """--mm-processor-kwargs: Qwen 2.5 VL's positions of frames are farther apart."""
    prompt: Prompt = (f"{'z' * 9}{VIDEO} and so on", [], videos((8, 60, 90), seed=3))
    expected = model.expected(*prompt, fps=RATE / 2)
    assert expected != model.expected(*prompt)
    assert model.ask(make(model.folder, mm_processor_kwargs={"fps": RATE / 2}), [prompt])[0] == expected


# ---- Without an engine -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts_text", [True, False])
def test_room_is_what_the_scheduler_counts(counts_text, monkeypatch):
    """vLLM 0.12 counts the text between an item's tokens, later ones do not."""
    from vllm.v1.request import Request

    if counts_text:
        monkeypatch.delattr(Request, "get_num_encoder_embeds", raising=False)
    else:
        monkeypatch.setattr(Request, "get_num_encoder_embeds", None, raising=False)
    is_embed = torch.tensor([True, True, False] * 4)  # 8 of 12
    place = SimpleNamespace(length=len(is_embed), is_embed=is_embed)
    given = {"type": "multimodal", "mm_placeholders": {"image": [place]}, "mm_kwargs": {"image": [{}]}}
    most, refused = (12, 11) if counts_text else (8, 7)
    request_checks.check_images("", given, None, most)
    with pytest.raises(ValueError, match=f"image: expected one of at most {refused} tokens in all, got {most};"):
        request_checks.check_images("", given, None, refused)


def test_positions():
    """Times are as far apart as the model has positions for the seconds between them, rounded down."""
    numbers = np.arange(3, 9, dtype=np.int32)
    video = images.Image("", numbers, {}, grid=(3, 2, 4), seconds=2 / 24)
    found, difference = mrope.of_prompt([video], per_second=25)
    assert found.tolist() == [[0, 1, 2, 3, 3, 5, 5, 7, 7], [0, 1, 2, *[3] * 6], [0, 1, 2, *[3, 4] * 3]]
    assert difference == 8 - 9
    # At 25 frames a second, in float32 as vLLM has it: time 25 is at 2 * 2, which would be 3 in float64.
    second = float(np.float32(2 / 25))
    long = images.Image("", np.arange(26, dtype=np.int32), {}, grid=(26, 2, 2), seconds=second)
    expected = (torch.arange(26) * torch.tensor(second) * 2).long()
    assert mrope.of_prompt([long], per_second=2)[0][0].tolist() == expected.tolist()
    assert expected[-1] == 4 != int(25 * second * 2)
    # With text between them they are images.
    apart = images.Image("", np.array([3, 4, 6, 7, 9, 10], np.int32), {}, grid=(3, 2, 4))
    found, difference = mrope.of_prompt([apart])
    assert found.tolist() == [
        [0, 1, 2, 3, 3, 5, 6, 6, 8, 9, 9],
        [0, 1, 2, 3, 3, 5, 6, 6, 8, 9, 9],
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
    ]
    assert difference == 0
