// The decode kernels for float8_e4m3fn caches.
#include "ffi/ops/paged_attention/decode/instantiations/launch_format.cuh"

namespace xla_gpu::decode {

Status LaunchE4M3(const PagedAttentionCall& params, Stream stream) {
  return LaunchFormat<CacheFormat::kE4M3>(params, stream);
}

}  // namespace xla_gpu::decode
