// CUDA errors as a Status that names the file, the line and the expression. For launchers; needs the CUDA headers only.
#ifndef XLA_GPU_BASE_CUDA_STATUS_H_
#define XLA_GPU_BASE_CUDA_STATUS_H_

#include <cuda_runtime_api.h>

#include <string>

#include "ffi/base/device_code.h"
#include "ffi/base/status.h"

namespace xla_gpu {

// Why a GPU or its driver refuses the library's code: one of them is too old, or the GPU is too new. Empty for other
// errors.
inline std::string DeviceCodeText(cudaError_t error) {
  switch (error) {
    case cudaErrorInsufficientDriver:
    case cudaErrorUnsupportedPtxVersion:
      return ": the NVIDIA driver is older than this library's CUDA " XLA_GPU_CUDA_VERSION
             ": update it (nvidia-smi shows the CUDA version that it supports), or build the library with that version";
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidKernelImage:
      break;
    default:
      return {};
  }
  int device = 0, major = 0, minor = 0;
  cudaDeviceProp properties = {};
  if (cudaGetDevice(&device) == cudaSuccess && cudaGetDeviceProperties(&properties, device) == cudaSuccess) {
    major = properties.major;
    minor = properties.minor;
  }
  return ": " + NoDeviceCodeText(properties.name, major, minor, XLA_GPU_CUDA_ARCHITECTURES);
}

inline Status CudaStatus(cudaError_t error, const char* file, int line, const char* expression) {
  if (error == cudaSuccess) return Status::Ok();
  // Clears the error that the CUDA runtime keeps for this thread. Otherwise the next launch would report it again.
  cudaGetLastError();
  // Relative to the root of the sources: messages do not show where the library was built.
  std::string path(file);
  const size_t root = path.rfind("ffi/");
  if (root != std::string::npos) path.erase(0, root);
  return Status::Internal(path + ":" + std::to_string(line) + ": " + expression + ": " + cudaGetErrorName(error) +
                          " (" + cudaGetErrorString(error) + ")" + DeviceCodeText(error));
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

#endif  // XLA_GPU_BASE_CUDA_STATUS_H_
