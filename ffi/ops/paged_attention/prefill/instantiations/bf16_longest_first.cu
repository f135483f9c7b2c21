// Prefill attention, bfloat16, of a few sequences that may have long contexts, on sm_90a.
#include <cuda_bf16.h>

#include "ffi/ops/paged_attention/prefill/launch.cuh"
#include "ffi/ops/paged_attention/prefill/launch_combine.cuh"

namespace xla_gpu::prefill {

template <>
Status LaunchLongestFirst<__nv_bfloat16>(const TmaParams& tma, const SplitAccumulatorLayout& layout, Stream stream) {
  using Instances = TmaInstances<__nv_bfloat16>;
  if (tma.attention.head_dim == 64) return LaunchTma<Instances::OfLongestFirst, 64>(tma, layout, stream);
  if (tma.attention.head_dim == 128) return LaunchTma<Instances::OfLongestFirst, 128>(tma, layout, stream);
  return LaunchTma<Instances::OfLongestFirst, 256>(tma, layout, stream);
}

// Of both dtypes.
template Status LaunchCombine</*kLongestFirst=*/true>(const TmaParams& tma, decode::SharedCall* decode,
                                                      bool shares_last_round, unsigned ctas, Stream stream);

}  // namespace xla_gpu::prefill
