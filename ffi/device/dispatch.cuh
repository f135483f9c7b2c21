// From the dtype of a call to the C++ type of the kernel that serves it.
#ifndef XLA_GPU_DEVICE_DISPATCH_CUH_
#define XLA_GPU_DEVICE_DISPATCH_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <string>

#include "ffi/base/dtype.h"
#include "ffi/base/status.h"

namespace xla_gpu {

template <typename T>
struct TypeTag {
  using Type = T;
};

// Returns launch(TypeTag<T>()) for float32, float16 and bfloat16, else InvalidArgument. `argument` is what the error
// names: "simple_add: a".
template <typename Launch>
Status DispatchFloat(DType dtype, const char* argument, const Launch& launch) {
  switch (dtype) {
    case DType::kF32:
      return launch(TypeTag<float>());
    case DType::kF16:
      return launch(TypeTag<__half>());
    case DType::kBF16:
      return launch(TypeTag<__nv_bfloat16>());
    case DType::kF8E4M3FN:
    case DType::kF8E5M2:
      break;
  }
  return Status::InvalidArgument(std::string(argument) + ": expected float32, float16 or bfloat16, got float8");
}

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_DISPATCH_CUH_
