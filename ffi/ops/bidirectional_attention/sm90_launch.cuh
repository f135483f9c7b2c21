// Launches of the sm_90a kernel (sm90.cuh).
#ifndef XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_SM90_LAUNCH_CUH_
#define XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_SM90_LAUNCH_CUH_

#include <algorithm>
#include <cstdint>

#include "ffi/base/cuda_status.h"
#include "ffi/device/launch.cuh"
#include "ffi/ops/bidirectional_attention/bidirectional_attention.h"
#include "ffi/ops/bidirectional_attention/sm90.cuh"

namespace xla_gpu::bidirectional {

// [num_tokens][heads][head_dim], in boxes of `rows` rows and 64 columns of one head. False where the driver has no
// tensor maps, or none of this shape.
inline bool EncodeHeads(const void* start, const BidirectionalAttentionParams& params, int64_t heads, int rows,
                        CUtensorMap* map) {
  const auto dim = static_cast<cuuint64_t>(params.head_dim);
  const cuuint64_t sizes[3] = {dim, static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(params.num_tokens)};
  const cuuint64_t stride_bytes[2] = {dim * 2, dim * sizes[1] * 2};
  const cuuint32_t box[3] = {64, 1, static_cast<cuuint32_t>(rows)};
  return EncodeTensor(start, 3, sizes, stride_bytes, box, TensorMapType(params.dtype == DType::kBF16),
                      CU_TENSOR_MAP_SWIZZLE_128B, map);
}

template <typename Traits>
Status LaunchSm90Instance(const BidirectionalAttentionParams& params, int sms, Stream stream) {
  Sm90Params sm90;
  sm90.query_start_loc = params.query_start_loc;
  sm90.num_seqs = params.num_seqs;
  sm90.out = params.out;
  sm90.num_tokens = static_cast<int>(params.num_tokens);
  sm90.num_heads = static_cast<int>(params.num_heads);
  sm90.head_dim = static_cast<int>(params.head_dim);
  sm90.max_seqs = static_cast<int>(params.max_seqs);
  sm90.window = static_cast<int>(params.sliding_window == 0 ? params.num_tokens
                                                            : std::min(params.sliding_window, params.num_tokens));
  sm90.thread_seqs = std::max(1, (sm90.max_seqs + Traits::kThreads - 1) / Traits::kThreads);
  sm90.heads = FastDivisor::Make(params.num_heads);
  sm90.group = FastDivisor::Make(params.num_heads / params.num_kv_heads);
  sm90.scale = params.scale;
  sm90.soft_cap = params.soft_cap;
  const int64_t kv_heads = params.num_kv_heads;
  if (!EncodeHeads(params.query, params, params.num_heads, 64, &sm90.q_map) ||
      !EncodeHeads(params.key, params, kv_heads, Traits::kTileKeys, &sm90.k_map) ||
      !EncodeHeads(params.value, params, kv_heads, Traits::kTileKeys, &sm90.v_map) ||
      !EncodeHeads(params.key, params, kv_heads, Traits::kTailRows, &sm90.k_tail_map) ||
      !EncodeHeads(params.value, params, kv_heads, Traits::kTailRows, &sm90.v_tail_map)) {
    return Status::Internal("bidirectional_attention: the driver makes no tensor maps of query, key and value");
  }
  const auto kernel = BidirectionalSm90Kernel<Traits>;
  XLA_GPU_RETURN_IF_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSharedBytes));
  // No more CTAs than there can be work tiles.
  const int64_t row_tiles = params.num_tokens / Traits::kRows + std::min(params.max_seqs, params.num_tokens);
  const int64_t ctas = std::clamp<int64_t>(row_tiles * params.num_heads, 1, int64_t{Traits::kCtas} * sms);
  return LaunchKernel(kernel, dim3(static_cast<unsigned>(ctas)), dim3(Traits::kThreads), Traits::kSharedBytes, stream,
                      LaunchOrder::kDependent, sm90);
}

// `warpgroups`: of consumers, 1, or any other number for the instance with the most.
template <typename T, int kDim, int kLarge>
Status LaunchSm90Dim(const BidirectionalAttentionParams& params, int warpgroups, int sms, Stream stream) {
  if (warpgroups == 1) return LaunchSm90Instance<Sm90Traits<T, Sm90Config<kDim, 1>>>(params, sms, stream);
  return LaunchSm90Instance<Sm90Traits<T, Sm90Config<kDim, kLarge>>>(params, sms, stream);
}

// head_dim 72 and 80 are those of many vision encoders.
template <typename T>
Status LaunchSm90As(const BidirectionalAttentionParams& params, int warpgroups, int sms, Stream stream) {
  if (params.head_dim <= 64) return LaunchSm90Dim<T, 64, 3>(params, warpgroups, sms, stream);
  if (params.head_dim <= 80) return LaunchSm90Dim<T, 80, 3>(params, warpgroups, sms, stream);
  if (params.head_dim <= 96) return LaunchSm90Dim<T, 96, 3>(params, warpgroups, sms, stream);
  if (params.head_dim <= 128) return LaunchSm90Dim<T, 128, 2>(params, warpgroups, sms, stream);
  return LaunchSm90Dim<T, 256, 2>(params, warpgroups, sms, stream);
}

}  // namespace xla_gpu::bidirectional

#endif  // XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_SM90_LAUNCH_CUH_
