// Prefill attention, float16.
#include <cuda_fp16.h>

#include "ffi/ops/paged_attention/paged_attention_prefill.h"
#include "ffi/ops/paged_attention/paged_attention_prefill_launch.cuh"

namespace xla_gpu {

Status LaunchPrefillF16(const PagedAttentionParams& params, Stream stream) {
  return LaunchPrefill16Bit<__half>(params, stream);
}

}  // namespace xla_gpu
