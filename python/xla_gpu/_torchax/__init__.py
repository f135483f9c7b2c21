"""The torchax front end.

Imported before torchax is: says that it is missing or too old where a use of it would fail in some other way.
"""

from .._core import compatibility

# The oldest release that was tested: torchax's registry of operators is not promised to stay as it is.
compatibility.framework("torchax", "xla_gpu.torchax", (0, 0, 13), "pip install '.[torchax]' in a checkout of xla_gpu")
