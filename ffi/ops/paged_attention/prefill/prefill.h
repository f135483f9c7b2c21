// The path of paged_attention for sequences with more new rows than the decode path takes: prompts and chunks of them.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_PREFILL_H_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_PREFILL_H_

#include <cstdint>

#include "ffi/base/status.h"
#include "ffi/device/stream.h"
#include "ffi/ops/paged_attention/paged_attention.h"

namespace xla_gpu {

// Where the prefill path's part of the call's scratch begins, in bytes: behind the decode path's. From shapes alone.
int64_t PrefillScratchBegin(const PagedAttentionCall& shapes);

// Whether the current device's kernel for these shapes splits the keys of few rows (split_kv.h).
Status PrefillSplitsKeys(const PagedAttentionParams& shapes, bool* splits);

// Writes the rows of every sequence of more than max_decode_tokens tokens, and the padding rows; with
// `rare_decode_rows` taken, all. Two launches where sequences may be split, else one; `prefill_kernels` says which of
// them. With a tree_mask, which PrefillSplitsKeys must hold for, the call needs no other launch: max_decode_tokens is
// 0, and sequences of more than MaxTreeTokens() rows become NaN.
Status LaunchPrefill(const PagedAttentionCall& params, Stream stream);

// Both by the dtype of queries. Each has its own source file in instantiations/, so that they compile in parallel.
namespace prefill {
Status LaunchF32(const PagedAttentionCall& params, Stream stream);
Status LaunchF16(const PagedAttentionCall& params, Stream stream);
Status LaunchBF16(const PagedAttentionCall& params, Stream stream);
Status SplitsKeysF16(const PagedAttentionParams& shapes, bool* splits);
Status SplitsKeysBF16(const PagedAttentionParams& shapes, bool* splits);
}  // namespace prefill

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_PREFILL_H_
