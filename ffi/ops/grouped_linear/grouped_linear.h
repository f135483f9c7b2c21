// grouped_linear: products of groups of rows, each with a weight matrix of its own, plain or quantised.
#ifndef XLA_GPU_OPS_GROUPED_LINEAR_GROUPED_LINEAR_H_
#define XLA_GPU_OPS_GROUPED_LINEAR_GROUPED_LINEAR_H_

#include <cstdint>

#include "ffi/base/dtype.h"
#include "ffi/base/status.h"
#include "ffi/device/stream.h"
#include "ffi/host/executor.h"
#include "ffi/ops/linear/linear.h"

namespace xla_gpu {

// linear's formats, and one more.
enum class GroupedFormat {
  kPlain,   // T[num_groups, n, k]
  kFloat8,  // float8_e4m3fn[num_groups, n, k]
  kInt8,    // int8[num_groups, n, k]
  kInt4,    // uint8[num_groups, n, k / 2], as linear's
  kMxfp4,   // uint8[num_groups, n, k / 2]: e2m1, the value of even index in a byte's lower half
};

inline constexpr int64_t kMxfp4Group = 32;  // values with one scale
inline constexpr int64_t kMaxGroups = 1024;

struct GroupedLinearParams {
  const void* x;               // T[rows, k]
  const void* weight;          // [num_groups, n, k] in `format`
  const int32_t* group_sizes;  // [num_groups]
  // kChannel: float32[num_groups, n]; kBlock: float32[num_groups, ceil(n / 128), ceil(k / 128)]; kGroup with kInt4:
  // T[num_groups, n, k / 128], with kMxfp4: uint8[num_groups, n, k / 32], exponents of 2 with 127 added
  const void* weight_scale;
  const uint8_t* zero_point;  // [num_groups, n, k / 128], or null: 8; with kInt4 alone
  const void* bias;           // T[num_groups, n], or null
  void* out;                  // T[rows, n]
  int64_t rows;
  int64_t n;
  int64_t k;
  int64_t num_groups;
  DType dtype;  // T: float16 or bfloat16
  GroupedFormat format;
  WeightScale scale;  // but kTensor
};

Status RunGroupedLinear(const GroupedLinearParams& params, const Executor& executor);
Status LaunchGroupedLinear(const GroupedLinearParams& params, Stream stream);

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_GROUPED_LINEAR_GROUPED_LINEAR_H_
