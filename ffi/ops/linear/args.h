// The arguments of linear's kernels.
#ifndef XLA_GPU_OPS_LINEAR_ARGS_H_
#define XLA_GPU_OPS_LINEAR_ARGS_H_

#include <cstdint>

#include "ffi/ops/linear/linear.h"

namespace xla_gpu::linear {

struct LinearArgs {
  const void* x;                 // T[rows, k]
  const char* weight;            // [n, weight_row_bytes]
  const void* weight_scale;      // as `scale` says
  const uint8_t* zero_point;     // [n, groups], or null
  const void* bias;              // T[n], or null
  const void* residual;          // T[rows, out_features], or null
  void* out;                     // T[rows, out_features]
  unsigned long long* counters;  // [work tiles]
  float* partials;               // [2 * gridDim.x, row tile, kLinearTileN]
  unsigned long long token;      // of this call; its lowest byte is 0
  int64_t weight_row_bytes;
  int rows;  // at most the kernel's row tile
  int n;
  int k;
  int groups;        // along k: of 128 values
  int chunks;        // along k: of a stage's values
  int units_of_cta;  // a unit is a chunk of a work tile
  int longer_ctas;   // the first so many CTAs have one unit more
  int stages;
  WeightScale scale;
  Activation activation;
  bool x_is_split;  // see LinearParams
};

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_ARGS_H_
