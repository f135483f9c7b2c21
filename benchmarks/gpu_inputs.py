"""A load's arrays on the GPU: random values, pages in shuffled order."""

from __future__ import annotations

import dataclasses

import torch
from tests.common.cases import AttentionCase

DEVICE = "cuda"  # attention.py's --device
CACHE_DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


@dataclasses.dataclass
class Inputs:
    """One set of arrays; the cache is vLLM's layout, whose halves the peers take as they are."""

    case: AttentionCase
    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    kv_cache: torch.Tensor  # [2, num_pages, page_size, num_kv_heads, head_dim]
    context_lens: torch.Tensor  # int32[seqs]
    block_tables: torch.Tensor  # int32[seqs, pages_per_seq]
    query_start_loc: torch.Tensor  # int32[seqs + 1]
    num_seqs: torch.Tensor  # int32[1]
    scales: dict[str, torch.Tensor]

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """What paged_attention takes by position."""
        return self.query, self.kv_cache, self.context_lens, self.block_tables, self.query_start_loc, self.num_seqs


def build(case: AttentionCase, seed: int = 0) -> Inputs:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=dtype, generator=generator)

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    pages = [-(-context // case.page_size) for _, context in case.sequences]
    kv_cache = normal(2, sum(pages), case.page_size, case.num_kv_heads, case.head_dim)
    scales = {}
    if case.cache_dtype:
        scale = torch.full((1,), 0.02, device=DEVICE)
        kv_cache = (kv_cache / 0.02).clamp(-448, 448).to(CACHE_DTYPES[case.cache_dtype])
        scales = {"k_scale": scale, "v_scale": scale}
    order = torch.randperm(sum(pages), device=DEVICE, dtype=torch.int32, generator=generator)
    tables = torch.zeros(len(pages), max(pages), device=DEVICE, dtype=torch.int32)
    tables[torch.arange(max(pages), device=DEVICE) < int32(pages)[:, None]] = order
    starts = [0]
    for rows, _ in case.sequences:
        starts.append(starts[-1] + rows)
    return Inputs(
        case=case,
        query=normal(starts[-1], case.num_heads, case.head_dim),
        kv_cache=kv_cache,
        context_lens=int32([context for _, context in case.sequences]),
        block_tables=tables,
        query_start_loc=int32(starts),
        num_seqs=int32([len(pages)]),
        scales=scales,
    )


def pick(array: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """array[places], also of float8, for which PyTorch knows no such thing."""
    return array.view(torch.uint8)[places].view(array.dtype) if array.itemsize == 1 else array[places]


def reference(inputs: Inputs, rows: list[int]) -> torch.Tensor:
    """float64 attention of some rows of the batch, [len(rows), num_heads, head_dim]."""
    case, starts = inputs.case, inputs.query_start_loc.tolist()
    results = []
    for row in rows:
        s = next(i for i in range(len(case.sequences)) if starts[i] <= row < starts[i + 1])
        q_len, context = case.sequences[s]
        position = context - q_len + row - starts[s]
        begin = max(0, position + 1 - (case.sliding_window or context))
        pages = inputs.block_tables[s, : -(-context // case.page_size)].long()
        k, v = (
            pick(half, pages).reshape(-1, case.num_kv_heads, case.head_dim)[begin : position + 1].to(torch.float64)
            for half in inputs.kv_cache
        )
        if inputs.scales:
            k, v = k * inputs.scales["k_scale"].double(), v * inputs.scales["v_scale"].double()
        q = inputs.query[row].double().view(case.num_kv_heads, -1, case.head_dim)
        scores = torch.einsum("hgd,khd->hgk", q, k) * case.softmax_scale
        if case.soft_cap:
            scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
        weights = scores.softmax(-1)
        results.append(torch.einsum("hgk,khd->hgd", weights, v).reshape(case.num_heads, case.head_dim))
    return torch.stack(results)
