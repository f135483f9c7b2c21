// From the dtype of a call to the C++ type of the kernel that serves it.
#ifndef XLA_GPU_DEVICE_DISPATCH_CUH_
#define XLA_GPU_DEVICE_DISPATCH_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <string>

#include "ffi/base/dtype.h"
#include "ffi/base/status.h"

namespace xla_gpu {

// Returns launch(T()) for float32, float16 and bfloat16, else InvalidArgument. `argument` is what the error names:
// "simple_add: a".
template <typename Launch>
Status DispatchFloat(DType dtype, const char* argument, const Launch& launch) {
  if (IsFloat8(dtype)) {
    return Status::InvalidArgument(std::string(argument) + ": expected float32, float16 or bfloat16, got float8");
  }
  return WithComputeType<float, __half, __nv_bfloat16>(dtype, launch);
}

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_DISPATCH_CUH_
