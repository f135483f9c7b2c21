"""attention_block: the attention of a Llama's layer, from the norm before it to the residual behind it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .._core.checks import FLOATS, Checks
from .._core.operator import ArraySpec, IntOperand, OpCall, Operator, Signature
from .._core.partitioning import Partitioning
from . import linear, paged_attention, rotary_embedding
from .gated_mlp import check_norm_weight, check_weight_of, given_bits, weight_checks
from .linear import check_residual
from .rms_norm import norm_attributes

_DOCSTRING = """
``h = rms_norm(x, norm_weight)``, ``qkv = linear(h, qkv_weight)``, ``query, kv_cache = rotary_and_cache(qkv, positions,
table, kv_cache, slot_mapping)``, ``attended = paged_attention(query, kv_cache, …)``, ``out = linear(attended,
out_weight, residual=residual)``, with the bits of these operators one after the other, as one call: on a GPU their
kernels are launched so that each starts while the one before it ends. Between two calls of a compiled program that is
not possible.

Both weights are in any of linear's formats, each with its scale and zero point as there. num_kv_heads and head_dim are
the cache's; num_heads follows from qkv_weight.

Without qkv_weight x is the result of that product, and without out_weight attended is out: rotary embedding, cache
update and attention as one call, for steps whose products are the framework's own.

Up to 64 rows it is such a chain of kernels, for decode steps. Above 64 rows of float16 or bfloat16 the front ends call
rms_norm and linear, which then is the framework's own product, before and behind a call without weights. That is a
chain of kernels at any number of rows.

Args:
  x: T[num_tokens, hidden]. T is float32, float16 or bfloat16. Without qkv_weight
    T[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim].
  qkv_weight: [(num_heads + 2 * num_kv_heads) * head_dim, hidden], the heads of query, key and value in this order;
    None: no norm and no product.
  out_weight: [out_features, num_heads * head_dim]; out_features is usually hidden. None: no product, and no residual.
  positions: as of rotary_and_cache, as the next three.
  table: as of rotary_and_cache.
  kv_cache: as of rotary_and_cache and paged_attention.
  slot_mapping: as of rotary_and_cache.
  context_lens: as of paged_attention, as the next three.
  block_tables: as of paged_attention.
  query_start_loc: as of paged_attention.
  num_seqs: as of paged_attention.
  scale: as of paged_attention.
  norm_weight: T[hidden], the weight of an RMS norm of x; None: no norm.
  residual: T[num_tokens, out_features], added to the result; usually x. None: nothing is added, as where the result is
    one device's part of a sum.
  qkv_scale: linear's weight_scale of qkv_weight.
  qkv_zero_point: linear's weight_zero_point of qkv_weight.
  qkv_bias: T[(num_heads + 2 * num_kv_heads) * head_dim].
  q_norm_weight: as of rotary_and_cache, as the next one.
  k_norm_weight: as of rotary_and_cache.
  k_scale: as of paged_attention, as the next two.
  v_scale: as of paged_attention.
  sinks: as of paged_attention.
  out_scale: as qkv_scale, of out_weight.
  out_zero_point: as qkv_zero_point, of out_weight.
  out_bias: T[out_features].
  sliding_window: as of paged_attention.
  soft_cap: as of paged_attention.
  interleaved: as of rotary_embedding.
  eps: a Python number >= 0, the epsilon of all norms.
  weight_offset: as of rms_norm, for all norms.
  round_once: as of rms_norm, for all norms.

Returns:
  ``(out, kv_cache)``: T[num_tokens, out_features], without out_weight T[num_tokens, num_heads * head_dim], and the
  cache with the new tokens. The form that updates in place returns out alone.

Raises:
  TypeError: an argument is no array or number of the kind expected, or has another dtype.
  ValueError: an argument has another shape, or a number is out of its range.

Note: Wrong values in positions, slot_mapping, the sequences' metadata or zero points
  As of the operators above: an error on a CPU, which leaves the cache as it is, and on CUDA NaN in the rows that they
  belong to, where ``XLA_GPU_CHECK_INPUTS=1`` makes it an error too. Wrong zero points of a product that is the front
  end's own are no error, but NaN.
"""

_OPTIONAL = (
    *("norm_weight", "residual", "qkv_scale", "qkv_zero_point", "qkv_bias"),
    *("q_norm_weight", "k_norm_weight", "k_scale", "v_scale", "sinks", "out_scale", "out_zero_point", "out_bias"),
)

# What belongs to its products alone: none of it without them.
OF_PRODUCTS = (
    *("norm_weight", "qkv_scale", "qkv_zero_point", "qkv_bias"),
    *("residual", "out_scale", "out_zero_point", "out_bias"),
)

_GIVEN = (
    *("qkv_weight", "out_weight", "positions", "table", "kv_cache", "slot_mapping"),
    *("context_lens", "block_tables", "query_start_loc", "num_seqs"),
    *_OPTIONAL,
)

_check = Checks("attention_block", {"qkv": "qkv_weight", "query": "kv_cache", "norm_eps": "eps"})
_check_x = Checks("attention_block", {"qkv": "x", "norm_eps": "eps"})
_check_qkv = weight_checks("attention_block", "qkv", "x")
_check_out = weight_checks("attention_block", "out", "qkv_weight")
_check_out_of_x = weight_checks("attention_block", "out", "x")


def _signature(
    x: ArraySpec,
    qkv_weight: ArraySpec | None,
    out_weight: ArraySpec | None,
    positions: ArraySpec,
    table: ArraySpec,
    kv_cache: ArraySpec,
    slot_mapping: ArraySpec,
    context_lens: ArraySpec,
    block_tables: ArraySpec,
    query_start_loc: ArraySpec,
    num_seqs: ArraySpec,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    interleaved: bool = False,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    round_once: bool = False,
    check_inputs: bool = False,
    **optional: ArraySpec | None,
) -> Signature:
    _check.dtype("x", x, FLOATS)
    stored = rotary_embedding.signature_and_cache(
        _check_x if qkv_weight is None else _check,
        _checked_qkv(x, qkv_weight, optional),
        positions,
        table,
        kv_cache,
        slot_mapping,
        k_scale=optional.get("k_scale"),
        v_scale=optional.get("v_scale"),
        q_norm_weight=optional.get("q_norm_weight"),
        k_norm_weight=optional.get("k_norm_weight"),
        interleaved=interleaved,
    )
    query, cache = stored.results
    attended = paged_attention.signature(
        _check,
        False,
        query,
        cache,
        context_lens,
        block_tables,
        query_start_loc,
        num_seqs,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        k_scale=optional.get("k_scale"),
        v_scale=optional.get("v_scale"),
        sinks=optional.get("sinks"),
    )
    out = _checked_out(_check_out_of_x if qkv_weight is None else _check_out, x, query, out_weight, optional)
    arrays = {
        **{"qkv_weight": qkv_weight, "out_weight": out_weight, "positions": positions, "table": table},
        **{"kv_cache": kv_cache, "slot_mapping": slot_mapping, "context_lens": context_lens},
        **{"block_tables": block_tables, "query_start_loc": query_start_loc, "num_seqs": num_seqs},
        **optional,
    }
    attributes = {
        "check_inputs": np.bool_(check_inputs),
        **norm_attributes(_check, "eps", eps, weight_offset, round_once),
        "given": given_bits(_GIVEN, arrays),
        "interleaved": stored.attributes["interleaved"],
        **{name: attended.attributes[name] for name in ("scale", "sliding_window", "soft_cap")},
    }
    # As of rotary_and_cache: rows of qkv_weight are no heads. Inside shard_map a device has its own.
    partitioning = Partitioning(
        operands={}, results=((None, None), (None,) * len(kv_cache.shape)), never_gathered=("kv_cache",)
    )
    return Signature((out, cache), attributes, partitioning=partitioning)


def _checked_qkv(x: ArraySpec, qkv_weight: ArraySpec | None, optional: Mapping[str, ArraySpec | None]) -> ArraySpec:
    """What is rotated and stored: x itself, or the first product."""
    num_tokens, hidden = _check.rank("x", x, "num_tokens, hidden")
    if qkv_weight is None:
        _check_absent("qkv_weight", OF_PRODUCTS[:4], optional)
        return x
    check_norm_weight(_check, optional.get("norm_weight"), x)
    width = check_weight_of(_check_qkv, "qkv", x, hidden, qkv_weight, optional)
    return ArraySpec((num_tokens, width), x.dtype)


def _checked_out(
    check_weight: Checks,
    x: ArraySpec,
    query: ArraySpec,
    out_weight: ArraySpec | None,
    optional: Mapping[str, ArraySpec | None],
) -> ArraySpec:
    """The result: attention's with its heads side by side, or the second product, whose arguments have other names."""
    num_tokens, num_heads, head_dim = query.shape
    width = num_heads * head_dim
    if out_weight is None:
        _check_absent("out_weight", OF_PRODUCTS[4:], optional)
    else:
        width = check_weight_of(check_weight, "out", x, width, out_weight, optional)
    out = ArraySpec((num_tokens, width), x.dtype)
    check_residual(_check, optional.get("residual"), out)
    return out


def _check_absent(weight: str, names: tuple[str, ...], arrays: Mapping[str, ArraySpec | None]) -> None:
    for name in names:
        if arrays.get(name) is not None:
            raise _check.value_error(name, f"None without {weight}", arrays[name])


def uses_kernels(call: OpCall) -> bool:
    """Whether a front end calls the chain of kernels, or the operators one after the other."""
    weights = {"qkv_weight", "out_weight"}.intersection(call.operand_names)
    return not weights or linear.uses_kernel(call)


OPERATOR = Operator(
    "attention_block",
    "(Tensor x, Tensor? qkv_weight, Tensor? out_weight, Tensor positions, Tensor table, Tensor kv_cache, "
    "Tensor slot_mapping, Tensor context_lens, Tensor block_tables, Tensor query_start_loc, Tensor num_seqs, *, "
    "float scale, "
    + "".join(f"Tensor? {name}=None, " for name in _OPTIONAL)
    + "int? sliding_window=None, float? soft_cap=None, bool interleaved=False, float eps=1e-06, "
    "float weight_offset=0.0, bool round_once=False) -> (Tensor, Tensor)",
    _signature,
    _DOCSTRING,
    in_place="kv_cache",
    has_scratch=True,
    int_operands=(IntOperand("num_seqs", bounded_by="context_lens"),),
)
