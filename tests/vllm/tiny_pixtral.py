"""Tiny models with Pixtral's encoder, Mistral 3 and LLaVA, with their processors."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers as t

from tests.vllm import tiny

IMAGE = "[IMG]"
_TOKENS = [IMAGE, "[IMG_BREAK]", "[IMG_END]"]
_MERGED = {"mistral3": 2, "pixtral": 1}  # patches on each side of a token
SIDE, LARGEST = 28, 168  # pixels of a token and of an image, on each side
MOST_TOKENS = (LARGEST // SIDE) ** 2

CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}" + IMAGE + "{% endif %}{% endfor %}{% endfor %}"
)


def _tower(name: str) -> t.PixtralVisionConfig:
    return t.PixtralVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=LARGEST,
        patch_size=SIDE // _MERGED[name],
        hidden_act="silu",
    )


def _text(**options: float) -> t.MistralConfig:
    return t.MistralConfig(
        **tiny.COMMON, **options, sliding_window=None, head_dim=16, architectures=["MistralForCausalLM"]
    )


CONFIGS = {
    # Four patches make a token.
    "mistral3": lambda: t.Mistral3Config(
        text_config=_text(rms_norm_eps=0.5),  # that of the norm behind the encoder, too
        vision_config=_tower("mistral3"),
        image_token_index=tiny.FIRST_TOKEN,
        spatial_merge_size=_MERGED["mistral3"],
    ),
    # The result of its second layer.
    "pixtral": lambda: t.LlavaConfig(
        text_config=_text(),
        vision_config=_tower("pixtral"),
        image_token_index=tiny.FIRST_TOKEN,
        vision_feature_select_strategy="full",
        vision_feature_layer=-2,
    ),
}


def save(name: str, folder: Path) -> str:
    """Writes a model and its processor."""
    torch.manual_seed(0)
    model = t.AutoModelForImageTextToText.from_config(CONFIGS[name]()).float().eval()
    for tensor_name, tensor in model.named_parameters():
        # Otherwise all images were nearly the same to the model.
        if "language_model" not in tensor_name and "lm_head" not in tensor_name and tensor.dim() > 1:
            tensor.data.normal_(std=0.3)
    model.save_pretrained(folder)
    side = SIDE // _MERGED[name]
    tokenizer = tiny.tokenizer(
        _TOKENS, model_input_names=["input_ids", "attention_mask"], additional_special_tokens=_TOKENS
    )
    pixels = t.PixtralImageProcessorFast(size={"longest_edge": LARGEST}, patch_size={"height": side, "width": side})
    options = {"patch_size": side, "spatial_merge_size": _MERGED[name]}
    t.PixtralProcessor(pixels, tokenizer, chat_template=CHAT_TEMPLATE, **options).save_pretrained(folder)
    return str(folder)
