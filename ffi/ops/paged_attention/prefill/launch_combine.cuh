// Launches of the kernels that merge KV splits. They are the same for all kernels that make splits, of both dtypes:
// included by one source file for each kLongestFirst alone.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_LAUNCH_COMBINE_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_LAUNCH_COMBINE_CUH_

#include "ffi/base/cuda_status.h"
#include "ffi/ops/paged_attention/decode/params.h"
#include "ffi/ops/paged_attention/prefill/combine.cuh"
#include "ffi/ops/paged_attention/prefill/combine_both.cuh"
#include "ffi/ops/paged_attention/prefill/launch.cuh"
#include "ffi/ops/paged_attention/prefill/launch_config.cuh"

namespace xla_gpu::prefill {

// The same carveout as the kernels before and behind: an SM must be idle to change it.
template <typename... Params>
Status SetCarveout(void (*kernel)(Params...)) {
  XLA_GPU_RETURN_IF_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
  return Status::Ok();
}

// The splits of both paths: see PathsShareCombine. `ctas`: of the prefill path's.
template <int kDim>
Status LaunchCombineBoth(const TmaParams& tma, const decode::SharedCall& decode, unsigned ctas, Stream stream) {
  const auto kernel = CombineBothKernel<kDim>;
  if (Status status = SetCarveout(kernel); !status.ok()) return status;
  constexpr int kSharedBytes = static_cast<int>(sizeof(decode::CombineSharedStorage<>));
  const dim3 grid(decode.combine_ctas + ctas);
  return Launch({grid, kCombineThreads, kSharedBytes, /*programmatic=*/true}, stream, kernel, decode.args, tma.split_kv,
                tma.accumulators, decode.combine_ctas, decode.prefill_ctas);
}

// Arguments as LaunchCombine's.
template <int kDim, bool kLongestFirst>
Status LaunchCombineDim(const TmaParams& tma, decode::SharedCall* decode, bool shares_last_round, unsigned ctas,
                        Stream stream) {
  void (*kernel)(PagedAttentionParams, SplitKvPolicy, SplitAccumulators);
  if constexpr (kLongestFirst) {
    kernel = PrefillCombineLongestFirstKernel<kDim>;
  } else {
    kernel = PrefillCombineKernel<kDim, false>;
    if constexpr (kDim <= 128) {
      if (shares_last_round) kernel = PrefillCombineKernel<kDim, true>;
    }
    if constexpr (kDim == 128) {
      if (decode != nullptr && decode->combines) {
        decode->combines = false;
        return LaunchCombineBoth<kDim>(tma, *decode, ctas, stream);
      }
    }
  }
  if (Status status = SetCarveout(kernel); !status.ok()) return status;
  return Launch({dim3(ctas), kCombineThreads, /*shared_bytes=*/0, /*programmatic=*/true}, stream, kernel, tma.attention,
                tma.split_kv, tma.accumulators);
}

template <bool kLongestFirst>
Status LaunchCombine(const TmaParams& tma, decode::SharedCall* decode, bool shares_last_round, unsigned ctas,
                     Stream stream) {
  const auto launch = tma.attention.head_dim == 64    ? LaunchCombineDim<64, kLongestFirst>
                      : tma.attention.head_dim == 128 ? LaunchCombineDim<128, kLongestFirst>
                                                      : LaunchCombineDim<256, kLongestFirst>;
  return launch(tma, decode, shares_last_round, ctas, stream);
}

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_LAUNCH_COMBINE_CUH_
