"""The PyTorch front ends: dispatch, eager calls on CPU and CUDA tensors, ffi_call.

Imported before torch is: says that it is missing or too old where a use of it would fail in some other way.
"""

from .._core import compatibility

compatibility.framework("torch", "xla_gpu.torch", (2, 9), "pip install '.[torch]' in a checkout of xla_gpu")
