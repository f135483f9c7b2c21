// The arguments of grouped_linear's kernel.
#ifndef XLA_GPU_OPS_GROUPED_LINEAR_ARGS_H_
#define XLA_GPU_OPS_GROUPED_LINEAR_ARGS_H_

#include <cstdint>

#include "ffi/ops/grouped_linear/grouped_linear.h"

namespace xla_gpu::grouped_linear {

struct GroupedArgs {
  const void* x;               // T[rows, k]
  const char* weight;          // [num_groups, n, weight_row_bytes]
  const int32_t* group_sizes;  // [num_groups]
  const void* weight_scale;    // as GroupedLinearParams
  const uint8_t* zero_point;   // [num_groups, n, scales], or null
  const void* bias;            // T[num_groups, n], or null
  void* out;                   // T[rows, n]
  int64_t weight_row_bytes;
  int rows;
  int n;
  int k;
  int num_groups;
  int scales;         // along k
  int chunks;         // along k: of a stage's values
  int feature_tiles;  // along n
  int stages;
  WeightScale scale;
};

}  // namespace xla_gpu::grouped_linear

#endif  // XLA_GPU_OPS_GROUPED_LINEAR_ARGS_H_
