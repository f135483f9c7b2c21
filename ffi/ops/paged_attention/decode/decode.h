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

// Whether the shapes suggest decode sequences: there are few tokens for each sequence. The decode path is then launched
// first, and the prefill path's kernels find out while it runs whether they have anything to do. Otherwise the order is
// reversed.
constexpr bool DecodeComesFirst(const PagedAttentionParams& shapes) {
  return shapes.num_tokens <= shapes.max_seqs * kMaxDecodeRows;
}

// Bytes at the start of `scratch` that LaunchDecode may use. Depends on shapes and dtypes alone.
int64_t DecodeScratchBytes(const PagedAttentionParams& shapes);

// Computes the rows (out, and lse where wanted) of every sequence with 1 <= q_len <= kMaxDecodeRows that owns its query
// rows (sequence_metadata.cuh). Rows of such a sequence are NaN if its context_len, or a page number that its queries
// see, is invalid. With num_tokens <= kMaxDecodeRows it also writes the padding rows, so that the call needs no other
// launch. It writes nothing else. `params.scratch` holds at least DecodeScratchBytes with any contents. The launches
// depend on shapes, attributes and the device alone.
// NOTE: where the decode path does not come first, the kernel launched just before has to be the prefill path's, or one
// without programmatic dependent launch: the first kernel here may start as soon as that one allows it, and does not
// wait. The kernel after the last one here may start early too, and has to wait before it ends.
Status LaunchDecode(const PagedAttentionParams& params, Stream stream);

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_DECODE_H_
