// Prefill attention, float16, of pages that are no multiple of 8 slots, on sm_90a.
#include <cuda_fp16.h>

#include "ffi/ops/paged_attention/prefill/launch.cuh"

namespace xla_gpu::prefill {

template <>
Status LaunchAnyPages<__half>(const TmaParams& tma, const SplitAccumulatorLayout& layout, Stream stream) {
  using Instances = TmaInstances<__half>;
  if (tma.attention.head_dim == 64) return LaunchTma<Instances::OfAnyPages, 64>(tma, layout, stream);
  if (tma.attention.head_dim == 128) return LaunchTma<Instances::OfAnyPages, 128>(tma, layout, stream);
  return LaunchTma<Instances::OfAnyPages, 256>(tma, layout, stream);
}

}  // namespace xla_gpu::prefill
