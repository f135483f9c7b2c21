"""The torchax front end: ``torch.ops.xla_gpu.*`` and the functions of xla_gpu.torch on torchax tensors.

Importing this module registers the operators with torchax, which runs PyTorch programs on JAX: inside
``torchax.default_env()`` (or after ``torchax.enable_globally()``) they take torchax tensors, eagerly and under
``torchax.interop.jax_jit``. Each is the function of its name in xla_gpu.jax, so the results have the same bits.

* A program under jax_jit returns what it changes. ``reshape_and_cache_`` gives its cache tensor a new value; return
  that tensor, and donate the argument, and the compiled program updates the cache in place, as below.
* Eagerly ``reshape_and_cache_`` copies the cache first: torchax tensors share arrays (a clone is the same array), so
  its buffer cannot be taken over.
* Operands are torchax tensors, all of them, or ValueError; they do not require gradients, which are
  those of JAX (torchax.interop.jax_value_and_grad).
* ffi_call takes no torchax tensors: use jax.ffi.ffi_call through torchax.interop.call_jax.

```python
def step(state, packed, caches):
    chosen = torch.func.functional_call(model, state, (packed, caches))
    return chosen, caches

step = torchax.interop.jax_jit(step, {"donate_argnums": (2,)})
```
"""

from __future__ import annotations

from . import _torchax  # noqa: F401 - first: it says which torchax is needed

# isort: split
import torchax
import torchax.tensor

from ._torchax import operators as _operators

__all__ = ["register"]


def register(environment: torchax.tensor.Environment) -> None:
    """Registers the operators with an environment of the program's own that was made before this module was imported.

    torchax copies its registry when an environment is made. The default environment and later ones need no call.
    """
    _operators.register(environment)


_operators.register(torchax._env)
