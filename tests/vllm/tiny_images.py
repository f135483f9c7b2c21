"""Tiny models that read images, with their processors, and what transformers generates with them."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as t
from PIL import Image

from tests.vllm import tiny

IMAGE = "<image>"
IMAGE_TOKEN = tiny.FIRST_TOKEN
SIZE, PATCH = 56, 14
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": SIZE,
    "patch_size": PATCH,
}
_LLAMA = t.LlamaConfig(**tiny.COMMON, architectures=["LlamaForCausalLM"])

_PINPOINTS = [[SIZE, 2 * SIZE], [2 * SIZE, SIZE], [2 * SIZE, 2 * SIZE], [SIZE, 3 * SIZE]]

# A model's own template, with which the server's chat makes a prompt of messages.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<image>{% endif %}{% endfor %}{% endfor %}"
)


def _llava(tower: t.PretrainedConfig, strategy: str) -> t.LlavaConfig:
    return t.LlavaConfig(
        text_config=_LLAMA,
        vision_config=tower,
        image_token_index=IMAGE_TOKEN,
        vision_feature_select_strategy=strategy,
    )


CONFIGS = {
    "llava": lambda: _llava(t.CLIPVisionConfig(**_TOWER, projection_dim=32), "default"),
    "llava_siglip": lambda: _llava(t.SiglipVisionConfig(**_TOWER, vision_use_head=False), "full"),
    # Tiles in a grid.
    "llava_next": lambda: t.LlavaNextConfig(
        text_config=_LLAMA,
        vision_config=t.CLIPVisionConfig(**_TOWER, projection_dim=32),
        image_token_index=IMAGE_TOKEN,
        image_grid_pinpoints=_PINPOINTS,
    ),
    # Tiles one behind the other, with text between their rows.
    "aya_vision": lambda: t.AyaVisionConfig(
        text_config=t.Cohere2Config(**tiny.COMMON, sliding_window=24, architectures=["Cohere2ForCausalLM"]),
        vision_config=t.SiglipVisionConfig(**_TOWER, vision_use_head=False),
        image_token_index=IMAGE_TOKEN + 1,
        downsample_factor=2,
    ),
    # Tokens of an image attend to each other, and layers with a window are between the others.
    "gemma3": lambda: t.Gemma3Config(
        text_config={**tiny.COMMON, **tiny.GEMMA, "num_hidden_layers": 6},
        vision_config=t.SiglipVisionConfig(**{**_TOWER, "image_size": 2 * SIZE}, vision_use_head=False),
        mm_tokens_per_image=16,
        boi_token_index=IMAGE_TOKEN,
        image_token_index=IMAGE_TOKEN + 1,
        eoi_token_index=IMAGE_TOKEN + 2,
        initializer_range=0.2,
    ),
}


def _gemma_processor() -> Any:
    lines = ["\n" * count for count in (1, 2, 3, 4)]
    tokens = {"boi_token": IMAGE, "image_token": "<part>", "eoi_token": "<end>"}
    tokenizer = tiny.tokenizer(
        [*tokens.values(), *lines], extra_special_tokens=tokens, additional_special_tokens=[*lines]
    )
    size = {"height": 2 * SIZE, "width": 2 * SIZE}
    pixels = t.Gemma3ImageProcessor(size=size, image_seq_length=16)
    return t.Gemma3Processor(pixels, tokenizer, chat_template=CHAT_TEMPLATE, image_seq_length=16)


def _aya_processor() -> Any:
    tokens = [IMAGE, "<part>", "<start>", "<end>", "<whole>", "<tile>", *(f"<tile>_{index}" for index in range(1, 5))]
    tokenizer = tiny.tokenizer(
        tokens,
        model_input_names=["input_ids", "attention_mask"],
        additional_special_tokens=tokens,
        pad_token="<unk>",
    )
    pixels = t.GotOcr2ImageProcessor(
        size={"height": SIZE, "width": SIZE}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    return t.AyaVisionProcessor(
        pixels,
        tokenizer,
        patch_size=PATCH,
        img_size=SIZE,
        downsample_factor=2,
        start_of_img_token="<start>",
        end_of_img_token="<end>",
        img_patch_token="<part>",
        tile_token="<tile>",
        tile_global_token="<whole>",
        chat_template=CHAT_TEMPLATE,
    )


def _processor(name: str, config: Any) -> Any:
    if name == "gemma3":
        return _gemma_processor()
    if name == "aya_vision":
        return _aya_processor()
    names = {"model_input_names": ["input_ids", "attention_mask"]}
    tokenizer = tiny.tokenizer([IMAGE], **names, extra_special_tokens={"image_token": IMAGE})
    size = {"height": SIZE, "width": SIZE}
    if name == "llava_siglip":
        pixels = t.SiglipImageProcessor(size=size)
    elif name == "llava_next":
        pixels = t.LlavaNextImageProcessor(
            size={"shortest_edge": SIZE}, crop_size=size, image_grid_pinpoints=_PINPOINTS
        )
    else:
        pixels = t.CLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size=size)
    kind = t.LlavaNextProcessor if name == "llava_next" else t.LlavaProcessor
    return kind(
        pixels,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        image_token=IMAGE,
        num_additional_image_tokens=int(name != "llava_siglip"),
        chat_template=CHAT_TEMPLATE,
    )


def save(name: str, folder: Path) -> str:
    """Writes a model and its processor."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    model = t.AutoModelForImageTextToText.from_config(config).float().eval()
    for tensor_name, tensor in model.named_parameters():
        # Otherwise all images were nearly the same to the model.
        if "language_model" not in tensor_name and "lm_head" not in tensor_name and tensor.dim() > 1:
            tensor.data.normal_(std=0.3)
        if tensor_name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")) and (
            name == "gemma3"
        ):
            tensor.data.fill_(2.0)  # otherwise a token's own embedding would decide over the next one
    model.save_pretrained(folder)
    _processor(name, config).save_pretrained(folder)
    return str(folder)


def pictures(count: int, seed: int = 0) -> list[Image.Image]:
    """Different pictures, of different sizes."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(30, 90, (count, 2)).tolist()
    return [Image.fromarray(generator.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]


def data_url(picture: Image.Image) -> str:
    """A picture as an address that holds it."""
    written = io.BytesIO()
    picture.save(written, "PNG")
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


class Reference:
    """transformers' model of a folder, in float32."""

    def __init__(self, folder: str) -> None:
        self._processor = t.AutoProcessor.from_pretrained(folder)
        self._model = t.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None

    @torch.no_grad()
    def greedy(self, text: str, images: list[Image.Image], new: int, **others: Any) -> list[int]:
        """Tokens after a prompt in which IMAGE stands for each of ``images``; others: of the processor."""
        given = self._processor(text=text, images=images or None, return_tensors="pt", **others)
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        return self._model.generate(**given, **options)[0, given["input_ids"].shape[1] :].tolist()
