"""What requests of one engine may ask for at most; which engine a request is for."""

from __future__ import annotations

import dataclasses
import inspect
from types import FrameType
from typing import Any

from . import images, supported

# Of the attribute of an engine's ModelConfig: vLLM 0.16 makes no copy of a VllmConfig with attributes that are not its
# own.
_NAME = "_xla_gpu_request_limits"


@dataclasses.dataclass(frozen=True)
class RequestLimits:
    """Of one engine.

    Attributes:
      vocab_size: of the model; None where it is not known.
      takes_token_types: whether the model is told which tokens are of a pair's second text; None where that is not
        known, or the model does not pool.
      image_tokens: of an image, at most; None for models whose images do not have any size.
      image_room: tokens that the scheduler has for an image; None like the above.
    """

    vocab_size: int | None = None
    takes_token_types: bool | None = None
    image_tokens: int | None = None
    image_room: int | None = None

    @classmethod
    def of(cls, vllm_config: Any) -> RequestLimits:
        """Of a VllmConfig."""
        model = vllm_config.model_config
        found = None if model is None else vars(model).get(_NAME)
        return cls.keep(vllm_config) if found is None else found

    @classmethod
    def keep(cls, vllm_config: Any) -> RequestLimits:
        """Computes them, and has the VllmConfig keep them: copies of it in other processes, which are pickled, too."""
        found = cls._make(vllm_config)
        if vllm_config.model_config is not None:
            object.__setattr__(vllm_config.model_config, _NAME, found)
        return found

    @classmethod
    def _make(cls, vllm_config: Any) -> RequestLimits:
        model = vllm_config.model_config
        if model is None:
            return cls()
        tokens = room = None
        if images.takes_patches(model):
            from .patches import most_tokens

            room = images.most_rows(vllm_config)
            tokens = most_tokens(vllm_config, room)
        takes_types = supported.takes_token_types(model) if supported.pools(model) else None
        return cls(model.get_vocab_size(), takes_types, tokens, room)


def of_the_request_being_processed() -> RequestLimits:
    """Those of the engine whose InputProcessor is processing a request, called by what vLLM calls for it.

    vLLM tells a platform of a request, but not whose it is, and a process may have several engines. The limits of
    another one would refuse what this one serves, or let through what ends it. So this looks for the InputProcessor
    among the callers.
    """
    frame = _processing()
    return RequestLimits() if frame is None else RequestLimits.of(frame.f_locals["self"].vllm_config)


def has_more_to_come() -> bool:
    """Whether the request being processed is a part of one that comes in parts (StreamingInput of vLLM 0.15)."""
    frame = _processing()
    return frame is not None and bool(frame.f_locals.get("resumable"))


def _processing() -> FrameType | None:
    """The caller that is an InputProcessor's method."""
    from vllm.v1.engine.input_processor import InputProcessor

    frame = inspect.currentframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), InputProcessor):
        frame = frame.f_back
    return frame
