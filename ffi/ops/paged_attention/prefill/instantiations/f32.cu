// Prefill attention, float32.
#include "ffi/ops/paged_attention/prefill/launch.cuh"
#include "ffi/ops/paged_attention/prefill/prefill.h"
#include "ffi/ops/paged_attention/prefill/simt.cuh"

namespace xla_gpu {
namespace prefill {
namespace {

template <int kDim>
Status LaunchSimt(const PagedAttentionParams& params, Stream stream) {
  using Kernel = SimtKernelImpl<kDim>;
  return LaunchPrefillKernel<Kernel>(PrefillSimtKernel<Kernel>, params, stream);
}

}  // namespace
}  // namespace prefill

Status LaunchPrefillF32(const PagedAttentionParams& params, Stream stream) {
  if (params.head_dim <= 64) return prefill::LaunchSimt<64>(params, stream);
  if (params.head_dim <= 128) return prefill::LaunchSimt<128>(params, stream);
  return prefill::LaunchSimt<256>(params, stream);
}

}  // namespace xla_gpu
