"""What is measured side by side: this package, and each peer that is installed.

FlashAttention-3 as vLLM builds it: FA3_LIBRARY names `_vllm_fa3_C.abi3.so` out of vllm's wheel.
FlashInfer: `pip install flashinfer-python`; compiles its kernels at first use, one for each head size, and another for
windows, which takes a minute or two. attention.py --warm-up-peers has that done beforehand.
cuDNN and FlashAttention-2 come with PyTorch; they know no pages and get dense K and V, for whole prompts of one length.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import torch
from benchmarks.gpu_inputs import Inputs
from torch.nn.attention import SDPBackend, sdpa_kernel

Call = Callable[[], torch.Tensor]


class Unsuited(Exception):
    """This implementation does not do such a load."""


class XlaGpu:
    name = "xla_gpu"
    paged = True

    def prepare(self, inputs: Inputs) -> Call:
        import xla_gpu.torch

        case = inputs.case
        options = {"scale": case.softmax_scale, "sliding_window": case.sliding_window, **inputs.scales}
        options["soft_cap"] = case.soft_cap
        arguments = inputs.arguments()
        return lambda: xla_gpu.torch.paged_attention(*arguments, **options)


class FlashAttention3:
    name = "FA3"
    paged = True

    def __init__(self) -> None:
        torch.ops.load_library(os.environ["FA3_LIBRARY"])

    def prepare(self, inputs: Inputs) -> Call:
        if inputs.scales:
            raise Unsuited("float8 caches need a float8 query")
        k, v = inputs.kv_cache
        return self.call(inputs, k, v, inputs.context_lens, inputs.block_tables, None)

    def call(self, inputs: Inputs, k, v, used, tables, k_starts, causal: bool = True) -> Call:
        case = inputs.case
        longest_query = max(rows for rows, _ in case.sequences)
        longest = max(context for _, context in case.sequences)
        window = (case.sliding_window or 0) - 1
        # fwd(q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
        #     max_q, max_k, page_table, kv_batch_idx, leftpad, rotary x3, descale x3, scale, causal, window x2, softcap,
        #     interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin, sinks, cp x3)
        arguments = (
            *(inputs.query, k, v, None, None, None, None, inputs.query_start_loc, k_starts, None, None, used),
            *(longest_query, longest, tables, None, None, None, None, None, None, None, None, case.softmax_scale),
            *(
                causal,
                window,
                (0 if causal else window) if case.sliding_window else -1,
                case.soft_cap or 0.0,
                True,
                None,
                0,
                None,
                0,
                None,
                1,
                0,
                None,
            ),
        )
        return lambda: torch.ops._vllm_fa3_C.fwd(*arguments)[0]


class FlashAttention3Dense(FlashAttention3):
    name = "FA3 dense"
    paged = False

    def prepare(self, inputs: Inputs) -> Call:
        k, v = _dense(inputs)
        return self.call(inputs, k, v, None, None, inputs.query_start_loc)


class FlashInfer:
    paged = True
    compiles = True

    def __init__(self, backend: str, all_kernels: bool) -> None:
        self.backend, self.all_kernels = backend, all_kernels
        self.name = f"FlashInfer {backend}"

    def prepare(self, inputs: Inputs) -> Call:
        case = inputs.case
        if inputs.scales:
            raise Unsuited("left out: the scales' meaning differs")
        if not self.all_kernels and (case.head_dim != 128 or case.sliding_window or case.soft_cap):
            raise Unsuited("another kernel to compile, for a load or two")
        import flashinfer

        pages = [-(-context // case.page_size) for _, context in case.sequences]
        indices = torch.cat([row[:n] for row, n in zip(inputs.block_tables, pages, strict=True)])
        starts, last = (
            torch.tensor(values, dtype=torch.int32, device=inputs.query.device)
            for values in (
                [sum(pages[:i]) for i in range(len(pages) + 1)],
                [(context - 1) % case.page_size + 1 for _, context in case.sequences],
            )
        )
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=inputs.query.device)
        heads = (case.num_heads, case.num_kv_heads, case.head_dim)
        out, cache = torch.empty_like(inputs.query), tuple(inputs.kv_cache)
        window = (case.sliding_window or 0) - 1
        if all(rows == 1 for rows, _ in case.sequences):
            if self.backend == "fa3":
                raise Unsuited("a prefill backend")
            tensor_cores = self.backend == "tensor cores"
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
            wrapper.plan(
                *(starts, indices, last, *heads, case.page_size),
                window_left=window,
                logits_soft_cap=case.soft_cap,
                q_data_type=inputs.query.dtype,
                kv_data_type=inputs.kv_cache.dtype,
            )
        else:
            if self.backend == "tensor cores":
                raise Unsuited("a decode backend")
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=self.backend)
            wrapper.plan(
                *(inputs.query_start_loc, starts, indices, last, *heads, case.page_size),
                causal=True,
                window_left=window,
                logits_soft_cap=case.soft_cap,
                q_data_type=inputs.query.dtype,
                kv_data_type=inputs.kv_cache.dtype,
            )
        return lambda: wrapper.run(inputs.query, cache, out=out)


class Sdpa:
    paged = False

    def __init__(self, name: str, backend: SDPBackend) -> None:
        self.name, self.backend = name, backend

    def prepare(self, inputs: Inputs) -> Call:
        case = inputs.case
        if len(set(case.sequences)) != 1:
            raise Unsuited("one length alone")
        batch, tokens = len(case.sequences), case.sequences[0][0]

        q, k, v = (x.view(batch, tokens, -1, case.head_dim).transpose(1, 2) for x in (inputs.query, *_dense(inputs)))
        options = {"is_causal": True, "scale": case.softmax_scale, "enable_gqa": case.num_heads != case.num_kv_heads}

        def call() -> torch.Tensor:
            with sdpa_kernel(self.backend):
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
            return out.transpose(1, 2).reshape(inputs.query.shape)

        return call


def _dense(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [num_tokens, num_kv_heads, head_dim] of whole prompts, in the order of their tokens."""
    case = inputs.case
    whole = all(rows == context and context % case.page_size == 0 for rows, context in case.sequences)
    plain = not (case.sliding_window or case.soft_cap or inputs.scales)
    if not whole or not plain or max(rows for rows, _ in case.sequences) == 1:
        raise Unsuited("dense K and V, whole prompts without a window or soft cap alone")
    counts = [context // case.page_size for _, context in case.sequences]
    pages = torch.cat([row[:count] for row, count in zip(inputs.block_tables, counts, strict=True)]).long()
    k, v = (half[pages].view(-1, case.num_kv_heads, case.head_dim) for half in inputs.kv_cache)
    return k, v


def installed(all_kernels: bool = False) -> list:
    """This package, then the peers found on this machine."""
    found: list = [XlaGpu()]
    if os.environ.get("FA3_LIBRARY"):
        found += [FlashAttention3(), FlashAttention3Dense()]
    if importlib.util.find_spec("flashinfer"):
        found += [FlashInfer(backend, all_kernels) for backend in ("fa2", "tensor cores", "fa3")]
    return [*found, Sdpa("cuDNN dense", SDPBackend.CUDNN_ATTENTION), Sdpa("FA2 dense", SDPBackend.FLASH_ATTENTION)]
