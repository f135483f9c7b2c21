// Which calls the sm_90a kernel takes, and its work tiles.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ffi/ops/bidirectional_attention/sm90_launch.cuh"

namespace xla_gpu::bidirectional {

extern template Status LaunchSm90As<__half>(const BidirectionalAttentionParams&, int, int, Stream);
extern template Status LaunchSm90As<__nv_bfloat16>(const BidirectionalAttentionParams&, int, int, Stream);

namespace {

// ---- Work tiles of 64 rows, or of as many as there are
// An estimate, in the time that an SM takes for a key of 64 rows where it computes large work tiles. Ratios of both
// instances' times that it gives were off by up to 9 % in nine of ten shapes at head_dim 64 (1 × 300 to 256 × 32 and
// 1 × 8192 tokens, one with a window; one H200), by 18 % in 64 × 128 tokens.
struct InstanceCosts {
  int large_rows;
  double small;        // 64 rows in small work tiles, with as many CTAs as an SM takes
  double small_alone;  // no less than this: in a single CTA nothing overlaps
  bool shares_sm;      // several small CTAs do
};

InstanceCosts CostsOf(const BidirectionalAttentionParams& params) {
  if (params.head_dim <= 64) return {192, 1.2, 2, true};
  // TMA takes about 6 cycles for a row of K or V that begins at odd multiples of 16 bytes, of 72 elements for one,
  // which small work tiles read more often.
  if (params.head_dim <= 96) return {192, params.head_dim % 16 == 0 ? 1.3 : 2.2, 2, true};
  if (params.head_dim <= 128) return {128, 1.15, 1.6, true};
  return {128, 1.6, 1.6, false};
}

// Keys that are computed for a work tile, probably: windows hide fewer from more rows.
double KeysOf(const BidirectionalAttentionParams& params, int64_t tokens, int64_t rows) {
  constexpr int64_t kTileKeys = 128;
  if (params.sliding_window == 0 || params.sliding_window >= tokens) return static_cast<double>(tokens);
  return static_cast<double>(std::min(tokens, rows + 2 * (params.sliding_window - 1) + kTileKeys - 1));
}

// Of consumers in a CTA: 1, or 0 for the most. From shapes alone; the bits are the same.
int Warpgroups(const BidirectionalAttentionParams& params, int sms) {
  const InstanceCosts costs = CostsOf(params);
  const int64_t seqs = std::clamp<int64_t>(params.max_seqs, 1, params.num_tokens);
  const int64_t tokens = (params.num_tokens + seqs - 1) / seqs;
  const auto of_an_sm = [&](int64_t rows) {  // work tiles
    return static_cast<double>((tokens + rows - 1) / rows) * static_cast<double>(seqs * params.num_heads) / sms;
  };
  const double large =
      std::ceil(of_an_sm(costs.large_rows)) * (costs.large_rows / 64) * KeysOf(params, tokens, costs.large_rows);
  const double tiles = of_an_sm(64);
  const double small = std::max(costs.small * (costs.shares_sm ? tiles : std::ceil(tiles)), costs.small_alone) *
                       KeysOf(params, tokens, 64);
  return small < large ? 1 : 0;
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
  return launch(params, Warpgroups(params, sms), sms, stream);
}

}  // namespace xla_gpu::bidirectional
