// Prefill attention, float32.
#include "ffi/ops/paged_attention/prefill/launch.cuh"
#include "ffi/ops/paged_attention/prefill/prefill.h"
#include "ffi/ops/paged_attention/prefill/simt.cuh"

namespace xla_gpu {
namespace {

template <int kDim>
Status LaunchSimt(const PagedAttentionParams& params, Stream stream) {
  return prefill::LaunchSingleTile<prefill::SimtWorkTile<kDim>>(prefill::PrefillSimtKernel<kDim>, params, stream);
}

}  // namespace

template <>
Status LaunchPrefill<float>(const PagedAttentionParams& params, Stream stream) {
  if (params.head_dim <= 64) return LaunchSimt<64>(params, stream);
  if (params.head_dim <= 128) return LaunchSimt<128>(params, stream);
  return LaunchSimt<256>(params, stream);
}

}  // namespace xla_gpu
