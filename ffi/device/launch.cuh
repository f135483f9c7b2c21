// Launches of the kernels that operators made of several ones chain.
#ifndef XLA_GPU_DEVICE_LAUNCH_CUH_
#define XLA_GPU_DEVICE_LAUNCH_CUH_

#include <cuda_runtime.h>

#include "ffi/base/cuda_status.h"
#include "ffi/device/launch_order.h"
#include "ffi/device/stream.h"

namespace xla_gpu {

template <typename... Params>
Status LaunchKernel(void (*kernel)(Params...), dim3 grid, dim3 threads, size_t shared_bytes, Stream stream,
                    LaunchOrder order, const Params&... params) {
  // The carveout of the kernels around it: an SM must be idle to change it, and then nothing overlaps.
  XLA_GPU_RETURN_IF_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch = {};
  launch.gridDim = grid;
  launch.blockDim = threads;
  launch.dynamicSmemBytes = shared_bytes;
  launch.stream = stream;
  launch.attrs = &attribute;
  if (order == LaunchOrder::kDependent) {
    cudaFuncAttributes code;  // that for older GPUs has no wait
    XLA_GPU_RETURN_IF_CUDA(cudaFuncGetAttributes(&code, kernel));
    launch.numAttrs = code.ptxVersion >= 90 ? 1 : 0;
  }
  XLA_GPU_RETURN_IF_CUDA(cudaLaunchKernelEx(&launch, kernel, params...));
  return Status::Ok();
}

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_LAUNCH_CUH_
