"""What experts compute of rows, in four ways; each row gets what its own experts compute and nothing else.

In 16 bits the rows are brought into the order of their experts, and ``grouped_linear`` multiplies them. There are three
ways in plain operations, chosen by the number of rows: in float32, for sizes that ``grouped_linear`` does not take, and
for many rows.

- A few rows gather the weights of their experts.
- More rows go through all experts, and what an expert computed for rows that are not its own is dropped before the sum.
  While that is bound by reading the weights it costs no more than the experts that were chosen.
- Many rows are sorted by expert and cut into blocks, each with the rows of one expert, which gather its weights.

Quantised weights are read as they are stored; plain operations dequantise them for the product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .._torch.experts_mlp import in_order, swigluoai_and_mul
from .expert_matrices import Matrices

# Rows that go through all experts at once: bounds the memory of what they compute.
_MAX_ROWS = 512

# Bytes of the weights that blocks gather at once.
_GATHERED_BYTES = 1 << 30

# Of what a row costs an expert of a size: what gathering its weights costs. On an H200 they are written once and read
# twice at 4.5 TB/s, and multiplied at 700 TFLOP/s in 16 bits.
_ROWS_PER_GATHER = 466

# Blocks also sort, and move rows: they are to save this share of what all rows through all experts would cost.
_SAVED = 0.3

# Rows of an expert on average up to which grouped_linear takes less time. On an H200 4096 rows of 128 experts of width
# 768, 256 for each, take it 2.2 ms a layer in bfloat16 where blocks take 2.7; 8192 rows take 4.1, with blocks 3.8.
_ROWS_OF_GROUP = 256

_Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


# Of the products with gate and up, by vLLM's names.
ACTIVATIONS: dict[str, _Function] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "swigluoai": swigluoai_and_mul,
}


def _scaled(out: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Products T[..., n], scaled by float32[..., n]."""
    return out if scale is None else (out.float() * scale).to(out.dtype)


def _of_rows(scale: torch.Tensor | None) -> torch.Tensor | None:
    """For several rows of each matrix."""
    return None if scale is None else scale[:, None]


def weighted_sum(
    x: torch.Tensor,
    w13: Matrices,
    w2: Matrices,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    activation: str,
    others: bool = False,
) -> torch.Tensor:
    """The weighted sum of what each row's experts compute, but for the bias of the second product.

    Args:
      x: T[rows, hidden].
      w13: [num_experts, 2 * intermediate, hidden], gate and up.
      w2: [num_experts, hidden, intermediate], down.
      weights: float32[rows, top_k], of routing.of_layer.
      chosen: int64[rows, top_k], of routing.of_layer.
      activation: vLLM's name of the function of the gate.
      others: whether devices have experts of their own, and those of others are in ``chosen`` as num_experts. They add
        nothing.
    """
    act = ACTIVATIONS[activation]
    rows, top_k = chosen.shape
    num_experts = w13.weight.shape[0]
    takes_groups = all(matrix.takes_groups(x.dtype) for matrix in (w13, w2))
    if takes_groups and goes_by_groups(rows, top_k, num_experts, others):
        return _by_groups(x, w13, w2, weights, chosen, act)
    own = chosen < num_experts if others else None
    if rows * top_k < num_experts:
        return _by_own_weights(x, w13, w2, weights, chosen, act, own)
    if size := block_size(rows, top_k, num_experts):
        return _by_blocks(x, w13, w2, weights, chosen, act, size, own)
    parts = zip(x.split(_MAX_ROWS), weights.split(_MAX_ROWS), chosen.split(_MAX_ROWS), strict=True)
    return torch.cat([_by_all(x, w13, w2, weights, chosen, act) for x, weights, chosen in parts])


def goes_by_groups(rows: int, top_k: int, num_experts: int, others: bool = False) -> bool:
    """Whether ``grouped_linear`` takes the least time.

    Blocks would have room for the pairs of all devices' experts on each, and compute it.
    """
    return others or rows * top_k <= _ROWS_OF_GROUP * num_experts


def block_size(rows: int, top_k: int, num_experts: int) -> int | None:
    """Rows of a block for the least time; None where all rows through all experts are about as fast."""

    def cost(size: int) -> float:
        return num_blocks(rows * top_k, num_experts, size) * (size + _ROWS_PER_GATHER)

    best = min((1 << exponent for exponent in range(5, 13)), key=cost)
    return best if cost(best) < (1 - _SAVED) * rows * num_experts else None


def num_blocks(pairs: int, num_experts: int, size: int) -> int:
    """How many blocks hold that many pairs of a row and an expert, however they are spread over the experts."""
    return pairs // size + min(num_experts, pairs)


def elements_of_step(
    rows: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    intermediate: int,
    item: int,
    quantised: bool = False,
    takes_groups: bool = False,
    others: bool = False,
) -> int:
    """An upper bound of what experts keep beside their weights in a step of ``rows``, in elements of ``item`` bytes.

    Args:
      rows: of the step.
      top_k: experts of a row.
      num_experts: of a layer, that a device has.
      hidden: the experts' inputs.
      intermediate: their width.
      item: bytes of an element.
      quantised: their weights, which plain operations dequantise.
      takes_groups: whether ``grouped_linear`` takes them.
      others: whether other devices have others.
    """
    if takes_groups and goes_by_groups(rows, top_k, num_experts, others):
        return rows * top_k * (3 * hidden + 3 * intermediate)
    matrices = 3 * hidden * intermediate  # of an expert
    if (pairs := rows * top_k) < num_experts:
        return pairs * (matrices + 3 * hidden + 3 * intermediate)
    if (size := block_size(rows, top_k, num_experts)) is None:
        by_all = min(rows, _MAX_ROWS) * num_experts * (4 * intermediate + 2 * hidden)
        return by_all + num_experts * matrices if quantised else by_all
    in_blocks = num_blocks(pairs, num_experts, size) * size * (3 * hidden + 3 * intermediate)
    # XLA may gather for the next blocks before the last ones are done.
    return in_blocks + 2 * max(_GATHERED_BYTES // item, matrices)


def _by_groups(
    x: torch.Tensor, w13: Matrices, w2: Matrices, weights: torch.Tensor, chosen: torch.Tensor, act: _Function
) -> torch.Tensor:
    (rows, top_k), num_experts = chosen.shape, w13.weight.shape[0]
    sizes, pair_at, place_of = in_order(chosen.reshape(-1).to(torch.int32), num_experts)
    gate, up = w13.of_groups(x.index_select(0, pair_at // top_k), sizes).chunk(2, -1)
    out = w2._replace(bias=None).of_groups(act(gate, up), sizes)
    # Pairs of other devices' experts come last, behind the sum of the sizes, where grouped_linear's results are 0.
    return _sum_of_pairs(out.index_select(0, place_of).view(rows, top_k, -1), weights)


def _by_own_weights(
    x: torch.Tensor,
    w13: Matrices,
    w2: Matrices,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    act: _Function,
    own: torch.Tensor | None,
) -> torch.Tensor:
    rows, top_k = chosen.shape
    if own is not None:
        chosen = chosen.clamp(max=w13.weight.shape[0] - 1)
    own13, scale13 = w13.values(x.dtype, chosen.reshape(-1))  # [rows * top_k, 2 * intermediate, hidden]
    own2, scale2 = w2.values(x.dtype, chosen.reshape(-1))
    repeated = x[:, None].expand(rows, top_k, x.shape[1]).reshape(rows * top_k, x.shape[1], 1)
    products = _scaled(torch.bmm(own13, repeated)[..., 0], scale13)
    gate, up = w13.added(products[:, None], chosen.reshape(-1))[:, 0].chunk(2, -1)
    out = _scaled(torch.bmm(own2, act(gate, up)[..., None])[..., 0], scale2)
    return _sum_of_pairs(out.view(rows, top_k, -1), weights, own)


def _by_all(
    x: torch.Tensor, w13: Matrices, w2: Matrices, weights: torch.Tensor, chosen: torch.Tensor, act: _Function
) -> torch.Tensor:
    (all13, scale13), (all2, scale2) = w13.values(x.dtype), w2.values(x.dtype)
    if x.dtype is torch.float32:  # torch_xla's einsum does not pass on that products are to be in float32, not TF32
        products = F.linear(x, all13.flatten(0, 1)).view(x.shape[0], *all13.shape[:2]).transpose(0, 1)
        gate, up = w13.added(_scaled(products, _of_rows(scale13))).chunk(2, -1)
        out = _scaled(torch.bmm(act(gate, up), all2.transpose(1, 2)), _of_rows(scale2))
    else:
        products = torch.einsum("th,eoh->eto", x, all13)
        gate, up = w13.added(_scaled(products, _of_rows(scale13))).chunk(2, -1)
        out = _scaled(torch.einsum("eti,ehi->eth", act(gate, up), all2), _of_rows(scale2))
    is_own = chosen[..., None] == torch.arange(out.shape[0], device=x.device)  # [rows, top_k, num_experts]
    share = torch.where(is_own, weights[..., None], torch.zeros_like(weights)[..., None]).sum(1)
    own = is_own.any(1).t()[..., None]
    # where, not a product with 0: what is infinite for others must not become NaN here.
    weighted = torch.where(own, out * share.t()[..., None].to(x.dtype), torch.zeros_like(out))
    return weighted.sum(0)


def _by_blocks(
    x: torch.Tensor,
    w13: Matrices,
    w2: Matrices,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    act: _Function,
    size: int,
    own: torch.Tensor | None,
) -> torch.Tensor:
    (rows, top_k), (num_experts, hidden, _) = chosen.shape, w2.weight.shape
    intermediate = w13.weight.shape[1] // 2
    pairs, blocks = rows * top_k, num_blocks(rows * top_k, num_experts, size)

    def count(end: int) -> torch.Tensor:
        return torch.arange(end, dtype=torch.int32, device=x.device)

    # Pairs of a row and an expert, in the order of experts.
    sorted_experts, pair_at = chosen.reshape(-1).to(torch.int32).sort()
    expert_of_pair = sorted_experts + 0  # an index that is one of several results of a node aborts torch_xla 2.9
    counts = (expert_of_pair[:, None] == count(num_experts)).to(torch.int32).sum(0, dtype=torch.int32)
    starts = counts.cumsum(0, dtype=torch.int32) - counts
    blocks_of = (counts + (size - 1)) // size
    block_ends = blocks_of.cumsum(0, dtype=torch.int32)
    first_blocks = block_ends - blocks_of
    # The expert of each block; of those that are left over any.
    expert = (count(blocks)[:, None] >= block_ends).to(torch.int32).sum(1, dtype=torch.int32).clamp(max=num_experts - 1)
    # Which pair each row of the blocks is; padding rows compute what is not read.
    first_pair = (count(blocks) - first_blocks.index_select(0, expert)) * size + starts.index_select(0, expert)
    pair_index = (first_pair[:, None] + count(size)).clamp(0, pairs - 1).reshape(-1)
    gathered = x.index_select(0, pair_at.index_select(0, pair_index) // top_k).view(blocks, size, -1)
    at_once = max(1, _GATHERED_BYTES // (3 * hidden * intermediate * x.element_size()))
    parts = []
    for begin in range(0, blocks, at_once):
        # Slices, not split, for the same reason.
        part, part_expert = gathered[begin : begin + at_once], expert[begin : begin + at_once]
        (own13, scale13), (own2, scale2) = w13.values(x.dtype, part_expert), w2.values(x.dtype, part_expert)
        products = _scaled(torch.bmm(part, own13.transpose(1, 2)), _of_rows(scale13))
        gate, up = w13.added(products, part_expert).chunk(2, -1)
        parts.append(_scaled(torch.bmm(act(gate, up), own2.transpose(1, 2)), _of_rows(scale2)))
    out = torch.cat(parts).view(blocks * size, -1)
    # Where each pair's result is, in the order of rows again.
    first_row = first_blocks * size - starts
    if own is not None:
        expert_of_pair = expert_of_pair.clamp(max=num_experts - 1)
    result_at = first_row.index_select(0, expert_of_pair) + count(pairs)
    if own is not None:
        result_at = result_at.clamp(max=blocks * size - 1)
    result_of = torch.zeros_like(result_at).scatter(0, pair_at, result_at)
    return _sum_of_pairs(out.index_select(0, result_of).view(rows, top_k, -1), weights, own)


def _sum_of_pairs(out: torch.Tensor, weights: torch.Tensor, own: torch.Tensor | None = None) -> torch.Tensor:
    """T[rows, hidden] of T[rows, top_k, hidden]; own: bool[rows, top_k], which count, None: all."""
    if own is not None:
        # where, not a product with 0: what was computed for the others may be infinite.
        out = torch.where(own[..., None], out, torch.zeros_like(out))
    return (out * weights[..., None].to(out.dtype)).sum(1)


def local_experts(chosen: torch.Tensor, first: torch.Tensor, num_experts: int) -> torch.Tensor:
    """``chosen`` as the device has them whose ``num_experts`` begin at ``first``, int[1]; others are num_experts."""
    local = chosen - first
    return torch.where((local >= 0) & (local < num_experts), local, torch.full_like(local, num_experts))


def bias_of_sum(w2: Matrices, weights: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out`` with the biases of the second products, weighted as these."""
    if w2.bias is None:
        return out
    is_own = chosen[..., None] == torch.arange(w2.bias.shape[0], device=chosen.device)  # [rows, top_k, num_experts]
    share = torch.where(is_own, weights[..., None], torch.zeros_like(weights)[..., None]).sum(1)
    return out + (share @ w2.bias.float()).to(out.dtype)
