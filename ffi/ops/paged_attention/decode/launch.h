// The launches of the decode kernels. A split-KV kernel is compiled for one cache format, head size and tile shape; the
// combine kernels, which stand in launch.cu, serve them all.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_LAUNCH_H_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_LAUNCH_H_

#include <cstdint>

#include "ffi/base/status.h"
#include "ffi/device/stream.h"
#include "ffi/ops/paged_attention/decode/params.h"
#include "ffi/ops/paged_attention/paged_attention.h"

namespace xla_gpu::decode {

// A split-KV kernel, and what its launch depends on.
struct SplitKvKernel {
  void (*kernel)(DecodeArgs);
  int threads;
  int shared_bytes;
  int element_bytes;  // of the cache
  int block_keys_log2;
  int tile_rows_log2;
};

// The kernel's two variants (HasLargeSharedMemory). Each architecture has code for one of them.
struct SplitKvVariants {
  SplitKvKernel large;
  SplitKvKernel small;
};

// Launches the variant that the current device has code for, and a combine kernel.
Status LaunchKernels(const PagedAttentionCall& params, const KernelConfig& config, const SplitKvVariants& variants,
                     Stream stream);

// Launches a combine kernel that LaunchKernels has left out.
Status LaunchCombine(const SharedCall& call, Stream stream);

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_LAUNCH_H_
