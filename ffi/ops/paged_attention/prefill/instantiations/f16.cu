// Prefill attention, float16.
#include <cuda_fp16.h>

#include "ffi/ops/paged_attention/prefill/launch.cuh"
#include "ffi/ops/paged_attention/prefill/prefill.h"

namespace xla_gpu::prefill {

Status LaunchF16(const PagedAttentionCall& params, Stream stream) { return Launch16Bit<__half>(params, stream); }

Status SplitsKeysF16(const PagedAttentionParams& shapes, bool* splits) { return SplitsKeys<__half>(shapes, splits); }

}  // namespace xla_gpu::prefill
