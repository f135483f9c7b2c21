// Prefill attention, float16, of a few sequences that may have long contexts, on sm_90a.
#include <cuda_fp16.h>

#include "ffi/ops/paged_attention/prefill/launch.cuh"

namespace xla_gpu::prefill {

template <>
Status LaunchLongestFirst<__half>(const TmaParams& tma, const SplitAccumulatorLayout& layout, Stream stream) {
  using Instances = TmaInstances<__half>;
  if (tma.attention.head_dim == 64) return LaunchTma<Instances::OfLongestFirst, 64>(tma, layout, stream);
  if (tma.attention.head_dim == 128) return LaunchTma<Instances::OfLongestFirst, 128>(tma, layout, stream);
  return LaunchTma<Instances::OfLongestFirst, 256>(tma, layout, stream);
}

}  // namespace xla_gpu::prefill
