// Scales and zero points of int4 groups as the warps of sm90_int4_kernel.cuh have them.
#ifndef XLA_GPU_OPS_LINEAR_SM90_INT4_SCALES_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_INT4_SCALES_CUH_

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "ffi/ops/linear/sm90_int4_range.cuh"
#include "ffi/ops/linear/sm90_int4_traits.cuh"
#include "ffi/ops/linear/sm90_int4_weights.cuh"

namespace xla_gpu::linear {

// Of the 16 rows of each of a warp's tiles, those r and r + 8 of a lane, in both groups of a chunk.
template <int kTiles>
struct Int4ChunkScales {
  uint32_t scale[kTiles][2];  // two T: scales times kInt4Unit
  Int4GroupOffsets offsets[kTiles][2];
};

// For 8 groups at a time: two of them, a chunk's, in each lane of four, loaded ahead.
template <typename Config>
class Int4Scales {
 public:
  using T = typename Config::T;
  static constexpr int kTiles = Config::kTilesOfWarp;

  // row: of a tile of 16, the lane's; t: the lane's number of four. one: a pair of 1, in a register.
  __device__ __forceinline__ Int4Scales(const Sm90Int4Args& args, int work_tile, int first_tile, int row, int t,
                                        ChunkRange range, uint32_t one)
      : args_(args.linear), one_(one), group_(range.begin * 2 + 2 * t) {
    const int tiles_of_box = args.box_rows / 16;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      const int tile = first_tile + m, box = tile >= tiles_of_box;  // of two at most
      first_row_[m] = FirstWeightRow(args, work_tile, box) + (tile - box * tiles_of_box) * 16 + row;
    }
    Load();
  }

  // Those of chunk i of `chunks` of the range, for all lanes; chunks follow one another.
  __device__ __forceinline__ void Of(int i, int chunks, Int4ChunkScales<kTiles>* to) {
    const int chunk_of_load = i & 3;
    if (chunk_of_load == 0) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          scale_[m][r] = next_scale_[m][r];
          if constexpr (std::is_same_v<T, __nv_bfloat16>) {
            static_assert(kInt4Unit<T> == 4.0f);
            scale_[m][r] = FmaPair<T>(scale_[m][r], 0x40804080u, 0x80008000u);  // times 4, exactly
          }
          low_[m][r] = LowOffsetsOf<T>(next_zero_points_[m][r]);
        }
      }
      group_ += 8;
      if (i + 4 < chunks) Load();
    }
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        to->scale[m][r] = __shfl_sync(~0u, scale_[m][r], chunk_of_load, 4);
        const uint32_t low = __shfl_sync(~0u, low_[m][r], chunk_of_load, 4);
        to->offsets[m][r] = {low, HighOffsetsOf<T>(low, one_)};
      }
    }
  }

 private:
  // Without branches where groups are even. Nobody reads results of rows past the last one, which have its scales, nor
  // chunks past the last one. Where k ends within a chunk, its second group has a scale of 0.
  __device__ __forceinline__ void Load() {
    const auto* const scales = static_cast<const uint16_t*>(args_.weight_scale);
    const int group = group_, groups = args_.groups;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t first = static_cast<uint32_t>(min(first_row_[m] + 8 * r, args_.n - 1)) * groups;
        uint32_t& scale = next_scale_[m][r];
        uint32_t& zero_points = next_zero_points_[m][r];
        zero_points = 0x0808;
        if (groups % 2 == 0) {
          const uint32_t at = first + min(group, groups - 2);
          scale = *reinterpret_cast<const uint32_t*>(scales + at);
          if (args_.zero_point != nullptr) {
            zero_points = *reinterpret_cast<const uint16_t*>(args_.zero_point + at);
          }
        } else {
          const uint32_t at = first + min(group, groups - 1);
          const bool both = group + 1 < groups;
          scale = scales[at] | (both ? scales[at + 1] : 0u) << 16;
          if (args_.zero_point != nullptr) {
            zero_points = args_.zero_point[at] | (both ? args_.zero_point[at + 1] : 8u) << 8;
          }
        }
      }
    }
  }

  const LinearArgs& args_;
  const uint32_t one_;
  int group_;  // of the next load
  int first_row_[kTiles];
  uint32_t next_scale_[kTiles][2], next_zero_points_[kTiles][2];
  uint32_t scale_[kTiles][2], low_[kTiles][2];
};

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_INT4_SCALES_CUH_
