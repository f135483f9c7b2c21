"""Tiny Qwen 2, 2.5 and 3 VL models, with experts too, with their processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as t

from tests.vllm import tiny

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_TOKENS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
PATCH, MERGED = 14, 2
MOST_TOKENS = 40  # of an image
MOST_OF_FRAMES = 12  # tokens of two frames of a video
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
_PIXELS = {"min_pixels": 4 * (PATCH * MERGED) ** 2, "max_pixels": MOST_TOKENS * (PATCH * MERGED) ** 2}
_TEXT = {**tiny.COMMON, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
TOKEN_IDS = {
    "vision_start_token_id": tiny.FIRST_TOKEN,
    "image_token_id": tiny.FIRST_TOKEN + 1,
    "vision_end_token_id": tiny.FIRST_TOKEN + 2,
    "video_token_id": tiny.FIRST_TOKEN + 3,
}

CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'video' %}" + VIDEO + "{% else %}"
    "" + IMAGE + "{% endif %}{% endfor %}{% endfor %}"
)

_QWEN3_TEXT = {
    **tiny.COMMON,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
}

_VISION = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}

_QWEN3_VISION = {**_VISION, "patch_size": 14, "num_position_embeddings": 49, "deepstack_visual_indexes": [0, 1]}

CONFIGS = {
    # Windows of 2 by 2 tokens in two of three layers.
    "qwen2_5_vl": lambda: t.Qwen2_5_VLConfig(
        text_config=_TEXT,
        vision_config={
            **_VISION,
            "window_size": 2 * MERGED * PATCH,
            "fullatt_block_indexes": [1],
        },
        **TOKEN_IDS,
    ),
    # Learned positions, results of two of the encoder's layers for two of the model's, axes in turn.
    "qwen3_vl": lambda: t.Qwen3VLConfig(text_config=_QWEN3_TEXT, vision_config=_QWEN3_VISION, **TOKEN_IDS),
    "qwen3_vl_moe": lambda: t.Qwen3VLMoeConfig(
        text_config={**_QWEN3_TEXT, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
        vision_config=_QWEN3_VISION,
        **TOKEN_IDS,
    ),
    "qwen2_vl": lambda: t.Qwen2VLConfig(
        text_config=_TEXT,
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
        **TOKEN_IDS,
    ),
}


def save(name: str, folder: Path) -> str:
    """Writes a model and its processor."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    model = t.AutoModelForImageTextToText.from_config(config).float().eval()
    for tensor_name, tensor in model.named_parameters():
        # Otherwise all images were nearly the same to the model.
        if "visual" in tensor_name and tensor.dim() > 1:
            tensor.data.normal_(std=0.3 if "patch_embed" not in tensor_name else 0.05)
    model.save_pretrained(folder)
    bytes_and_tokens = tiny.tokenizer(_TOKENS).backend_tokenizer
    names = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<unk>"}
    tokenizer = t.Qwen2TokenizerFast(tokenizer_object=bytes_and_tokens, additional_special_tokens=_TOKENS, **names)
    kinds: dict[str, Any] = {
        "qwen2_vl": (t.Qwen2VLProcessor, t.Qwen2VLVideoProcessor),
        "qwen2_5_vl": (t.Qwen2_5_VLProcessor, t.Qwen2VLVideoProcessor),
        "qwen3_vl": (t.Qwen3VLProcessor, t.Qwen3VLVideoProcessor),
        "qwen3_vl_moe": (t.Qwen3VLProcessor, t.Qwen3VLVideoProcessor),
    }
    kind, of_videos = kinds[name]
    pixels: dict[str, Any] = dict(_PIXELS)
    if name.startswith("qwen3_vl"):  # as in the files of real checkpoints
        pixels = {"size": {"shortest_edge": pixels["min_pixels"], "longest_edge": pixels["max_pixels"]}}
    # Qwen 3 VL's sizes are for all frames of a video, of which these tests have eight at most.
    most = MOST_OF_FRAMES * (8 if name.startswith("qwen3_vl") else 1)
    sizes = {"shortest_edge": _PIXELS["min_pixels"], "longest_edge": most * (PATCH * MERGED) ** 2}
    parts = t.Qwen2VLImageProcessorFast(**pixels), tokenizer, of_videos(patch_size=PATCH, size=sizes)
    kind(*parts, chat_template=CHAT_TEMPLATE).save_pretrained(folder)
    return str(folder)
