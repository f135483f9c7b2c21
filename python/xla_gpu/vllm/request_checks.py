"""What a request must not ask for, beyond what vLLM checks: the step that it joined would end the engine.

A server's JSON may hold NaN and Infinity, numbers that float32 or int64 does not, and ids of tokens that the model does
not have. vLLM compares ids with the vocabulary of the tokenizer, if there is one. A request for structured output may
need another back end than the one that the engine has.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from . import images

# Of a video, which the encoder reads by parts.
_OF_TIMES = {"video": "pairs of frames"}

_FLOAT32 = np.finfo(np.float32)
_SMALLEST, _LARGEST = float(_FLOAT32.tiny), float(_FLOAT32.max)

# The engine may be another process, to which vLLM sends integers of 64 bits, with a sign or without.
_INT64 = np.iinfo(np.int64)
_MOST_TOKENS = int(np.iinfo(np.int32).max)
# A request of its own is made for each output, and a server answers nobody meanwhile.
_MOST_OUTPUTS = 16384
_LARGEST_SEED = int(np.iinfo(np.uint64).max)


def check(params: Any, prompt_token_ids: list[int], vocab_size: int | None) -> None:
    """Raises ValueError for a request that cannot be served, which the server answers with 400.

    Args:
      params: vLLM's SamplingParams, which have been checked by vLLM.
      prompt_token_ids: of the prompt; empty where there are none.
      vocab_size: the model's; None where it is not known.
    """
    if params.n > _MOST_OUTPUTS:
        raise ValueError(f"n: expected at most {_MOST_OUTPUTS}, got {params.n}")
    _expect("temperature", 0.0, params.temperature, _LARGEST)
    _expect("top_p", _SMALLEST, params.top_p, 1.0)
    _expect("min_p", 0.0, params.min_p, 1.0)
    _expect("repetition_penalty", _SMALLEST, params.repetition_penalty, _LARGEST)
    for token, bias in (params.logit_bias or {}).items():
        if math.isnan(bias) or bias > _LARGEST:
            raise ValueError(f"logit_bias[{token}]: expected a number up to {_LARGEST:.3g}, got {bias}")
    for name in ("top_k", "seed", "max_tokens", "min_tokens"):
        if (number := getattr(params, name)) is not None:
            _expect(name, int(_INT64.min), number, _LARGEST_SEED if name == "seed" else int(_INT64.max))
    for token in params.stop_token_ids or ():
        _expect("stop_token_ids", int(_INT64.min), token, int(_INT64.max))
    _expect_xgrammar(params.structured_outputs)
    _expect_tokens("allowed_token_ids", params.allowed_token_ids or [], vocab_size)
    check_prompt(prompt_token_ids, vocab_size)


def check_prompt(token_ids: list[int], vocab_size: int | None) -> None:
    """Raises ValueError for a prompt with a token that the model does not have; vocab_size: see ``check``."""
    _expect_tokens("prompt", token_ids, vocab_size)


def check_late_interaction(params: Any) -> None:
    """Raises ValueError for scores of all tokens of two texts that the device is to compute, as vLLM 0.18 has them."""
    if getattr(params, "late_interaction_params", None) is not None:
        raise ValueError(
            "late_interaction_params: not supported; expected the embeddings of tokens (token_embed), of which the "
            "score can be computed"
        )


def check_token_types(params: Any, token_ids: list[int], takes_types: bool | None) -> None:
    """Raises ValueError for a pair of texts that are told by token types, of a model that would not be told.

    Args:
      params: vLLM's PoolingParams.
      token_ids: of the prompt.
      takes_types: whether the model does; None where that is not known.
    """
    begin = (getattr(params, "extra_kwargs", None) or {}).get("compressed_token_type_ids")
    if takes_types is False and begin is not None and begin < len(token_ids):
        raise ValueError(
            "prompt: expected tokens of one type, since this model has no token types, got a second one from token "
            f"{begin} on: its tokenizer belongs to another model"
        )


def check_processor_kwargs(given: Any) -> None:
    """Raises ValueError for a request whose images are to be made otherwise than the model's processor says."""
    if given:
        raise ValueError(f"mm_processor_kwargs: expected none, got {given}")


def watch_renderer() -> None:
    """Has vLLM's renderer refuse a request's mm_processor_kwargs.

    Since vLLM 0.17 it uses them before the platform is told of the request, which it gets without them.
    """
    try:
        from vllm.renderers.base import BaseRenderer
    except ImportError:
        return
    process = getattr(BaseRenderer, "_process_multimodal", None)
    if process is None or hasattr(process, "__wrapped__"):
        return

    @functools.wraps(process)
    def checked(renderer: Any, *arguments: Any, **named: Any) -> Any:
        check_processor_kwargs(named.get("mm_processor_kwargs"))
        return process(renderer, *arguments, **named)

    BaseRenderer._process_multimodal = checked


def check_images(prompt: Any, processed_inputs: Any, most_tokens: int | None, room: int | None) -> None:
    """Raises ValueError for a request with an image or a video of another size than the encoder was compiled for.

    Or with one that could be, since it is made otherwise than the model's processor says.

    Args:
      prompt: as vLLM was given it.
      processed_inputs: what vLLM made of it.
      most_tokens: of an image; None for models whose images do not have any size.
      room: tokens that the scheduler has for one; None like the above.
    """
    if processed_inputs.get("type") != "multimodal":
        return
    if isinstance(prompt, dict):
        check_processor_kwargs(prompt.get("mm_processor_kwargs"))
    for modality, places in processed_inputs.get("mm_placeholders", {}).items():
        for place, data in zip(places, processed_inputs["mm_kwargs"][modality], strict=True):
            times, *_ = images.grid_of(data, modality) or (1,)
            rows = place.length if place.is_embed is None else int(place.is_embed.sum())
            if most_tokens is not None and (tokens := rows // times) > most_tokens:
                raise ValueError(
                    f"{modality}: expected {_OF_TIMES.get(modality, 'one')} of at most {most_tokens} tokens, got "
                    f"{tokens}; see max_pixels of --mm-processor-kwargs, --max-model-len and --max-num-batched-tokens"
                )
            counted = place.length if _counts_text_between() else rows
            if room is not None and counted > room:  # it would wait for ever
                raise ValueError(
                    f"{modality}: expected one of at most {room} tokens in all, got {counted}; see "
                    "--max-num-batched-tokens"
                )


def _counts_text_between() -> bool:
    """Whether vLLM's scheduler counts the tokens of the text between an image's or a video's too, as that of 0.12."""
    from vllm.v1.request import Request

    return not hasattr(Request, "get_num_encoder_embeds")


def _expect_tokens(name: str, token_ids: list[int], vocab_size: int | None) -> None:
    known = _MOST_TOKENS if vocab_size is None else vocab_size
    for token in (min(token_ids), max(token_ids)) if token_ids else ():
        if not 0 <= token < known:
            raise ValueError(f"{name}: expected token ids from 0 to {known - 1}, got {token}")


def _expect_xgrammar(structured: Any) -> None:
    """Where the server leaves the back end of structured output to vLLM, it must be the same one in every request.

    For what xgrammar does not take vLLM chooses another. But an engine has one, that of its first such request:
    xgrammar would ignore a part of the request, or raise in the engine's step, which ends it.
    """
    if structured is not None and structured._backend_was_auto and structured._backend != "xgrammar":
        raise ValueError(
            "structured_outputs: expected what xgrammar supports, got a request that needs another back end; a server "
            f'takes it with --structured-outputs-config \'{{"backend": "{structured._backend}"}}\''
        )


def _expect(name: str, least: float, got: float, most: float) -> None:
    if not least <= got <= most:  # nor is NaN
        raise ValueError(f"{name}: expected a number from {least:.3g} to {most:.3g}, got {got}")
