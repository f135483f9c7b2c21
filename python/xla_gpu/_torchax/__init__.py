"""The torchax front end.

Imported before torchax is: says that it is missing or too old where a use of it would fail in some other way.
"""

from .._core import compatibility
from ..errors import CompatibilityError

try:
    # The oldest release that was tested: torchax's registry of operators is not promised to stay as it is.
    compatibility.framework(
        "torchax", "xla_gpu.torchax", (0, 0, 13), "pip install '.[torchax]' in a checkout of xla_gpu"
    )
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise CompatibilityError(
        "xla_gpu.torchax needs torchax 0.0.13 or newer, and torch_xla's wheel, which holds an older one, has "
        "overwritten its files: pip install --force-reinstall --no-deps torchax"
    ) from error
