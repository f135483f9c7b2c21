// Grids and launches of the prefill kernels.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_PREFILL_LAUNCH_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_PREFILL_LAUNCH_CUH_

#include <algorithm>
#include <cstdint>

#include "ffi/common/cuda_status.h"
#include "ffi/ops/paged_attention/paged_attention_decode.h"
#include "ffi/ops/paged_attention/paged_attention_prefill_mma.cuh"
#include "ffi/ops/paged_attention/paged_attention_prefill_wgmma.cuh"

namespace xla_gpu {

// A block for each tile that there can be, from shapes alone, and one more for the rows that belong to no sequence. The
// grid is that large rather than as large as the GPU: the hardware hands out blocks as others end, which is the even
// load that a counter would give, and needs no memory that somebody has to reset.
inline unsigned PrefillBlocks(const PagedAttentionParams& params, int rows_per_tile) {
  const int64_t group = params.num_heads / params.num_kv_heads;
  const int64_t sequences = std::min(params.max_seqs, params.num_tokens / (kMaxDecodeRows + 1));
  // Only the last tile of a sequence may be partly filled.
  const int64_t tiles = params.num_tokens * group / rows_per_tile + sequences;
  return static_cast<unsigned>(tiles * params.num_kv_heads + 1);
}

template <typename Kernel>
Status LaunchPrefillKernel(void (*kernel)(PagedAttentionParams), const PagedAttentionParams& params, Stream stream) {
  XLA_GPU_RETURN_IF_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::kSharedBytes));
  kernel<<<PrefillBlocks(params, Kernel::kRows), Kernel::kThreads, Kernel::kSharedBytes, stream>>>(params);
  XLA_GPU_RETURN_IF_LAUNCH_FAILED();
  return Status::Ok();
}

template <typename Kernel>
Status LaunchPrefillMma(const PagedAttentionParams& params, Stream stream) {
  return LaunchPrefillKernel<Kernel>(PrefillMmaKernel<Kernel>, params, stream);
}

// Launches the kernel for sm_90a where the current device has code of it; `*launched` tells.
template <typename Kernel>
Status TryLaunchPrefillWgmma(const PagedAttentionParams& params, Stream stream, bool* launched) {
  // Code for other targets is an empty kernel of one warp.
  cudaFuncAttributes attributes;
  XLA_GPU_RETURN_IF_CUDA(cudaFuncGetAttributes(&attributes, PrefillWgmmaKernel<Kernel>));
  *launched = attributes.maxThreadsPerBlock >= Kernel::kThreads;
  if (!*launched) return Status::Ok();
  return LaunchPrefillKernel<Kernel>(PrefillWgmmaKernel<Kernel>, params, stream);
}

template <typename T>
Status TryLaunchPrefillSm90(const PagedAttentionParams& params, Stream stream, bool* launched) {
  *launched = false;
  if (IsFloat8(params.cache_dtype)) return Status::Ok();
  if (params.head_dim <= 64) return TryLaunchPrefillWgmma<PrefillWgmma<T, 64, 128, 3, 4>>(params, stream, launched);
  if (params.head_dim <= 128) return TryLaunchPrefillWgmma<PrefillWgmma<T, 128, 128, 2, 3>>(params, stream, launched);
  return TryLaunchPrefillWgmma<PrefillWgmma<T, 256, 64, 2, 3>>(params, stream, launched);
}

// Tiles by head_dim. At most 99 KiB of shared memory, the limit of a block on sm_86 and sm_89; two blocks on an SM of
// sm_80 and sm_90.
template <typename T>
Status LaunchPrefill16Bit(const PagedAttentionParams& params, Stream stream) {
  bool launched = false;
  if (Status status = TryLaunchPrefillSm90<T>(params, stream, &launched); !status.ok() || launched) return status;
  if (IsFloat8(params.cache_dtype)) {
    if (params.head_dim <= 64) return LaunchPrefillMma<PrefillMma<T, 64, 32, 64, 1, true>>(params, stream);
    if (params.head_dim <= 128) return LaunchPrefillMma<PrefillMma<T, 128, 32, 64, 1, true>>(params, stream);
    return LaunchPrefillMma<PrefillMma<T, 256, 16, 32, 1, true>>(params, stream);
  }
  if (params.head_dim <= 64) return LaunchPrefillMma<PrefillMma<T, 64, 32, 64, 2, false>>(params, stream);
  if (params.head_dim <= 128) return LaunchPrefillMma<PrefillMma<T, 128, 32, 64, 2, false>>(params, stream);
  return LaunchPrefillMma<PrefillMma<T, 256, 16, 64, 1, false>>(params, stream);
}

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_PREFILL_LAUNCH_CUH_
