"""The JAX front end.

Imported before jax is: says that it is missing or too old where a use of it would fail in some other way.
"""

from .._core import compatibility

compatibility.framework("jax", "xla_gpu.jax", (0, 7), "pip install '.[jax]' in a checkout of xla_gpu")
