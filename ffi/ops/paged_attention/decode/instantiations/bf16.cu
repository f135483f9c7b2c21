// The decode kernels for bfloat16 caches.
#include "ffi/ops/paged_attention/decode/instantiations/launch_format.cuh"

namespace xla_gpu::decode {

Status LaunchBF16(const PagedAttentionCall& params, Stream stream) {
  return LaunchFormat<CacheFormat::kBF16>(params, stream);
}

}  // namespace xla_gpu::decode
