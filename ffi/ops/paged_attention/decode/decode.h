// The decode path of paged_attention: sequences with few query rows, limited by the bytes of K and V.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_DECODE_H_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_DECODE_H_

#include <cstdint>

#include "ffi/base/status.h"
#include "ffi/device/stream.h"
#include "ffi/ops/paged_attention/paged_attention.h"

namespace xla_gpu {

// Sequences with 1 <= q_len <= kMaxDecodeRows belong to the decode path, longer ones to the prefill path.
inline constexpr int64_t kMaxDecodeRows = 8;

// Whether the shapes speak of sequences of few rows. Then the decode path is launched first, and what there may be of
// the other finds out beneath it that it has nothing to do; else it is the other way round.
constexpr bool DecodeComesFirst(const PagedAttentionParams& shapes) {
  return shapes.num_tokens <= shapes.max_seqs * kMaxDecodeRows;
}

// Bytes at the start of `scratch` that LaunchDecode may use. Depends on shapes and dtypes alone.
int64_t DecodeScratchBytes(const PagedAttentionParams& shapes);

// Computes the rows (out, and lse where wanted) of every sequence with 1 <= q_len <= kMaxDecodeRows whose query rows
// are its own (sequence_metadata.cuh). Rows of such a sequence are NaN if its context_len or a page number that
// its queries see is invalid. If num_tokens <= kMaxDecodeRows it also writes the rows that no sequence owns, so that
// the call needs no other launch; otherwise it writes nothing else. `params.scratch` holds at least DecodeScratchBytes
// and its contents may be anything. The launches depend on shapes, attributes and the device alone.
// NOTE: unless it comes first, the kernel launched just before must be the prefill path's, or one that no other may
// overtake: the first kernel here may begin once that one allows it. So may the kernel behind the last one here, which
// is to wait before it ends.
Status LaunchDecode(const PagedAttentionParams& params, Stream stream);

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_DECODE_H_
