// Merges the parts of work tiles whose keys several CTAs of the sm_90a kernel shared, and fills the padding rows.
#ifndef XLA_GPU_OPS_MLA_ATTENTION_SM90_COMBINE_CUH_
#define XLA_GPU_OPS_MLA_ATTENTION_SM90_COMBINE_CUH_

#include <cstdint>

#include "ffi/device/attention_state.cuh"
#include "ffi/device/dependent_launch.cuh"
#include "ffi/device/mma.cuh"
#include "ffi/ops/mla_attention/sm90_schedule.cuh"
#include "ffi/ops/mla_attention/sm90_traits.cuh"
#include "ffi/ops/paged_attention/padding_rows.cuh"

namespace xla_gpu::mla {

inline constexpr int kCombineWarps = 8;
inline constexpr int kCombineThreads = kCombineWarps * 32;
inline constexpr int kPartsOfOneWarp = 4;  // more are divided among the warps of a CTA
inline constexpr int kLaneColumns = kLatentDim / 32;
inline constexpr int kItemColumns = 128;  // of an item of many parts
static_assert(kMaxCtas <= kCombineThreads);

// The kernel's CTAs: two that merge for each that computed, and one for padding rows. All are on the GPU at a time.
inline constexpr int kMergingCtas = 2;
inline int CombineCtas(const Sm90Params& params) { return (kMergingCtas + 1) * params.ctas; }

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
  // A lane has four columns from first_column + 4 * lane on, and of each 128 columns further on.
  template <int kVectors>
  __device__ void Add(int first_column, int lane, int begin, int step, float max, float4 (&sums)[kVectors]) const {
    const float shift = max == -INFINITY ? 0.0f : max;
#pragma unroll 4
    for (int part = begin; part < parts; part += step) {
      const int64_t at = Row(part);
      const float weight = Exp2(params.states[at].max - shift);
      const auto* const accumulator =
          reinterpret_cast<const float4*>(params.accumulators + at * kLatentDim + first_column) + lane;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
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

// What a CTA merges at a time: kCombineWarps rows of a work tile in few parts, or kItemColumns columns of a row in
// many.
__device__ inline int ItemsOf(const SplitTile& tile) {
  if (tile.rows <= 0) return 0;
  return tile.parts <= kPartsOfOneWarp ? (tile.rows + kCombineWarps - 1) / kCombineWarps
                                       : tile.rows * (kLatentDim / kItemColumns);
}

struct CombineStorage {
  float4 warp_sums[kCombineWarps][kItemColumns / 4];
  int warp_items[kCombineWarps];
  SplitTile tile;
  int first_cta;
  int item;
};

template <typename T>
__device__ void CombineFewParts(const RowParts& row, int64_t out_row, int lane) {
  const PagedAttentionParams& attention = row.params.attention;
  const AttentionState state = row.Merge(lane);
  float4 sums[kLaneColumns / 4] = {};
  row.Add(0, lane, 0, 1, state.max, sums);
  const float factor = ResultFactor(state);
  uint2* const out = reinterpret_cast<uint2*>(static_cast<T*>(attention.out) + out_row * kLatentDim) + lane;
#pragma unroll
  for (int i = 0; i < kLaneColumns / 4; ++i) {
    out[i * 32] =
        make_uint2(Pack<T>(sums[i].x * factor, sums[i].y * factor), Pack<T>(sums[i].z * factor, sums[i].w * factor));
  }
  if (attention.lse != nullptr && lane == 0) attention.lse[out_row] = state.LogSumExp();
}

// By all threads of the CTA; `shared` is free once they are all through.
template <typename T>
__device__ void CombineManyParts(const RowParts& row, int64_t out_row, int column, int warp, int lane,
                                 CombineStorage& shared) {
  const PagedAttentionParams& attention = row.params.attention;
  const AttentionState state = row.Merge(lane);
  float4 sums[1] = {};
  row.Add(column, lane, warp, kCombineWarps, state.max, sums);
  shared.warp_sums[warp][lane] = sums[0];
  __syncthreads();
  const int pair = static_cast<int>(threadIdx.x);  // of columns
  if (pair >= kItemColumns / 2) return;
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int w = 0; w < kCombineWarps; ++w) {
    const float2 part = reinterpret_cast<const float2*>(shared.warp_sums[w])[pair];
    sum.x += part.x;
    sum.y += part.y;
  }
  const float factor = ResultFactor(state);
  T* const out = static_cast<T*>(attention.out) + out_row * kLatentDim + column;
  reinterpret_cast<uint32_t*>(out)[pair] = Pack<T>(sum.x * factor, sum.y * factor);
  if (attention.lse != nullptr && column == 0 && pair == 0) attention.lse[out_row] = state.LogSumExp();
}

template <typename T>
__global__ void __launch_bounds__(kCombineThreads) MlaCombineKernel(const __grid_constant__ Sm90Params params) {
#if XLA_GPU_HAS_WGMMA
  __shared__ CombineStorage shared;
  WaitForPreviousKernel();
  AllowDependentLaunch();
  const auto cta = static_cast<int>(blockIdx.x);
  const int merging_ctas = kMergingCtas * params.ctas;
  if (cta >= merging_ctas) {
    FillPaddingRows<T>(params.attention, static_cast<unsigned>(cta - merging_ctas), static_cast<unsigned>(params.ctas));
    return;
  }
  const auto thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = __shfl_sync(~0u, thread / 32, 0);
  // Thread i looks at the work tile that CTA i has written down.
  SplitTile mine{};
  if (thread < params.ctas) mine = params.split_tiles[thread];
  const int items = ItemsOf(mine);
  const int up_to = InclusiveWarpSum(items, lane);
  if (lane == 31) shared.warp_items[warp] = up_to;
  __syncthreads();
  int begin = up_to - items, total = 0;  // the first of `items`, and all
#pragma unroll
  for (int w = 0; w < kCombineWarps; ++w) {
    if (w < warp) begin += shared.warp_items[w];
    total += shared.warp_items[w];
  }
#pragma unroll 1
  for (int item = cta; item < total; item += merging_ctas) {
    if (begin <= item && item < begin + items) {
      shared.tile = mine;
      shared.first_cta = thread;
      shared.item = item - begin;
    }
    __syncthreads();
    const SplitTile tile = shared.tile;
    RowParts row{params, shared.first_cta, tile.cta_step, tile.parts, 0};
    if (tile.parts <= kPartsOfOneWarp) {
      row.row = shared.item * kCombineWarps + warp;
      if (row.row < tile.rows) CombineFewParts<T>(row, int64_t{tile.first_row} + row.row, lane);
    } else {
      row.row = shared.item / (kLatentDim / kItemColumns);
      CombineManyParts<T>(row, int64_t{tile.first_row} + row.row,
                          shared.item % (kLatentDim / kItemColumns) * kItemColumns, warp, lane, shared);
    }
    __syncthreads();
  }
#endif
}

}  // namespace xla_gpu::mla

#endif  // XLA_GPU_OPS_MLA_ATTENTION_SM90_COMBINE_CUH_
