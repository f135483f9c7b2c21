// The decode kernels for float16 caches.
#include "ffi/ops/paged_attention/decode/instantiations/launch_format.cuh"

namespace xla_gpu::decode {

Status LaunchF16(const PagedAttentionCall& params, Stream stream) {
  return LaunchFormat<CacheFormat::kF16>(params, stream);
}

}  // namespace xla_gpu::decode
