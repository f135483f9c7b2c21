// bidirectional_attention in float32, with float32's accuracy, on every GPU.
#include "ffi/ops/bidirectional_attention/portable.cuh"
#include "ffi/ops/bidirectional_attention/portable.h"
#include "ffi/ops/paged_attention/prefill/simt.cuh"

namespace xla_gpu::bidirectional {
namespace {

template <int kDim>
__global__ void __launch_bounds__(prefill::SimtWorkTile<kDim>::kThreads)
    BidirectionalSimtKernel(const __grid_constant__ PagedAttentionParams params) {
  extern __shared__ __align__(1024) char shared[];
  RunTile<prefill::SimtWorkTile<kDim>, float>(params, shared);
}

template <int kDim>
Status LaunchSimt(const BidirectionalAttentionParams& params, Stream stream) {
  return LaunchPortable<prefill::SimtWorkTile<kDim>>(BidirectionalSimtKernel<kDim>, params, stream);
}

}  // namespace

Status LaunchPortableF32(const BidirectionalAttentionParams& params, Stream stream) {
  if (params.head_dim <= 64) return LaunchSimt<64>(params, stream);
  if (params.head_dim <= 128) return LaunchSimt<128>(params, stream);
  return LaunchSimt<256>(params, stream);
}

}  // namespace xla_gpu::bidirectional
