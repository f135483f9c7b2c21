// Partial results of the sm_90a prefill kernel, and the kernel that puts them together.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_COMBINE_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_COMBINE_CUH_

#include <cstdint>

#include "ffi/device/dependent_launch.cuh"
#include "ffi/device/mma.cuh"
#include "ffi/ops/paged_attention/prefill/rows.cuh"
#include "ffi/ops/paged_attention/prefill/split_kv.h"
#include "ffi/ops/paged_attention/sequence_metadata.cuh"

namespace xla_gpu {

// Where partial results lie: see PrefillScratch.
struct PrefillPartials {
  float* values;       // [row][head_dim]
  float2* sums;        // [row]: the largest score, and the sum
  int64_t rows;        // of a part
  int64_t block_rows;  // where the rows of blocks begin
};

// What becomes of the results of a part of a tile's keys. Bits.
using PrefillPartMode = unsigned;
inline constexpr PrefillPartMode kFoldPart = 1;   // the same block has results of earlier parts, which are added
inline constexpr PrefillPartMode kKeepPart = 2;   // they stay in the scratch
inline constexpr PrefillPartMode kPartApart = 4;  // other blocks sum up other parts

// Two partial results of a row become one. The same, in the same order, wherever it is done.
struct PrefillFold {
  float2 sums;  // of both
  float weights[2];
  int only;  // the one that sees keys, if not both do; else -1

  __device__ PrefillFold(float2 a, float2 b, float to_log2) {
    only = b.y == 0.0f ? 0 : a.y == 0.0f ? 1 : -1;
    const float largest = fmaxf(a.x, b.x);
    weights[0] = a.x == largest ? 1.0f : Exp2(__fmul_rn(a.x - largest, to_log2));
    weights[1] = b.x == largest ? 1.0f : Exp2(__fmul_rn(b.x - largest, to_log2));
    const float sum = __fmaf_rn(a.y, weights[0], __fmul_rn(b.y, weights[1]));
    sums = only == 0 ? a : only == 1 ? b : make_float2(largest, sum);
  }
  __device__ float Of(float a, float b) const {
    return only == 0 ? a : only == 1 ? b : __fmaf_rn(a, weights[0], __fmul_rn(b, weights[1]));
  }
};

inline constexpr int kMergeThreads = 128;

// A warp for each row of out, in turns.
template <typename T, int kDim>
__global__ void __launch_bounds__(kMergeThreads)
    PrefillMergeKernel(const __grid_constant__ PagedAttentionParams params, const __grid_constant__ PrefillSplit split,
                       const __grid_constant__ PrefillPartials partials) {
  AllowDependentLaunch();  // of the decode path, if that comes second
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(blockIdx.x * (kMergeThreads / 32) + threadIdx.x / 32);
  const int warps = static_cast<int>(gridDim.x * (kMergeThreads / 32));
  const int num_live = LiveSequences(params);
  const bool in_order = QueryStartsInOrder(params, num_live);
  const PrefillScores scores(params, /*kv_head=*/0);
  bool waited = false;
  for (int base = 0; base < num_live; base += 32) {
    SequenceInfo info{};
    if (base + lane < num_live) info = LoadSequence(params, base + lane, in_order);
    const int my_parts = info.valid ? split.Apart(split.Of(info.q_len, info.context_len)) : 1;
    for (unsigned left = __ballot_sync(~0u, my_parts > 1); left != 0; left &= left - 1) {
      const int owner = __ffs(static_cast<int>(left)) - 1;
      const int parts = __shfl_sync(~0u, my_parts, owner);
      const int begin = __shfl_sync(~0u, info.q_begin, owner) * static_cast<int>(params.num_heads);
      const int end = begin + __shfl_sync(~0u, info.q_len, owner) * static_cast<int>(params.num_heads);
      if (!waited) WaitForPreviousKernel();
      waited = true;
      for (int row = begin + warp; row < end; row += warps) {
        // NOTE: not through the cache for constants, since an earlier kernel has just written them.
        float2 sums = make_float2(-INFINITY, 0.0f);
        if (lane < parts) sums = __ldcg(partials.sums + lane * partials.rows + row);
        const float2* const values = reinterpret_cast<const float2*>(partials.values + int64_t{row} * kDim) + lane;
        float2 all = make_float2(__shfl_sync(~0u, sums.x, 0), __shfl_sync(~0u, sums.y, 0));
        float2 result[kDim / 64];
#pragma unroll
        for (int i = 0; i < kDim / 64; ++i) result[i] = __ldcg(values + i * 32);
#pragma unroll 4
        for (int part = 1; part < parts; ++part) {
          float2 next[kDim / 64];
#pragma unroll
          for (int i = 0; i < kDim / 64; ++i) next[i] = __ldcg(values + part * partials.rows * (kDim / 2) + i * 32);
          const PrefillFold fold(all, make_float2(__shfl_sync(~0u, sums.x, part), __shfl_sync(~0u, sums.y, part)),
                                 scores.to_log2);
          all = fold.sums;
#pragma unroll
          for (int i = 0; i < kDim / 64; ++i) {
            result[i] = make_float2(fold.Of(result[i].x, next[i].x), fold.Of(result[i].y, next[i].y));
          }
        }
        const SoftmaxEnd result_end = scores.EndFast(all.x, all.y, row % static_cast<int>(params.num_heads));
        if (params.lse != nullptr && lane == 0) params.lse[row] = result_end.lse;
        uint32_t* const out = reinterpret_cast<uint32_t*>(static_cast<T*>(params.out) + int64_t{row} * kDim) + lane;
#pragma unroll
        for (int i = 0; i < kDim / 64; ++i) {
          out[i * 32] = Pack<T>(result[i].x * result_end.factor, result[i].y * result_end.factor);
        }
      }
    }
  }
  // One block is enough: when this kernel has ended, so has the one before.
  if (!waited && blockIdx.x == 0) WaitForPreviousKernel();
}

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_COMBINE_CUH_
