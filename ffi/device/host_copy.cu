#include <cuda_runtime.h>

#include <string>

#include "ffi/device/host_copy.h"

namespace xla_gpu {
namespace {

Status Failed(const char* what, cudaError_t error) {
  return Status::Internal(std::string(what) + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

}  // namespace

Status CopyToHost(void* destination, const void* source, size_t size, Stream stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (cudaError_t error = cudaStreamIsCapturing(stream, &capture)) return Failed("cudaStreamIsCapturing", error);
  if (capture != cudaStreamCaptureStatusNone) {
    return Status::InvalidArgument(
        "XLA_GPU_CHECK_INPUTS=1 cannot look at device memory while its work is captured into a CUDA graph: run outside "
        "of the capture, under XLA with XLA_FLAGS=--xla_gpu_enable_command_buffer=");
  }
  if (size == 0) return Status::Ok();
  if (cudaError_t error = cudaMemcpyAsync(destination, source, size, cudaMemcpyDeviceToHost, stream)) {
    return Failed("cudaMemcpyAsync", error);
  }
  if (cudaError_t error = cudaStreamSynchronize(stream)) return Failed("cudaStreamSynchronize", error);
  return Status::Ok();
}

Status CopyOnDevice(void* destination, const void* source, size_t size, Stream stream) {
  if (cudaError_t error = cudaMemcpyAsync(destination, source, size, cudaMemcpyDeviceToDevice, stream)) {
    return Failed("cudaMemcpyAsync", error);
  }
  return Status::Ok();
}

}  // namespace xla_gpu
