"""Quantised weights for ``linear``: made from weights, or from checkpoints that are quantised already.

The functions take and return arrays of NumPy, PyTorch or JAX, on their own devices. They import none of these.
"""

from .checkpoints import CheckpointFormat
from .weights import FORMATS, LinearWeight, concatenate, dequantize, pack_weight, quantize, unpack_weight

__all__ = [
    "FORMATS",
    "CheckpointFormat",
    "LinearWeight",
    "concatenate",
    "dequantize",
    "pack_weight",
    "quantize",
    "unpack_weight",
]
