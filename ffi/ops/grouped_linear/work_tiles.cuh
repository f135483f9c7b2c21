// The work tiles of a call, found on the device: (group, up to kRowTile of its rows, features), in this order but that
// the row tiles of the same features are neighbours, so that all but the first read their weights from L2.
#ifndef XLA_GPU_OPS_GROUPED_LINEAR_WORK_TILES_CUH_
#define XLA_GPU_OPS_GROUPED_LINEAR_WORK_TILES_CUH_

#include <cstdint>

#include "ffi/ops/grouped_linear/args.h"

namespace xla_gpu::grouped_linear {

struct WorkTile {
  int group;  // negative: there is none
  int first_row;
  int rows;
  int feature_tile;
  bool is_alone;  // no other work tile has its weights
};

// The sum of the values of the threads before, at most `limit`. Values are 0 to `limit`, which is below 2^30.
template <int kThreads>
__device__ inline int SumBefore(int value, int limit, int* warp_sums) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int sum = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, distance);
    if (lane >= distance) sum = min(sum + other, limit);
  }
  if (lane == 31) warp_sums[warp] = sum;
  const int of_warp = __shfl_up_sync(0xffffffffu, sum, 1);
  __syncthreads();
  int before = lane == 0 ? 0 : of_warp;
  for (int i = 0; i < warp; ++i) before = min(before + warp_sums[i], limit);
  __syncthreads();
  return before;
}

// In shared memory, PlanBytes(num_groups).
template <int kRowTile, int kThreads>
class WorkPlan {
 public:
  __device__ WorkPlan(const GroupedArgs& args, int* memory)
      : args_(args), row_begin_(memory), tile_begin_(memory + args.num_groups + 1) {}

  // By all threads. Sizes below 0 count as 0, and rows end with args.rows.
  __device__ void Make() {
    __shared__ int warp_sums[kThreads / 32];
    const int each = (args_.num_groups + kThreads - 1) / kThreads;
    const int begin = min(static_cast<int>(threadIdx.x) * each, args_.num_groups);
    const int end = min(begin + each, args_.num_groups);
    int rows = 0;
    for (int i = begin; i < end; ++i) rows = min(rows + SizeOf(i), args_.rows);
    const int rows_before = SumBefore<kThreads>(rows, args_.rows, warp_sums);
    int tiles = 0, row = rows_before;
    for (int i = begin; i < end; ++i) {
      row_begin_[i] = row;
      const int next = min(row + SizeOf(i), args_.rows);
      tiles += (next - row + kRowTile - 1) / kRowTile;
      row = next;
    }
    int tile = SumBefore<kThreads>(tiles, (1 << 30) - 1, warp_sums);
    int first = rows_before;
    for (int i = begin; i < end; ++i) {
      tile_begin_[i] = tile;
      const int next = min(first + SizeOf(i), args_.rows);
      tile += (next - first + kRowTile - 1) / kRowTile;
      first = next;
    }
    if (end == args_.num_groups && (begin < end || threadIdx.x == 0)) {
      row_begin_[end] = first;
      tile_begin_[end] = tile;
    }
    __syncthreads();
  }

  __device__ int num_tiles() const { return tile_begin_[args_.num_groups] * args_.feature_tiles; }
  __device__ int rows_of_groups() const { return row_begin_[args_.num_groups]; }

  __device__ WorkTile Find(int index) const {
    if (index >= num_tiles()) return {-1, 0, 0, 0, false};
    // The last group that begins at or before it.
    const int row_tile_before = index / args_.feature_tiles;
    int low = 0, high = args_.num_groups - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (tile_begin_[middle] <= row_tile_before) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const int row_tiles = tile_begin_[low + 1] - tile_begin_[low];
    const int local = index - tile_begin_[low] * args_.feature_tiles;
    const int first_row = row_begin_[low] + local % row_tiles * kRowTile;
    return {low, first_row, min(kRowTile, row_begin_[low + 1] - first_row), local / row_tiles, row_tiles == 1};
  }

 private:
  __device__ int SizeOf(int group) const { return min(max(args_.group_sizes[group], 0), args_.rows); }

  const GroupedArgs& args_;
  int* row_begin_;
  int* tile_begin_;
};

constexpr int PlanBytes(int num_groups) { return (2 * (num_groups + 1) * 4 + 127) / 128 * 128; }

}  // namespace xla_gpu::grouped_linear

#endif  // XLA_GPU_OPS_GROUPED_LINEAR_WORK_TILES_CUH_
