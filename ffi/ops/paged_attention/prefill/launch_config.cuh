// How a prefill kernel is launched.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_LAUNCH_CONFIG_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_LAUNCH_CONFIG_CUH_

#include <cstdint>

#include "ffi/base/cuda_status.h"
#include "ffi/base/status.h"
#include "ffi/device/stream.h"

namespace xla_gpu::prefill {

struct LaunchConfig {
  dim3 grid;
  int threads;
  int shared_bytes;
  bool programmatic;  // programmatic dependent launch: CTAs may start while the kernel before still runs
};

template <typename... Params>
Status Launch(const LaunchConfig& config, Stream stream, void (*kernel)(Params...), const Params&... params) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch = {};
  launch.gridDim = config.grid;
  launch.blockDim = dim3(static_cast<unsigned>(config.threads));
  launch.dynamicSmemBytes = static_cast<size_t>(config.shared_bytes);
  launch.stream = stream;
  launch.attrs = &attribute;
  launch.numAttrs = config.programmatic ? 1 : 0;
  XLA_GPU_RETURN_IF_CUDA(cudaLaunchKernelEx(&launch, kernel, params...));
  return Status::Ok();
}

inline Status CountSms(int64_t* sms) {
  int device, count;
  XLA_GPU_RETURN_IF_CUDA(cudaGetDevice(&device));
  XLA_GPU_RETURN_IF_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  *sms = count;
  return Status::Ok();
}

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_LAUNCH_CONFIG_CUH_
