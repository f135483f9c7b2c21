// CUDA errors as a Status that names the file, the line and the expression. For launchers; needs the CUDA headers only.
#ifndef XLA_GPU_COMMON_CUDA_STATUS_H_
#define XLA_GPU_COMMON_CUDA_STATUS_H_

#include <cuda_runtime_api.h>

#include <string>

#include "ffi/common/status.h"

namespace xla_gpu {

inline Status CudaStatus(cudaError_t error, const char* file, int line, const char* expression) {
  if (error == cudaSuccess) return Status::Ok();
  // The path from the sources' root on: where the library was built is nobody's business.
  std::string path(file);
  const size_t root = path.rfind("ffi/");
  if (root != std::string::npos) path.erase(0, root);
  return Status::Internal(path + ":" + std::to_string(line) + ": " + expression + ": " + cudaGetErrorName(error) +
                          " (" + cudaGetErrorString(error) + ")");
}

}  // namespace xla_gpu

// Returns from the caller, a function that returns Status, unless `expression` is cudaSuccess.
#define XLA_GPU_RETURN_IF_CUDA(expression)                                                                   \
  do {                                                                                                       \
    ::xla_gpu::Status xla_gpu_status = ::xla_gpu::CudaStatus((expression), __FILE__, __LINE__, #expression); \
    if (!xla_gpu_status.ok()) return xla_gpu_status;                                                         \
  } while (false)

// After a kernel launch. The error may come from earlier asynchronous work of the same thread.
#define XLA_GPU_RETURN_IF_LAUNCH_FAILED() XLA_GPU_RETURN_IF_CUDA(cudaGetLastError())

#endif  // XLA_GPU_COMMON_CUDA_STATUS_H_
