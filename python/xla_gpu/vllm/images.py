"""Images of prompts: which models take them, and which rows of the encoder's results stand where in a prompt.

An image is one or several tiles of one size. The encoder makes a fixed number of rows of each tile, and the image's
rows are some of these, in an order that follows from the image's size; see image_encoder.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from .step_layout import Int32Array

# Models whose encoder takes tiles of one size, and its configurations.
MODELS = ("LlavaForConditionalGeneration", "Gemma3ForConditionalGeneration")
_TOWERS = ("clip_vision_model", "siglip_vision_model")

# A row that is no row of a tile: the model's vector behind each line of tiles.
NEWLINE = -1


@dataclasses.dataclass(frozen=True)
class Image:
    """An image of a request's prompt.

    Attributes:
      identifier: equal for equal images.
      positions: int32[n], increasing: the tokens of the prompt whose embeddings are the image's rows.
      data: vLLM's MultiModalKwargsItem.
    """

    identifier: str
    positions: Int32Array
    data: Any

    @property
    def end(self) -> int:
        """The position behind its last row."""
        return int(self.positions[-1]) + 1


@dataclasses.dataclass(frozen=True)
class StepImages:
    """The rows of a step that are images'.

    Attributes:
      rows: int32[num_tokens], of each its row among those of all images; -1: it is a token.
      runs: int32[num_tokens], equal for rows that stand one behind the other in one image; -1: it is a token.
    """

    rows: Int32Array
    runs: Int32Array


def of_request(features: Sequence[Any]) -> tuple[Image, ...]:
    """The images of a request, in the prompt's order, from vLLM's MultiModalFeatureSpecs."""
    images = []
    for feature in features:
        place = feature.mm_position
        rows = np.arange(place.length) if place.is_embed is None else np.flatnonzero(place.is_embed.numpy())
        images.append(Image(feature.identifier, (place.offset + rows).astype(np.int32), feature.data))
    return tuple(images)


def are_served(model: Any) -> bool:
    """Whether requests of vLLM's ModelConfig, or None, may have images."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    # The configuration of the text in such a model says that it is one, too.
    if model is None or not model.is_multimodal_model or model.architecture not in (model.architectures or ()):
        return False
    return bool(MULTIMODAL_REGISTRY.supports_multimodal_inputs(model))


def tokens_of_block(model: Any) -> int:
    """Of vLLM's ModelConfig or None: tokens of an image of which each attends to all others; 0: to those before it."""
    if not are_served(model) or model.architecture != "Gemma3ForConditionalGeneration":
        return 0
    return int(model.hf_config.mm_tokens_per_image)


def tile_form(model: Any) -> tuple[int, int, int]:
    """Channels, height and width of a tile of vLLM's ModelConfig."""
    vision = model.hf_config.vision_config
    return (int(getattr(vision, "num_channels", 3)), int(vision.image_size), int(vision.image_size))


def tiles(data: Any, form: tuple[int, int, int]) -> np.ndarray[Any, Any]:
    """float32[n, *form], the tiles of an image."""
    pixels: np.ndarray[Any, Any] = data["pixel_values"].data.float().numpy().reshape(-1, *form)
    return pixels


def row_order(num_rows: int, num_tiles: int, positions: int) -> Int32Array:
    """int32[positions]: which row each of an image's rows is, of the rows of all its tiles one behind the other.

    Args:
      num_rows: of a tile.
      num_tiles: of the image.
      positions: rows that the prompt has room for.

    Raises:
      ValueError: the tiles have another number of rows.
    """
    order = np.arange(num_rows * num_tiles, dtype=np.int32)
    if len(order) != positions:
        raise ValueError(
            f"xla_gpu.vllm: an image of {num_tiles} tiles: expected {positions} rows, as its prompt has tokens for it, "
            f"got {len(order)}"
        )
    return order


def refusals(config: Any) -> list[str]:
    """What of a VllmConfig whose requests may have images is not supported."""
    model = config.model_config
    vision = model.hf_config.vision_config
    if model.architecture not in MODELS or vision.model_type not in _TOWERS:
        return [
            f"--limit-mm-per-prompt: expected '{{\"image\": 0}}' with {model.architecture} and an encoder of "
            f"{vision.model_type}, of which the text alone is served"
        ]
    found = []
    text_only = "expected --limit-mm-per-prompt '{\"image\": 0}'"
    if model.multimodal_config.enable_mm_embeds:
        found.append("--enable-mm-embeds: not supported")
    if model.multimodal_config.mm_processor_kwargs:
        found.append("--mm-processor-kwargs: not supported")
    if model.runner_type == "pooling":
        found.append(f"--runner pooling: {text_only} with {model.architecture}")
    if (size := config.parallel_config.tensor_parallel_size) > 1:
        found.append(f"--tensor-parallel-size {size}: {text_only} with {model.architecture}")
    if block := tokens_of_block(model):
        found += _block_refusals(config, block)
    if (token := _image_token(model.hf_config)) >= model.get_vocab_size():
        found.append(
            f"the image token of {model.architecture}: expected a token below {model.get_vocab_size()}, the model's "
            f"vocabulary, got {token}"
        )
    return found


def _block_refusals(config: Any, block: int) -> list[str]:
    """Of a model whose images are read whole, in blocks of ``block`` tokens."""
    scheduler, found = config.scheduler_config, []
    name = config.model_config.architecture
    if (most := scheduler.long_prefill_token_threshold) > 0:
        found.append(f"--long-prefill-token-threshold: expected 0 with images of {name}, got {most}")
    if not str(scheduler.scheduler_cls or __package__).startswith(str(__package__)):
        found.append(f"--scheduler-cls: expected none with images of {name}, got {scheduler.scheduler_cls}")
    window = getattr(config.model_config.hf_text_config, "sliding_window", None)
    if window is not None and window < block:
        found.append(f"{name}: sliding_window: expected at least the {block} tokens of an image, got {window}")
    return found


def _image_token(hf_config: Any) -> int:
    names = ("image_token_index", "image_token_id")
    return next(int(token) for name in names if (token := getattr(hf_config, name, None)) is not None)
