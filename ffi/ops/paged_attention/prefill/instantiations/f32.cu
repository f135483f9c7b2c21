// Prefill attention, float32.
#include "ffi/ops/paged_attention/prefill/launch.cuh"
#include "ffi/ops/paged_attention/prefill/prefill.h"
#include "ffi/ops/paged_attention/prefill/simt.cuh"

namespace xla_gpu::prefill {
namespace {

template <int kDim>
Status LaunchSimt(const PagedAttentionCall& params, Stream stream) {
  return LaunchSingleTile<SimtWorkTile<kDim>>(PrefillSimtKernel<kDim>, params, stream);
}

}  // namespace

Status LaunchF32(const PagedAttentionCall& params, Stream stream) {
  if (params.head_dim <= 64) return LaunchSimt<64>(params, stream);
  if (params.head_dim <= 128) return LaunchSimt<128>(params, stream);
  return LaunchSimt<256>(params, stream);
}

}  // namespace xla_gpu::prefill
