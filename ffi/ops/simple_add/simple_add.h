// simple_add: element-wise a + b. The smallest operator, and the template for new ones.
#ifndef XLA_GPU_OPS_SIMPLE_ADD_SIMPLE_ADD_H_
#define XLA_GPU_OPS_SIMPLE_ADD_SIMPLE_ADD_H_

#include <cstdint>

#include "ffi/base/dtype.h"
#include "ffi/base/status.h"
#include "ffi/device/stream.h"
#include "ffi/host/executor.h"

namespace xla_gpu {

struct SimpleAddParams {
  const void* a;  // T[size]
  const void* b;  // T[size]
  void* out;      // T[size]
  int64_t size;
  DType dtype;  // T
};

Status RunSimpleAdd(const SimpleAddParams& params, const Executor& executor);
Status LaunchSimpleAdd(const SimpleAddParams& params, Stream stream);

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_SIMPLE_ADD_SIMPLE_ADD_H_
