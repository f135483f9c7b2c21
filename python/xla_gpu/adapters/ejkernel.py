"""ejkernel: ragged_page_attention_v3 on NVIDIA GPUs by xla_gpu.

``xla_gpu.adapters.ejkernel.register()`` puts xla_gpu.jax.ragged_paged_attention_v3 into ejkernel's kernel registry, in
front of ejkernel's own CUDA kernel. Programs that look the algorithm up there then run it, and where their step donates
its caches, they are updated in place.

ejkernel 0.0.80 pins jax ~= 0.10.
"""

from __future__ import annotations

import functools

import jax
from ejkernel.kernels._registry import Backend, Platform, kernel_registry

from ..jax import ragged_paged_attention_v3

__all__ = ["register"]

ALGORITHM = "ragged_page_attention_v3"


# The parameters are those of the registered kernels: ejkernel compares signatures. What is not used must not be deleted
# either, since ejkernel takes that for a feature that is missing.
def _ragged_page_attention_v3(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache: jax.Array,
    kv_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    distribution: jax.Array,
    softmax_aux: jax.Array | None = None,
    *,
    softmax_scale: float = 1.0,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    chunk_prefill_size: int | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """xla_gpu.jax.ragged_paged_attention_v3 by ejkernel's names."""
    call = functools.partial(
        ragged_paged_attention_v3,
        sm_scale=softmax_scale,
        sliding_window=sliding_window,
        soft_cap=logits_soft_cap,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    # Callers of ejkernel keep the cache that they passed: an outer jit without donation sees to that. Inside a jitted
    # step it is the step that donates.
    out, kv_cache = jax.jit(call)(
        queries, keys, values, kv_cache, kv_lens, block_tables, query_start_loc, distribution, softmax_aux
    )
    return out, kv_cache


def register(priority: int = 100) -> None:
    """Registers the kernel for the CUDA platform and GPUs; among several the highest priority is taken."""
    if not is_registered():
        kernel_registry.register(ALGORITHM, Platform.CUDA, Backend.GPU, priority=priority)(_ragged_page_attention_v3)


def is_registered() -> bool:
    """Whether the kernel is in ejkernel's registry."""
    implementations = (spec.implementation for spec in kernel_registry.list_implementations(ALGORITHM))
    return any(getattr(each, "__wrapped__", None) is _ragged_page_attention_v3 for each in implementations)
