"""What vLLM asks of a quantization whose products are this library's."""

from __future__ import annotations

from typing import Any, Self

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from ..ops.linear import GROUP

NAME = "xla_gpu"


class OwnQuantization(QuantizationConfig):  # type: ignore[misc]
    """Without settings; get_quant_method() is the subclass's.

    Attributes:
      multiple: of which the sizes of experts are to be for ``grouped_linear``, in every format of the quantisation.
    """

    multiple = GROUP

    @classmethod
    def get_name(cls) -> str:
        """The name in vLLM's registry, under which quantization.py makes all of them."""
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """The dtypes of ``linear``."""
        return [torch.float32, torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """The library's."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Where settings stand if not in config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Of the checkpoint's quantization_config."""
        return cls()
