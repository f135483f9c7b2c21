// A CUDA stream as an opaque pointer: cudaStream_t is a pointer to CUstream_st. Headers that are compiled without CUDA
// need no CUDA header for it.
#ifndef XLA_GPU_DEVICE_STREAM_H_
#define XLA_GPU_DEVICE_STREAM_H_

struct CUstream_st;

namespace xla_gpu {

using Stream = CUstream_st*;

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_STREAM_H_
