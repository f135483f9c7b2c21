// Merges the parts of work tiles whose keys several CTAs of the sm_90a kernel shared, and fills the padding rows.
#ifndef XLA_GPU_OPS_MLA_ATTENTION_SM90_COMBINE_CUH_
#define XLA_GPU_OPS_MLA_ATTENTION_SM90_COMBINE_CUH_

#include <algorithm>
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
inline constexpr int kMergingCtas = 4;     // for each CTA that computed: so many are on an SM at a time
inline constexpr int kSliceColumns = 128;  // of a row: a vector of each lane
inline constexpr int kSlices = kLatentDim / kSliceColumns;
inline constexpr int kVectorsAtATime = 8;  // that a lane has loads of under way
// A warp merges by itself two slices of rows of few parts, or a slice; more parts are divided among the warps of a CTA.
inline constexpr int kFewParts = kVectorsAtATime / 2, kPartsOfOneWarp = 16;
// The parts that a warp merges by itself. Where there is a slice for each SM at most, several warps read it, so that no
// loads wait for others.
__device__ inline int WarpParts(const Sm90Params& params) {
  const int64_t slices = params.attention.num_tokens * params.attention.num_heads * kSlices;
  return slices <= params.ctas ? kFewParts : kPartsOfOneWarp;
}
static_assert(kMaxCtas <= kCombineThreads && kSliceColumns == 32 * 4);

// The kernel's CTAs: those that fill padding rows first, then those that merge. No more than have something to do: a
// warp looks at 32 tokens' rows, and a CTA merges at least a part of a row.
inline int PaddingCtas(const Sm90Params& params) {
  constexpr int64_t kTokens = kCombineWarps * 32;
  return static_cast<int>(std::clamp<int64_t>((params.attention.num_tokens + kTokens - 1) / kTokens, 1, params.ctas));
}
inline int CombineCtas(const Sm90Params& params) {
  const int64_t items = params.attention.num_tokens * params.attention.num_heads * kSlices;
  return PaddingCtas(params) + static_cast<int>(std::min<int64_t>(items, kMergingCtas * params.ctas));
}

// Where the parts of a row lie.
struct RowParts {
  const Sm90Params& params;
  int first_cta, cta_step, parts, row;

  // Of accumulators and states: one of 2 * kMaxCtas * kTileRows at most.
  __device__ int Row(int part) const {
    const int slot = part == 0 ? first_cta * 2 + 1 : (first_cta + part * cta_step) * 2;
    return slot * params.slot_rows + row;
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
  // Four columns of a part's accumulator, from `column` on.
  __device__ float4 Load(int part, int column) const {
    return *reinterpret_cast<const float4*>(params.accumulators + int64_t{Row(part)} * kLatentDim + column);
  }
  // The sums of the accumulators of every kStep-th part from `begin` on, each times its weight, in four columns of each
  // slice from the one with `column` on. Returns the state of the whole row.
  template <int kStep, int kCount>
  __device__ AttentionState Sum(int begin, int column, int lane, float4 (&sums)[kCount]) const {
    constexpr int kBatch = kVectorsAtATime / kCount;  // parts
    float4 values[kBatch][kCount];
    const auto load = [&](int first) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int part = first + i * kStep;
#pragma unroll
        for (int slice = 0; slice < kCount; ++slice) {
          values[i][slice] = part < parts ? Load(part, column + slice * kSliceColumns) : float4{};
        }
      }
    };
    load(begin);  // under way while the states are read
    const AttentionState state = Merge(lane);
    const float shift = state.max == -INFINITY ? 0.0f : state.max;
#pragma unroll
    for (int slice = 0; slice < kCount; ++slice) sums[slice] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int first = begin;;) {
      asm volatile("" : "+r"(first));  // opaque: no registers are kept for the addresses of the loads before
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int part = first + i * kStep;
        const float weight = part < parts ? Exp2(params.states[Row(part)].max - shift) : 0.0f;
#pragma unroll
        for (int slice = 0; slice < kCount; ++slice) {
          sums[slice].x += weight * values[i][slice].x;
          sums[slice].y += weight * values[i][slice].y;
          sums[slice].z += weight * values[i][slice].z;
          sums[slice].w += weight * values[i][slice].w;
        }
      }
      first += kBatch * kStep;
      if (first >= parts) return state;
      load(first);
    }
  }
};

__device__ inline float ResultFactor(AttentionState state) { return state.sum == 0.0f ? 0.0f : state.Normalize(1.0f); }

// What a CTA merges at a time: slices of several rows of a work tile, or a slice of a row of many parts.
__device__ inline int SlicesOfWarp(int parts) { return parts <= kFewParts ? 2 : 1; }
__device__ inline int RowsOfItem(int parts) { return kCombineWarps * SlicesOfWarp(parts) / kSlices; }
__device__ inline int ItemsOf(const SplitTile& tile, int warp_parts) {
  if (tile.rows <= 0) return 0;
  if (tile.parts > warp_parts) return tile.rows * kSlices;
  const int rows = RowsOfItem(tile.parts);
  return (tile.rows + rows - 1) / rows;
}

struct CombineStorage {
  float4 warp_sums[kCombineWarps][kSliceColumns / 4];
  int warp_items[kCombineWarps];
  SplitTile tile;
  int first_cta;
  int item;
};

// kCount slices of a row. By one warp.
template <typename T, int kCount>
__device__ void CombineOnWarp(const RowParts& row, int64_t out_row, int first_slice, int lane) {
  const PagedAttentionParams& attention = row.params.attention;
  const int column = first_slice * kSliceColumns + lane * 4;
  float4 sums[kCount];
  const AttentionState state = row.Sum</*kStep=*/1>(0, column, lane, sums);
  const float factor = ResultFactor(state);
  T* const out = static_cast<T*>(attention.out) + out_row * kLatentDim + column;
#pragma unroll
  for (int slice = 0; slice < kCount; ++slice) {
    const float4 sum = sums[slice];
    *reinterpret_cast<uint2*>(out + slice * kSliceColumns) =
        make_uint2(Pack<T>(sum.x * factor, sum.y * factor), Pack<T>(sum.z * factor, sum.w * factor));
  }
  if (attention.lse != nullptr && column == 0) attention.lse[out_row] = state.LogSumExp();
}

// By all threads of the CTA; `shared` is free once they are all through.
template <typename T>
__device__ void CombineOnCta(const RowParts& row, int64_t out_row, int column, int warp, int lane,
                             CombineStorage& shared) {
  const PagedAttentionParams& attention = row.params.attention;
  float4 sums[1];
  const AttentionState state = row.Sum</*kStep=*/kCombineWarps>(warp, column + lane * 4, lane, sums);
  shared.warp_sums[warp][lane] = sums[0];
  __syncthreads();
  const int pair = static_cast<int>(threadIdx.x);  // of columns
  if (pair >= kSliceColumns / 2) return;
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
__global__ void __launch_bounds__(kCombineThreads, kMergingCtas)
    MlaCombineKernel(const __grid_constant__ Sm90Params params, int padding_ctas) {
#if XLA_GPU_HAS_WGMMA
  __shared__ CombineStorage shared;
  WaitForPreviousKernel();
  AllowDependentLaunch();
  if (static_cast<int>(blockIdx.x) < padding_ctas) {
    FillPaddingRows<T>(params.attention, blockIdx.x, static_cast<unsigned>(padding_ctas));
    return;
  }
  const int cta = static_cast<int>(blockIdx.x) - padding_ctas;
  const int merging_ctas = static_cast<int>(gridDim.x) - padding_ctas;
  const auto thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = __shfl_sync(~0u, thread / 32, 0);
  const int warp_parts = WarpParts(params);
  // Thread i looks at the work tile that CTA i has written down.
  const int items = thread < params.ctas ? ItemsOf(params.split_tiles[thread], warp_parts) : 0;
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
      shared.tile = params.split_tiles[thread];
      shared.first_cta = thread;
      shared.item = item - begin;
    }
    __syncthreads();
    const SplitTile tile = shared.tile;
    RowParts row{params, shared.first_cta, tile.cta_step, tile.parts, 0};
    if (tile.parts > warp_parts) {
      row.row = shared.item / kSlices;
      CombineOnCta<T>(row, int64_t{tile.first_row} + row.row, shared.item % kSlices * kSliceColumns, warp, lane,
                      shared);
    } else {
      const int slices = SlicesOfWarp(tile.parts);
      row.row = (shared.item * kCombineWarps + warp) * slices / kSlices;
      const int64_t out_row = int64_t{tile.first_row} + row.row;
      const int first_slice = warp * slices % kSlices;
      if (row.row >= tile.rows) {
        // The warp has nothing to do.
      } else if (slices == 2) {
        CombineOnWarp<T, 2>(row, out_row, first_slice, lane);
      } else {
        CombineOnWarp<T, 1>(row, out_row, first_slice, lane);
      }
    }
    __syncthreads();
  }
#endif
}

}  // namespace xla_gpu::mla

#endif  // XLA_GPU_OPS_MLA_ATTENTION_SM90_COMBINE_CUH_
