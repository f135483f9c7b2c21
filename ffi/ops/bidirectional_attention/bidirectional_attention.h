// bidirectional_attention: attention over whole sequences without a cache, each query to all keys of its sequence.
#ifndef XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_BIDIRECTIONAL_ATTENTION_H_
#define XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_BIDIRECTIONAL_ATTENTION_H_

#include <cstdint>

#include "ffi/base/dtype.h"
#include "ffi/base/status.h"
#include "ffi/device/stream.h"
#include "ffi/host/executor.h"

namespace xla_gpu {

struct BidirectionalAttentionParams {
  const void* query;               // T[num_tokens, num_heads, head_dim]
  const void* key;                 // T[num_tokens, num_kv_heads, head_dim]
  const void* value;               // as key
  const int32_t* query_start_loc;  // [max_seqs + 1]
  const int32_t* num_seqs;         // [1]
  void* out;                       // T[num_tokens, num_heads, head_dim]

  int64_t num_tokens;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t max_seqs;

  float scale;
  int64_t sliding_window;  // query i sees key j where |i - j| < sliding_window; 0: all
  float soft_cap;          // 0: off
  DType dtype;             // T
};

// Returns InvalidArgument, naming the operator and the sequence, for a num_seqs or query_start_loc that the operator
// excludes. Reads them as host memory: for CUDA the caller passes copies.
Status CheckBidirectionalAttentionMetadata(const BidirectionalAttentionParams& params);

// Expects metadata that CheckBidirectionalAttentionMetadata accepts.
Status RunBidirectionalAttention(const BidirectionalAttentionParams& params, const Executor& executor);

// Wrong values in device memory make all rows NaN, and are never followed. The bits of a sequence's rows depend on that
// sequence alone.
Status LaunchBidirectionalAttention(const BidirectionalAttentionParams& params, Stream stream);

namespace bidirectional {

// Whether LaunchSm90 computes such a call on the current device: a GPU of compute capability 9.0, 16-bit elements.
Status SuitsSm90(const BidirectionalAttentionParams& params, bool* suits);
Status LaunchSm90(const BidirectionalAttentionParams& params, Stream stream);

}  // namespace bidirectional

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_BIDIRECTIONAL_ATTENTION_H_
