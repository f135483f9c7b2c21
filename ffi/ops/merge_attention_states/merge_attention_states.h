// merge_attention_states: one attention result from two over disjoint sets of keys.
#ifndef XLA_GPU_OPS_MERGE_ATTENTION_STATES_MERGE_ATTENTION_STATES_H_
#define XLA_GPU_OPS_MERGE_ATTENTION_STATES_MERGE_ATTENTION_STATES_H_

#include <cstdint>

#include "ffi/base/dtype.h"
#include "ffi/base/status.h"
#include "ffi/device/stream.h"
#include "ffi/host/executor.h"

namespace xla_gpu {

struct MergeAttentionStatesParams {
  const void* out_a;   // T[num_rows, head_dim]; a row is one head of one token
  const float* lse_a;  // [num_rows], natural log; -inf: the row saw no key
  const void* out_b;   // T[num_rows, head_dim]
  const float* lse_b;  // [num_rows]
  void* out;           // T[num_rows, head_dim]
  float* lse;          // [num_rows]
  int64_t num_rows;
  int64_t head_dim;
  DType dtype;  // T
};

Status RunMergeAttentionStates(const MergeAttentionStatesParams& params, const Executor& executor);
Status LaunchMergeAttentionStates(const MergeAttentionStatesParams& params, Stream stream);

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_MERGE_ATTENTION_STATES_MERGE_ATTENTION_STATES_H_
