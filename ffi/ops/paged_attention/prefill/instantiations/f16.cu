// Prefill attention, float16.
#include <cuda_fp16.h>

#include "ffi/ops/paged_attention/prefill/launch.cuh"
#include "ffi/ops/paged_attention/prefill/prefill.h"

namespace xla_gpu {

template <>
Status LaunchPrefill<__half>(const PagedAttentionParams& params, Stream stream) {
  return prefill::Launch16Bit<__half>(params, stream);
}

}  // namespace xla_gpu
