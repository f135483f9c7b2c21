// silu_and_mul and gelu_and_mul: the activation of a row's first half, times its second half.
#ifndef XLA_GPU_OPS_SILU_AND_MUL_SILU_AND_MUL_H_
#define XLA_GPU_OPS_SILU_AND_MUL_SILU_AND_MUL_H_

#include <cstdint>

#include "ffi/base/dtype.h"
#include "ffi/base/status.h"
#include "ffi/device/stream.h"
#include "ffi/host/executor.h"

namespace xla_gpu {

enum class GatedActivation { kSilu, kGeluTanh };

struct ActivationAndMulParams {
  const void* x;  // T[num_rows, 2, size]: gate, up
  void* out;      // T[num_rows, size]
  int64_t num_rows;
  int64_t size;
  GatedActivation activation;
  DType dtype;  // T
};

Status RunActivationAndMul(const ActivationAndMulParams& params, const Executor& executor);
Status LaunchActivationAndMul(const ActivationAndMulParams& params, Stream stream);

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_SILU_AND_MUL_SILU_AND_MUL_H_
