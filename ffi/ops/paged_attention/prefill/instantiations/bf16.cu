// Prefill attention, bfloat16.
#include <cuda_bf16.h>

#include "ffi/ops/paged_attention/prefill/launch.cuh"
#include "ffi/ops/paged_attention/prefill/launch_combine.cuh"
#include "ffi/ops/paged_attention/prefill/prefill.h"

namespace xla_gpu::prefill {

Status LaunchBF16(const PagedAttentionCall& params, Stream stream) {
  return Launch16Bit<__nv_bfloat16>(params, stream);
}

Status SplitsKeysBF16(const PagedAttentionParams& shapes, bool* splits) {
  return SplitsKeys<__nv_bfloat16>(shapes, splits);
}

// Of both dtypes.
template Status LaunchCombine</*kLongestFirst=*/false>(const TmaParams& tma, decode::SharedCall* decode,
                                                       bool shares_last_round, unsigned ctas, Stream stream);

}  // namespace xla_gpu::prefill
