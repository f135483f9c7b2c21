// rms_norm: the RMS norm of rows, with or without a residual that is added first.
#ifndef XLA_GPU_OPS_RMS_NORM_RMS_NORM_H_
#define XLA_GPU_OPS_RMS_NORM_RMS_NORM_H_

#include <cstdint>

#include "ffi/base/dtype.h"
#include "ffi/base/status.h"
#include "ffi/device/launch_order.h"
#include "ffi/device/stream.h"
#include "ffi/host/executor.h"

namespace xla_gpu {

struct RmsNormParams {
  const void* x;         // T[num_rows, size]
  const void* residual;  // T[num_rows, size]; null: none
  const void* weight;    // T[size]
  void* out;             // T[num_rows, size]
  void* sum;             // T[num_rows, size], x + residual; null without a residual
  int64_t num_rows;
  int64_t size;
  float eps;
  float weight_offset;  // added to the weight
  bool round_once;      // multiply by the weight in float32; else the normed row is rounded to T first
  DType dtype;          // T
};

Status RunRmsNorm(const RmsNormParams& params, const Executor& executor);
Status LaunchRmsNorm(const RmsNormParams& params, Stream stream, LaunchOrder order = LaunchOrder::kFirst);

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_RMS_NORM_RMS_NORM_H_
