// CUDA errors as a Status that names the file, the line and the expression. For launchers; needs the CUDA headers only.
#ifndef XLA_GPU_BASE_CUDA_STATUS_H_
#define XLA_GPU_BASE_CUDA_STATUS_H_

#include <cuda_runtime_api.h>

#include "ffi/base/status.h"

namespace xla_gpu {

// The Status of an error. Clears the one that the CUDA runtime keeps for this thread.
Status CudaFailure(cudaError_t error, const char* file, int line, const char* expression);

}  // namespace xla_gpu

// Returns from the caller, a function that returns Status, unless `expression` is cudaSuccess.
#define XLA_GPU_RETURN_IF_CUDA(expression)                                              \
  do {                                                                                  \
    if (const cudaError_t xla_gpu_error = (expression); xla_gpu_error != cudaSuccess) { \
      return ::xla_gpu::CudaFailure(xla_gpu_error, __FILE__, __LINE__, #expression);    \
    }                                                                                   \
  } while (false)

// After a kernel launch. The error may come from earlier asynchronous work of the same thread.
#define XLA_GPU_RETURN_IF_LAUNCH_FAILED() XLA_GPU_RETURN_IF_CUDA(cudaGetLastError())

#endif  // XLA_GPU_BASE_CUDA_STATUS_H_
