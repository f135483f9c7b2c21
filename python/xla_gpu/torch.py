"""The PyTorch doors."""
from . import _torch_ops as _torch_ops
from . import _torch_operators as _torch_operators
