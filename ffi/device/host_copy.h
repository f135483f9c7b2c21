// Copies of device memory, and what XLA_GPU_CHECK_INPUTS=1 needs beside its kernels: metadata on the host, and the end
// of what was launched. Both wait for the stream.
#ifndef XLA_GPU_DEVICE_HOST_COPY_H_
#define XLA_GPU_DEVICE_HOST_COPY_H_

#include <cstddef>

#include "ffi/base/status.h"
#include "ffi/device/stream.h"

namespace xla_gpu {

// Copies `size` bytes to host memory and waits for `stream`. An error while the stream is being captured into a CUDA
// graph, which forbids waiting.
Status CopyToHost(void* destination, const void* source, size_t size, Stream stream);

// Waits for `stream`; the same error while it is being captured.
Status WaitForStream(Stream stream);

// The CUDA device of the calling thread.
Status CurrentDevice(int* device_ordinal);

// Enqueues a copy from device memory to device memory.
Status CopyOnDevice(void* destination, const void* source, size_t size, Stream stream);

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_HOST_COPY_H_
