// bidirectional_attention in float16 and bfloat16 with mma.sync, for GPUs without the sm_90a kernel.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <string>

#include "ffi/ops/bidirectional_attention/portable.cuh"
#include "ffi/ops/bidirectional_attention/portable.h"
#include "ffi/ops/paged_attention/prefill/sm80_mma.cuh"

namespace xla_gpu::bidirectional {
namespace {

template <typename T, int kDim>
using MmaTile = prefill::MmaWorkTile<prefill::MmaTraits<T, kDim, /*kFloat8Cache=*/false>>;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define XLA_GPU_BIDIRECTIONAL_MMA_BOUNDS __launch_bounds__(32)
#else
#define XLA_GPU_BIDIRECTIONAL_MMA_BOUNDS __launch_bounds__(MmaTile<T, kDim>::kThreads, 2)
#endif

// NOTE: code for sm_90a has a kernel of its own (sm90.cu). What is never launched is not compiled.
template <typename T, int kDim>
__global__ void XLA_GPU_BIDIRECTIONAL_MMA_BOUNDS
BidirectionalMmaKernel(const __grid_constant__ PagedAttentionParams params) {
#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char shared[];
  RunTile<MmaTile<T, kDim>, T>(params, shared);
#endif
}

template <typename T, int kDim>
Status LaunchMma(const BidirectionalAttentionParams& params, Stream stream) {
  const auto kernel = BidirectionalMmaKernel<T, kDim>;
  bool has = false;
  if (Status status = HasKernel<MmaTile<T, kDim>>(kernel, &has); !status.ok()) return status;
  if (!has) {
    return Status::Internal(
        "bidirectional_attention: query: expected less than 2^40 bytes of all heads of a token, and a driver that has "
        "tensor maps, got " +
        std::to_string(params.num_heads * params.head_dim * 2) + " bytes, and no tensor map");
  }
  return LaunchPortable<MmaTile<T, kDim>>(kernel, params, stream);
}

template <typename T>
Status LaunchDim(const BidirectionalAttentionParams& params, Stream stream) {
  if (params.head_dim <= 64) return LaunchMma<T, 64>(params, stream);
  if (params.head_dim <= 128) return LaunchMma<T, 128>(params, stream);
  return LaunchMma<T, 256>(params, stream);
}

}  // namespace

Status LaunchPortable16Bit(const BidirectionalAttentionParams& params, Stream stream) {
  return params.dtype == DType::kF16 ? LaunchDim<__half>(params, stream) : LaunchDim<__nv_bfloat16>(params, stream);
}

}  // namespace xla_gpu::bidirectional
