#include "ffi/base/cuda_status.h"

#include <string>

#include "ffi/base/device_code.h"

namespace xla_gpu {
namespace {

// Why a GPU or its driver refuses the library's code: one of them is too old, or the GPU is too new. Empty for other
// errors.
std::string DeviceCodeText(cudaError_t error) {
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

}  // namespace

Status CudaFailure(cudaError_t error, const char* file, int line, const char* expression) {
  // Otherwise the next launch would report it again.
  cudaGetLastError();
  // Relative to the root of the sources: messages do not show where the library was built.
  std::string path(file);
  const size_t root = path.rfind("ffi/");
  if (root != std::string::npos) path.erase(0, root);
  return Status::Internal(path + ":" + std::to_string(line) + ": " + expression + ": " + cudaGetErrorName(error) +
                          " (" + cudaGetErrorString(error) + ")" + DeviceCodeText(error));
}

}  // namespace xla_gpu
