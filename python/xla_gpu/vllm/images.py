"""Images and videos of prompts: which models take them, which rows of the encoder's results stand where in a prompt.

An image is one or several tiles of one size. The encoder makes a fixed number of rows of each tile, and the image's
rows are some of these, in an order that follows from the image's size; see image_encoder.py. Or it is a grid of patches
of any size; see patches.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .step_layout import Int32Array

# Models whose encoder takes tiles of one size, and its configurations.
TILES = (
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "AyaVisionForConditionalGeneration",
)
_TOWERS = ("clip_vision_model", "siglip_vision_model")

# Models whose encoder takes images of any size, as patches, and whose positions are M-RoPE.
MROPE = (
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
)

# Models whose encoder may be one that takes images of any size, whose lines have a token of the text behind each.
LINES = ("Mistral3ForConditionalGeneration", "LlavaForConditionalGeneration")
_OF_LINES = "pixtral"

# Of those with tiles the one whose tiles lie in a grid.
_GRIDS = "LlavaNextForConditionalGeneration"

# Tiles that a program of the encoder takes: as many as there are, and the rest one by one. No batch has more patches
# than this: one tile alone fills a GPU then.
_BATCHES = (4, 1)
_MOST_PATCHES = 4096

# Rows of an encoder's attention that are computed at a time: its scores take memory.
MOST_QUERIES = 1024

# What users may say of the sizes of images that are no tiles.
_PIXELS = ("min_pixels", "max_pixels")

# And of videos, whose frames per second follow from nothing else.
_OF_VIDEOS = ("fps",)

# A row that is no row of a tile: the model's vector behind each line of tiles.
NEWLINE = -1


@dataclasses.dataclass(frozen=True)
class Image:
    """An image of a request's prompt, or a video.

    Attributes:
      identifier: equal for equal images.
      positions: int32[n], increasing: the tokens of the prompt whose embeddings are the image's rows.
      data: vLLM's MultiModalKwargsItem.
      grid: of an image of any size its times, lines and columns of patches.
      seconds: of a video, between two of its times, where the model is told.
    """

    identifier: str
    positions: Int32Array
    data: Any
    grid: tuple[int, int, int] = (1, 1, 1)
    seconds: float = 1.0

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
        image = Image(feature.identifier, (place.offset + rows).astype(np.int32), feature.data)
        if (grid := grid_of(feature.data, feature.modality)) is not None:
            image = dataclasses.replace(image, grid=grid)
        if (seconds := (feature.data or {}).get("second_per_grid_ts")) is not None:
            image = dataclasses.replace(image, seconds=float(seconds.data))
        images.append(image)
    return tuple(images)


def grid_of(data: Any, modality: str) -> tuple[int, int, int] | None:
    """Times, lines and columns of patches of vLLM's MultiModalKwargsItem; None: it is not of any size."""
    grid = (data or {}).get(f"{modality}_grid_thw")
    return None if grid is None else tuple(grid.data.tolist())


def are_served(model: Any) -> bool:
    """Whether requests of vLLM's ModelConfig, or None, may have images."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    # The configuration of the text in such a model says that it is one, too.
    if model is None or not model.is_multimodal_model or model.architecture not in (model.architectures or ()):
        return False
    return bool(MULTIMODAL_REGISTRY.supports_multimodal_inputs(model))


def has_lines(model: Any) -> bool:
    """Whether the encoder of vLLM's ModelConfig is Pixtral's."""
    return model.architecture in LINES and model.hf_config.vision_config.model_type == _OF_LINES


def takes_patches(model: Any) -> bool:
    """Whether images of vLLM's ModelConfig, or None, are of any size."""
    return are_served(model) and (model.architecture in MROPE or has_lines(model))


def has_mrope(model: Any) -> bool:
    """Whether the tokens of images of vLLM's ModelConfig, or None, have rotary positions of their own."""
    return are_served(model) and model.architecture in MROPE


def takes_videos(model: Any) -> bool:
    """Whether requests of vLLM's ModelConfig, or None, may have videos."""
    return has_mrope(model) and model.multimodal_config.get_limit_per_prompt("video") > 0


def most_rows(config: Any) -> int:
    """What the scheduler of a VllmConfig lets images have at once, in tokens: none has more rows than tokens.

    vLLM's largest video may have more tokens than a prompt; see scheduler.py.
    """
    from vllm.multimodal import MULTIMODAL_REGISTRY

    model, scheduler = config.model_config, config.scheduler_config
    try:
        from vllm.v1.core.encoder_cache_manager import compute_encoder_budget

        _, num_rows = compute_encoder_budget(model, scheduler, MULTIMODAL_REGISTRY)
    except ImportError:  # since vLLM 0.16
        from vllm.multimodal.encoder_budget import MultiModalBudget

        num_rows = MultiModalBudget(config, MULTIMODAL_REGISTRY).encoder_cache_size
    if takes_videos(model):
        num_rows = min(num_rows, max(model.max_model_len, scheduler.max_num_batched_tokens))
    return int(num_rows)


def num_streams(model: Any) -> int:
    """Rows that the encoder of vLLM's ModelConfig makes of a token: its embedding, and what first layers add to it."""
    vision = getattr(model.hf_config, "vision_config", None)
    return 1 + len(getattr(vision, "deepstack_visual_indexes", ()))


def leave_out_videos(model: Any) -> None:
    """Has vLLM refuse requests with videos, of vLLM's ModelConfig or None, where no option says how many there are."""
    if model is not None and model.is_multimodal_model and model.architecture in MROPE:
        limits = model.multimodal_config.limit_per_prompt
        if "video" not in limits:
            from vllm.config.multimodal import VideoDummyOptions

            limits["video"] = VideoDummyOptions(count=0)


def tokens_of_block(model: Any) -> int:
    """Of vLLM's ModelConfig or None: tokens of an image of which each attends to all others; 0: to those before it."""
    if not are_served(model) or model.architecture != "Gemma3ForConditionalGeneration":
        return 0
    return int(model.hf_config.mm_tokens_per_image)


def tile_form(model: Any) -> tuple[int, int, int]:
    """Channels, height and width of a tile of vLLM's ModelConfig."""
    vision = model.hf_config.vision_config
    return (int(getattr(vision, "num_channels", 3)), int(vision.image_size), int(vision.image_size))


def patches(vision: Any) -> int:
    """Rows that the encoder computes of a tile; vision: its configuration."""
    return int((vision.image_size // vision.patch_size) ** 2 + 1)


def batches(vision: Any) -> list[int]:
    """Numbers of tiles that the encoder's programs are compiled for, the largest first."""
    return [size for size in _BATCHES if size == 1 or size * patches(vision) <= _MOST_PATCHES]


def check_rows(model: Any, num_rows: int) -> None:
    """Raises ValueError where the encoder of vLLM's ModelConfig makes ``num_rows`` rows of a tile, and others fit."""
    vision = model.hf_config.vision_config
    expected = (vision.image_size // vision.patch_size) ** 2
    wrong = ""
    if num_rows == 1:
        wrong = "expected an encoder that does not pool an image (vision_use_head)"
    elif model.architecture == _GRIDS and num_rows != expected:
        wrong = f"expected a row for each of a tile's {expected} patches, got {num_rows} rows"
    if wrong:
        raise ValueError(
            f"xla_gpu.vllm: {model.architecture}: {wrong}; start with --limit-mm-per-prompt '{{\"image\": 0}}'"
        )


def tiles(data: Any, form: tuple[int, int, int]) -> np.ndarray[Any, Any]:
    """float32[n, *form], the tiles of an image."""
    pixels: np.ndarray[Any, Any] = data["pixel_values"].data.float().numpy().reshape(-1, *form)
    return pixels


def row_order(model: Any, data: Any, num_rows: int, num_tiles: int) -> Int32Array:
    """int32[n]: which row each of an image's rows is, of the rows of all its tiles one behind the other; or NEWLINE.

    Args:
      model: vLLM's ModelConfig.
      data: vLLM's MultiModalKwargsItem of the image.
      num_rows: of a tile.
      num_tiles: of the image.
    """
    if model.architecture == _GRIDS:
        height, width = (int(size) for size in data["image_sizes"].data.tolist())
        return _rows_of_grid(model.hf_config, (height, width), num_rows, num_tiles)
    return np.arange(num_rows * num_tiles, dtype=np.int32)


def _rows_of_grid(hf_config: Any, size: tuple[int, int], num_rows: int, num_tiles: int) -> Int32Array:
    """Of LLaVA-NeXT: the whole image, and behind it lines through a grid of tiles, less what pads them, and NEWLINEs.

    size: height and width of the image.
    """
    from transformers.models.llava_next import modeling_llava_next

    functions: Any = modeling_llava_next
    vision = hf_config.vision_config
    side = vision.image_size // vision.patch_size
    whole = np.arange(num_rows, dtype=np.int32)
    if num_tiles == 1:
        return np.append(whole, np.int32(NEWLINE))
    # Of images that are prepared together those with fewer tiles than others have padding behind them.
    high, wide = functions.get_anyres_image_grid_shape(size, hf_config.image_grid_pinpoints, vision.image_size)
    grid = np.arange(num_rows, num_rows * (1 + high * wide), dtype=np.int32).reshape(high, wide, side, side)
    lines = torch.from_numpy(grid.transpose(0, 2, 1, 3).reshape(1, high * side, wide * side).copy())
    kept: Int32Array = functions.unpad_image(lines, size)[0].numpy()
    ends = np.full((len(kept), 1), NEWLINE, np.int32)
    return np.concatenate([whole, np.concatenate([kept, ends], 1).reshape(-1)])


def refusals(config: Any) -> list[str]:
    """What of a VllmConfig whose requests may have images is not supported."""
    model = config.model_config
    vision = model.hf_config.vision_config
    of_patches = takes_patches(model)
    if not of_patches and (model.architecture not in TILES or vision.model_type not in _TOWERS):
        return [
            f"--limit-mm-per-prompt: expected '{{\"image\": 0}}' with {model.architecture} and an encoder of "
            f"{vision.model_type}, of which the text alone is served"
        ]
    found = []
    text_only = "expected --limit-mm-per-prompt '{\"image\": 0}'"
    if model.multimodal_config.enable_mm_embeds:
        found.append("--enable-mm-embeds: not supported")
    if model.architecture in MROPE:
        found += _patch_refusals(model)
    elif of_patches:
        found += _line_refusals(model)
    elif model.multimodal_config.mm_processor_kwargs:
        found.append("--mm-processor-kwargs: not supported")
    if model.runner_type == "pooling":
        found.append(f"--runner pooling: {text_only} with {model.architecture}")
    if block := tokens_of_block(model):
        found += _block_refusals(config, block)
    own = config.scheduler_config.scheduler_cls
    if (block or takes_videos(model)) and not str(own or __package__).startswith(str(__package__)):
        what = f"{'images' if block else 'videos'} of {model.architecture}"
        found.append(f"--scheduler-cls: expected none with {what}, got {own}")
    if (token := _image_token(model.hf_config)) >= model.get_vocab_size():
        found.append(
            f"the image token of {model.architecture}: expected a token below {model.get_vocab_size()}, the model's "
            f"vocabulary, got {token}"
        )
    return found


def _patch_refusals(model: Any) -> list[str]:
    """Of a model with images of any size."""
    from vllm.transformers_utils.processor import cached_image_processor_from_config

    multimodal, found = model.multimodal_config, []
    given = set(multimodal.mm_processor_kwargs or {})
    taken = _PIXELS + (_OF_VIDEOS if takes_videos(model) else ())
    if others := sorted(given - set(taken)):
        found.append(f"--mm-processor-kwargs: expected {' and '.join(taken)} alone, got {', '.join(others)}")
    elif len(given := given & set(_PIXELS)) == 1:
        processor = cached_image_processor_from_config(model)
        if any(getattr(processor, name, None) is None for name in _PIXELS):
            # It would go on with its own size.
            found.append(
                f"--mm-processor-kwargs: expected both of {' and '.join(_PIXELS)}, since the checkpoint's processor "
                f"has neither, got {given.pop()}"
            )
    if multimodal.video_pruning_rate:
        found.append("--video-pruning-rate: not supported")
    return found


def _line_refusals(model: Any) -> list[str]:
    """Of a model with Pixtral's encoder."""
    from vllm.transformers_utils.processor import cached_image_processor_from_config

    hf_config, found = model.hf_config, []
    given = model.multimodal_config.mm_processor_kwargs or {}
    if others := sorted(set(given) - {"size"}):
        found.append(f"--mm-processor-kwargs: expected size alone, got {', '.join(others)}")
    # vLLM counts an image's tokens by the one, the processor makes it by the other.
    side = hf_config.vision_config.image_size
    edge = dict(given.get("size") or cached_image_processor_from_config(model).size).get("longest_edge")
    if edge != side:
        found.append(
            f"{model.architecture}: expected the processor's size.longest_edge to be the encoder's image_size, {side}, "
            f"got {edge}; for smaller images set both, by --mm-processor-kwargs "
            '\'{"size": {"longest_edge": n}}\' and --hf-overrides \'{"vision_config": {"image_size": n}}\''
        )
    if not isinstance(hf_config.vision_feature_layer, int):
        found.append(f"vision_feature_layer: expected one layer, got {hf_config.vision_feature_layer}")
    if (strategy := getattr(hf_config, "vision_feature_select_strategy", "full")) != "full":
        found.append(f"vision_feature_select_strategy: expected full with Pixtral's encoder, got {strategy}")
    return found


def _block_refusals(config: Any, block: int) -> list[str]:
    """Of a model whose images are read whole, in blocks of ``block`` tokens."""
    scheduler, found = config.scheduler_config, []
    name = config.model_config.architecture
    if (most := scheduler.long_prefill_token_threshold) > 0:
        found.append(f"--long-prefill-token-threshold: expected 0 with images of {name}, got {most}")
    from vllm.transformers_utils.processor import cached_image_processor_from_config

    if getattr(cached_image_processor_from_config(config.model_config), "do_pan_and_scan", None):
        found.append(f"{name}: do_pan_and_scan: expected false in the checkpoint's processor, got true")
    window = getattr(config.model_config.hf_text_config, "sliding_window", None)
    if window is not None and window < block:
        found.append(f"{name}: sliding_window: expected at least the {block} tokens of an image, got {window}")
    return found


def _image_token(hf_config: Any) -> int:
    names = ("image_token_index", "image_token_id")
    return next(int(token) for name in names if (token := getattr(hf_config, name, None)) is not None)
