// Scales and zero points of int4 groups as the warps of the kernels of sm_90a have them.
#ifndef XLA_GPU_OPS_LINEAR_SM90_INT4_SCALES_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_INT4_SCALES_CUH_

#include <cstdint>

#include "ffi/ops/linear/sm90_converted_weights.cuh"
#include "ffi/ops/linear/sm90_int4_range.cuh"
#include "ffi/ops/linear/sm90_int4_traits.cuh"

namespace xla_gpu::linear {

// Of a warp's weight rows, for 8 groups at a time: two of them in each lane of four, loaded ahead.
template <typename Config>
class Int4Scales {
 public:
  static constexpr int kTiles = Config::kTilesOfWarp;

  // row: of a tile of 16, the lane's; t: the lane's number of four.
  __device__ __forceinline__ Int4Scales(const Sm90Int4Args& args, int work_tile, int first_tile, int row, int t,
                                        ChunkRange range)
      : args_(args), t_(t), range_(range) {
    const int tiles_of_box = args.box_rows / 16;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      const int tile = first_tile + m, box = tile >= tiles_of_box;  // of two at most
      first_row_[m] = FirstWeightRow(args, work_tile, box) + (tile - box * tiles_of_box) * 16 + row;
    }
    Load(range.begin);
  }

  // Those of a chunk, for all lanes; chunks follow one another.
  __device__ __forceinline__ void Of(int chunk, uint32_t (&scale)[kTiles][2], uint32_t (&zero_points)[kTiles]) {
    const int chunk_of_load = (chunk - range_.begin) % kChunksOfLoad;
    if (chunk_of_load == 0) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        groups_[m] = next_groups_[m];
        groups_[m].zero_points[0] |= groups_[m].zero_points[1] << 16;
      }
      if (chunk + kChunksOfLoad < range_.end) Load(chunk + kChunksOfLoad);
    }
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      scale[m][0] = __shfl_sync(~0u, groups_[m].scale[0], chunk_of_load, 4);
      scale[m][1] = __shfl_sync(~0u, groups_[m].scale[1], chunk_of_load, 4);
      zero_points[m] = __shfl_sync(~0u, groups_[m].zero_points[0], chunk_of_load, 4);
    }
  }

 private:
  static constexpr int kChunksOfLoad = 4;
  using Groups = RowGroups<typename Config::T, WeightFormat::kInt4>;

  __device__ __forceinline__ void Load(int chunk) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      const GroupLoader<typename Config::T, WeightFormat::kInt4> loader(args_.linear, first_row_[m]);
      loader.Load(args_.linear, chunk * 2 + 2 * t_, &next_groups_[m]);
    }
  }

  const Sm90Int4Args& args_;
  const int t_;
  const ChunkRange range_;
  int first_row_[kTiles];
  Groups groups_[kTiles], next_groups_[kTiles];
};

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_INT4_SCALES_CUH_
