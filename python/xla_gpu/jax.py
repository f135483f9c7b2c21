"""The JAX door."""
from . import _jax
from .ops import simple_add as _simple_add


def simple_add(a, b):
    return _jax.call(_simple_add.OPERATOR, a=a, b=b)
