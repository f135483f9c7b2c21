// accumulate: total + scale * reversed(x). An operator with scratch memory and an in-place form, for a test.
#ifndef XLA_GPU_OPS_ACCUMULATE_ACCUMULATE_H_
#define XLA_GPU_OPS_ACCUMULATE_ACCUMULATE_H_

#include <cstdint>

#include "ffi/base/status.h"
#include "ffi/host/executor.h"

namespace xla_gpu {

struct AccumulateParams {
  const float* x;  // [size]
  float* total;    // [size], updated in place
  void* scratch;   // float[size]
  int64_t size;
  float scale;
};

Status RunAccumulate(const AccumulateParams& params, const Executor& executor);

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_ACCUMULATE_ACCUMULATE_H_
