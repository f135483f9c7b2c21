// Which calls the sm_90a kernel takes, and its work tiles.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "ffi/ops/bidirectional_attention/sm90_launch.cuh"

namespace xla_gpu::bidirectional {

extern template Status LaunchSm90As<__half>(const BidirectionalAttentionParams&, int, int, Stream);
extern template Status LaunchSm90As<__nv_bfloat16>(const BidirectionalAttentionParams&, int, int, Stream);

namespace {

// Work tiles of 64 rows for sequences that fill no larger ones, on average, and for windows, since smaller work tiles
// read fewer keys that only some of their rows see. From shapes alone; the bits are the same. 0: the most.
int Warpgroups(const BidirectionalAttentionParams& params) {
  const int64_t tokens = params.num_tokens / std::max<int64_t>(params.max_seqs, 1);
  const bool narrow = params.sliding_window > 0 && params.sliding_window <= 256;
  return narrow || tokens <= (params.head_dim <= 64 ? 256 : 128) ? 1 : 0;
}

}  // namespace

Status SuitsSm90(const BidirectionalAttentionParams& params, bool* suits) {
  *suits = false;
  if (params.dtype != DType::kF16 && params.dtype != DType::kBF16) return Status::Ok();
  if (params.num_tokens < 1 || params.num_tokens >> 31 != 0 || params.max_seqs >> 30 != 0) return Status::Ok();
  // Code for other targets holds an empty kernel of one warp. All kernels are compiled for the same targets.
  using Traits = Sm90Traits<__nv_bfloat16, Sm90Config<64, 1>>;
  cudaFuncAttributes code;
  XLA_GPU_RETURN_IF_CUDA(cudaFuncGetAttributes(&code, BidirectionalSm90Kernel<Traits>));
  if (code.maxThreadsPerBlock < Traits::kThreads) return Status::Ok();
  // Of all tensors the query has the most heads. Its address is aligned as theirs are.
  CUtensorMap map;
  *suits = EncodeHeads(params.query, params, params.num_heads, 64, &map);
  return Status::Ok();
}

Status LaunchSm90(const BidirectionalAttentionParams& params, Stream stream) {
  int device, sms;
  XLA_GPU_RETURN_IF_CUDA(cudaGetDevice(&device));
  XLA_GPU_RETURN_IF_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  const auto launch = params.dtype == DType::kF16 ? LaunchSm90As<__half> : LaunchSm90As<__nv_bfloat16>;
  return launch(params, Warpgroups(params), sms, stream);
}

}  // namespace xla_gpu::bidirectional
