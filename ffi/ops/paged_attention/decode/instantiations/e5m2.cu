// The decode kernels for float8_e5m2 caches.
#include "ffi/ops/paged_attention/decode/instantiations/launch_format.cuh"

namespace xla_gpu::decode {

Status LaunchE5M2(const PagedAttentionCall& params, Stream stream) {
  return LaunchFormat<CacheFormat::kE5M2>(params, stream);
}

}  // namespace xla_gpu::decode
