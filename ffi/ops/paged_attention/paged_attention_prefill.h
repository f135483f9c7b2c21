// The path of paged_attention for sequences with more new rows than the decode path takes: prompts and chunks of them.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_PREFILL_H_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_PREFILL_H_

#include <cstdint>

#include "ffi/common/status.h"
#include "ffi/device/stream.h"
#include "ffi/ops/paged_attention/paged_attention.h"

namespace xla_gpu {

// Bytes of scratch that LaunchPrefill needs after those of the decode path: none, one block sees all keys of a row.
constexpr int64_t PrefillScratchBytes(const PagedAttentionParams& /*shapes*/) { return 0; }

// Writes the rows of every sequence of more than kMaxDecodeRows rows, and those that belong to no sequence. One launch.
Status LaunchPrefill(const PagedAttentionParams& params, Stream stream);

// By dtype of query; each in its own file, for the compiler's time.
Status LaunchPrefillF32(const PagedAttentionParams& params, Stream stream);
Status LaunchPrefillF16(const PagedAttentionParams& params, Stream stream);
Status LaunchPrefillBF16(const PagedAttentionParams& params, Stream stream);

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_PREFILL_H_
