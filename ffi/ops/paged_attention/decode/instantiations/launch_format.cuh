// The split-KV kernels of one cache format, and which of them serves a call. Each format has its own source file, so
// that they compile in parallel.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_INSTANTIATIONS_LAUNCH_FORMAT_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_INSTANTIATIONS_LAUNCH_FORMAT_CUH_

#include "ffi/ops/paged_attention/decode/formats.h"
#include "ffi/ops/paged_attention/decode/launch.h"
#include "ffi/ops/paged_attention/decode/split_kv_kernel.cuh"

namespace xla_gpu::decode {

template <typename Traits>
constexpr SplitKvKernel MakeSplitKvKernel() {
  constexpr int kSharedBytes = static_cast<int>(sizeof(SplitKvSharedStorage<Traits>));
  static_assert(Traits::kLargeSharedMemory || kSharedBytes <= 99 * 1024,
                "what a CTA may have on every GPU from sm_80 on");
  return {DecodeSplitKvKernel<Traits>, Traits::kThreads,       kSharedBytes,
          Traits::kElementBytes,       Traits::kBlockKeysLog2, Traits::kRowsLog2};
}

template <CacheFormat kFormat, int kHeadDim, int kRowTiles, bool kNarrowCopies>
constexpr SplitKvVariants kVariants = {
    MakeSplitKvKernel<KernelTraits<kFormat, kHeadDim, kRowTiles, kNarrowCopies, true>>(),
    MakeSplitKvKernel<KernelTraits<kFormat, kHeadDim, kRowTiles, kNarrowCopies, false>>()};

// Without large shared memory, work tiles of 16 rows.
template <CacheFormat kFormat, int kHeadDim>
constexpr SplitKvVariants kWideVariants = {MakeSplitKvKernel<WideKernelTraits<kFormat, kHeadDim>>(),
                                           kVariants<kFormat, kHeadDim, 2, false>.small};

template <CacheFormat kFormat, int kHeadDim>
constexpr SplitKvVariants kDependentVariants = {MakeSplitKvKernel<DependentKernelTraits<kFormat, kHeadDim, 1>>(),
                                                kVariants<kFormat, kHeadDim, 1, false>.small};

template <CacheFormat kFormat, int kHeadDim>
const SplitKvVariants& SelectVariants(const KernelConfig& config) {
  if constexpr (kFormat != CacheFormat::kE5M2 && kHeadDim <= 128) {
    if (config.wide) return kWideVariants<kFormat, kHeadDim>;
  }
  if constexpr (kFormat == CacheFormat::kE4M3 || kFormat == CacheFormat::kE5M2) {
    if (config.narrow_copies) return kVariants<kFormat, kHeadDim, 2, true>;
  }
  if constexpr ((kFormat == CacheFormat::kF16 || kFormat == CacheFormat::kBF16) && kHeadDim == 128) {
    if (config.dependent && config.row_tiles == 1) return kDependentVariants<kFormat, kHeadDim>;
  }
  return config.row_tiles == 1 ? kVariants<kFormat, kHeadDim, 1, false> : kVariants<kFormat, kHeadDim, 2, false>;
}

template <CacheFormat kFormat>
const SplitKvVariants& SelectVariants(const KernelConfig& config) {
  switch (config.head_dim) {
    case 64:
      return SelectVariants<kFormat, 64>(config);
    case 128:
      return SelectVariants<kFormat, 128>(config);
    case 192:
      if constexpr (kFormat == CacheFormat::kF16 || kFormat == CacheFormat::kBF16) {
        return SelectVariants<kFormat, 192>(config);
      }
      [[fallthrough]];
    default:
      return SelectVariants<kFormat, 256>(config);
  }
}

template <CacheFormat kFormat>
Status LaunchFormat(const PagedAttentionCall& params, Stream stream) {
  const KernelConfig config = params.tree_mask != nullptr ? MakeWideKernelConfig(params) : MakeKernelConfig(params);
  return LaunchKernels(params, config, SelectVariants<kFormat>(config), stream);
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_INSTANTIATIONS_LAUNCH_FORMAT_CUH_
