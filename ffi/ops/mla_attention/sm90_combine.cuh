// Merges the parts of work tiles whose keys several CTAs of the sm_90a kernel shared, and fills the padding rows.
#ifndef XLA_GPU_OPS_MLA_ATTENTION_SM90_COMBINE_CUH_
#define XLA_GPU_OPS_MLA_ATTENTION_SM90_COMBINE_CUH_

#include <cstdint>

#include "ffi/device/attention_state.cuh"
#include "ffi/device/dependent_launch.cuh"
#include "ffi/device/mma.cuh"
#include "ffi/ops/mla_attention/sm90_traits.cuh"
#include "ffi/ops/paged_attention/padding_rows.cuh"

namespace xla_gpu::mla {

inline constexpr int kCombineWarps = 8;
inline constexpr int kCombineCtas = 16;    // for each CTA of the kernel before
inline constexpr int kPartsOfOneWarp = 4;  // more are divided among the warps of a CTA
inline constexpr int kLaneColumns = kLatentDim / 32;

// Where the parts of a row lie.
struct RowParts {
  const Sm90Params& params;
  int first_cta, cta_step, parts, row;

  // Of accumulators and states.
  __device__ int64_t Row(int part) const {
    const int slot = part == 0 ? first_cta * 2 + 1 : (first_cta + part * cta_step) * 2;
    return static_cast<int64_t>(slot) * params.slot_rows + row;
  }
  // The state of the whole row, the same in all lanes.
  __device__ AttentionState Merge(int lane) const {
    AttentionState state{-INFINITY, 0.0f};
    for (int part = lane; part < parts; part += 32) state.Merge(params.states[Row(part)]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      // In an order that is the same for both lanes.
      AttentionState first{__shfl_xor_sync(~0u, state.max, step), __shfl_xor_sync(~0u, state.sum, step)};
      AttentionState second = state;
      if ((lane & step) == 0) {
        const AttentionState other = first;
        first = second;
        second = other;
      }
      first.Merge(second);
      state = first;
    }
    return state;
  }
  // Adds the accumulators of every `step`th part, from `begin` on, each times its weight in a state of maximum `max`.
  // A lane has four columns from 4 * lane on, and those 128, 256 and 384 further on.
  __device__ void Add(int lane, int begin, int step, float max, float4 (&sums)[kLaneColumns / 4]) const {
    const float shift = max == -INFINITY ? 0.0f : max;
#pragma unroll 4
    for (int part = begin; part < parts; part += step) {
      const int64_t at = Row(part);
      const float weight = Exp2(params.states[at].max - shift);
      const auto* const accumulator = reinterpret_cast<const float4*>(params.accumulators + at * kLatentDim) + lane;
#pragma unroll
      for (int i = 0; i < kLaneColumns / 4; ++i) {
        const float4 value = accumulator[i * 32];
        sums[i].x += weight * value.x;
        sums[i].y += weight * value.y;
        sums[i].z += weight * value.z;
        sums[i].w += weight * value.w;
      }
    }
  }
};

__device__ inline float ResultFactor(AttentionState state) { return state.sum == 0.0f ? 0.0f : state.Normalize(1.0f); }

template <typename T>
__global__ void __launch_bounds__(kCombineWarps * 32) MlaCombineKernel(const __grid_constant__ Sm90Params params) {
#if XLA_GPU_HAS_WGMMA
  __shared__ float4 warp_sums[kCombineWarps][kLatentDim / 4];
  WaitForPreviousKernel();
  AllowDependentLaunch();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const SplitTile tile = params.split_tiles[blockIdx.x];
  RowParts row{params, static_cast<int>(blockIdx.x), tile.cta_step, tile.parts, 0};
  if (tile.parts <= kPartsOfOneWarp) {
    for (row.row = static_cast<int>(blockIdx.y) * kCombineWarps + warp; row.row < tile.rows;
         row.row += kCombineCtas * kCombineWarps) {
      const AttentionState state = row.Merge(lane);
      float4 sums[kLaneColumns / 4] = {};
      row.Add(lane, 0, 1, state.max, sums);
      const float factor = ResultFactor(state);
      const int64_t out_row = tile.first_row + row.row;
      uint2* const out = reinterpret_cast<uint2*>(static_cast<T*>(params.attention.out) + out_row * kLatentDim) + lane;
#pragma unroll
      for (int i = 0; i < kLaneColumns / 4; ++i) {
        out[i * 32] = make_uint2(Pack<T>(sums[i].x * factor, sums[i].y * factor),
                                 Pack<T>(sums[i].z * factor, sums[i].w * factor));
      }
      if (params.attention.lse != nullptr && lane == 0) params.attention.lse[out_row] = state.LogSumExp();
    }
  } else {
    for (row.row = static_cast<int>(blockIdx.y); row.row < tile.rows; row.row += kCombineCtas) {
      const AttentionState state = row.Merge(lane);
      float4 sums[kLaneColumns / 4] = {};
      row.Add(lane, warp, kCombineWarps, state.max, sums);
#pragma unroll
      for (int i = 0; i < kLaneColumns / 4; ++i) warp_sums[warp][i * 32 + lane] = sums[i];
      __syncthreads();
      const float factor = ResultFactor(state);
      const int64_t out_row = tile.first_row + row.row;
      // A thread has two columns.
      static_assert(kLatentDim == kCombineWarps * 32 * 2);
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int w = 0; w < kCombineWarps; ++w) {
        const float2 part = reinterpret_cast<const float2*>(warp_sums[w])[threadIdx.x];
        sum.x += part.x;
        sum.y += part.y;
      }
      reinterpret_cast<uint32_t*>(static_cast<T*>(params.attention.out) + out_row * kLatentDim)[threadIdx.x] =
          Pack<T>(sum.x * factor, sum.y * factor);
      if (params.attention.lse != nullptr && threadIdx.x == 0) params.attention.lse[out_row] = state.LogSumExp();
      __syncthreads();
    }
  }
  // Behind the loop that all threads leave together.
  if (blockIdx.y == kCombineCtas - 1) FillPaddingRows<T>(params.attention, blockIdx.x, gridDim.x);
#endif
}

}  // namespace xla_gpu::mla

#endif  // XLA_GPU_OPS_MLA_ATTENTION_SM90_COMBINE_CUH_
