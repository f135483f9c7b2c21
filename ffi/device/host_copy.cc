#include "ffi/device/host_copy.h"

#include <cuda_runtime.h>

#include "ffi/base/cuda_status.h"

namespace xla_gpu {

namespace {

Status CheckNotCapturing(Stream stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  XLA_GPU_RETURN_IF_CUDA(cudaStreamIsCapturing(stream, &capture));
  if (capture != cudaStreamCaptureStatusNone) {
    return Status::InvalidArgument(
        "XLA_GPU_CHECK_INPUTS=1 cannot look at device memory while its work is captured into a CUDA graph: run outside "
        "of the capture, under XLA with the variable set when the process starts");
  }
  return Status::Ok();
}

}  // namespace

Status WaitForStream(Stream stream) {
  if (Status status = CheckNotCapturing(stream); !status.ok()) return status;
  XLA_GPU_RETURN_IF_CUDA(cudaStreamSynchronize(stream));
  return Status::Ok();
}

Status CurrentDevice(int* device_ordinal) {
  XLA_GPU_RETURN_IF_CUDA(cudaGetDevice(device_ordinal));
  return Status::Ok();
}

Status CopyToHost(void* destination, const void* source, size_t size, Stream stream) {
  if (Status status = CheckNotCapturing(stream); !status.ok()) return status;
  if (size == 0) return Status::Ok();
  XLA_GPU_RETURN_IF_CUDA(cudaMemcpyAsync(destination, source, size, cudaMemcpyDeviceToHost, stream));
  XLA_GPU_RETURN_IF_CUDA(cudaStreamSynchronize(stream));
  return Status::Ok();
}

Status CopyOnDevice(void* destination, const void* source, size_t size, Stream stream) {
  XLA_GPU_RETURN_IF_CUDA(cudaMemcpyAsync(destination, source, size, cudaMemcpyDeviceToDevice, stream));
  return Status::Ok();
}

}  // namespace xla_gpu
