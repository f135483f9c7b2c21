// Prefill attention, bfloat16 with a float8 cache, of a few sequences that may have long contexts, on sm_90a.
#include <cuda_bf16.h>

#include "ffi/ops/paged_attention/prefill/launch.cuh"

namespace xla_gpu::prefill {

Status LaunchFloat8LongestFirst(const TmaParams& tma, const SplitAccumulatorLayout& layout, Stream stream) {
  int64_t sms = 0;
  if (Status status = CountSms(&sms); !status.ok()) return status;
  using Instances = TmaInstances<__nv_bfloat16>;
  if (tma.attention.head_dim == 64) {
    return LaunchTma<Instances::OfFloat8LongestFirst<TmaConfigDim64>>(tma, layout, sms, stream);
  }
  return LaunchTmaDim128<Instances::OfFloat8LongestFirst>(tma, layout, sms, stream);
}

}  // namespace xla_gpu::prefill
