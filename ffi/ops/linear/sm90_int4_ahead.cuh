// The products of a warp of sm90_int4_kernel.cuh with 16 or 32 rows: loads and conversions are issued ahead of the
// products that need them.
//
// A step is 32 values of k: two of mma.m16n8k16 for 16 weight rows. While the products of one step of 16 weight rows
// run, the next 16 weight rows are converted, and x and weights of the next step are loaded.
#ifndef XLA_GPU_OPS_LINEAR_SM90_INT4_AHEAD_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_INT4_AHEAD_CUH_

#include <cstdint>
#include <type_traits>
#include <utility>

#include "ffi/device/mbarrier.cuh"
#include "ffi/device/mma.cuh"
#include "ffi/ops/linear/sm90_int4_range.cuh"
#include "ffi/ops/linear/sm90_int4_scales.cuh"
#include "ffi/ops/linear/sm90_int4_traits.cuh"
#include "ffi/ops/linear/sm90_int4_weights.cuh"

namespace xla_gpu::linear {

// Calls a function with each number in turn, as a type. A loop of the same, of one tile of 16 weight rows, would not be
// unrolled.
template <typename Function, int... kNumbers>
__device__ __forceinline__ void ForEach(const Function& function, std::integer_sequence<int, kNumbers...>) {
  (function(std::integral_constant<int, kNumbers>()), ...);
}

// As MultiplyInt4, with the same bits.
template <typename Config>
__device__ __forceinline__ void MultiplyInt4Ahead(const Sm90Int4Args& args, int work_tile, int part, int first_tile,
                                                  ChunkRange range, const char* shared, Int4Stages stages,
                                                  Int4Barriers barriers,
                                                  float (&total)[Config::kTilesOfWarp][Config::kRowBlocks][4]) {
  using T = typename Config::T;
  constexpr int kTiles = Config::kTilesOfWarp, kRowBlocks = Config::kRowBlocks, kSteps = Config::kChunkK / 32;
  constexpr int kUnits = kRowBlocks > 4 ? 2 : 1, kUnitBlocks = kRowBlocks / kUnits;  // of x, loaded at once
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4, row = Int4RowOfLanes(g);
  uint32_t magic = kInt4Magic<T>;
  asm volatile("" : "+r"(magic));
  const int chunks = range.end - range.begin;
  Int4Scales<Config> scales(args, work_tile, first_tile, row, t, range, ZeroUnknown(args) | kPairOfOnes<T>);
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (auto& block : total[m]) block[0] = block[1] = block[2] = block[3] = 0.0f;
  }

  // ---- Loads from shared memory
  const int x_of_lane = g * 128 + ((2 * t ^ g) << 4);
  const int weights_of_lane = first_tile * Config::kTileBytes + row * 128 + ((t / 2 ^ row) << 4) + t % 2 * 8;
  uint2 raw[2][kTiles][2];  // [panel % 2]: 64 values of k
  uint4 b[2][kUnitBlocks];  // [unit % 2]
  uint32_t a[2][2][4];      // [(step * kTiles + m) % 2]
  Int4Offsets offsets[kTiles][2];
  Int4ChunkScales<kTiles> of_chunk;
  const auto load_panel = [&](int stage, int panel) {
    const char* const from = shared + stages.Weights(part, stage);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int at = (weights_of_lane ^ panel << 5) + m * Config::kTileBytes + r * 1024;
        raw[panel % 2][m][r] = *reinterpret_cast<const uint2*>(from + at);
      }
    }
  };
  const auto load_x = [&](int stage, int unit) {
    const int step = unit / kUnits, first_block = unit % kUnits * kUnitBlocks;
    const char* const from = shared + stages.X(part, stage) + step / 2 * (Config::kRowTile * 128);
#pragma unroll
    for (int i = 0; i < kUnitBlocks; ++i) {
      b[unit % 2][i] = *reinterpret_cast<const uint4*>(from + (x_of_lane ^ step % 2 << 4) + (first_block + i) * 1024);
    }
  };
  const auto convert = [&](int step, int m) {
    uint32_t(&to)[2][4] = a[(step * kTiles + m) % 2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint2 words = raw[step / 2 % 2][m][r];
      uint32_t values[4];
      ConvertInt4Word<T>(step % 2 == 0 ? words.x : words.y, offsets[m][r], magic, values);
      to[0][r] = values[0], to[0][r + 2] = values[1];
      to[1][r] = values[2], to[1][r + 2] = values[3];
    }
  };
  const auto set_offsets = [&](int group) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) offsets[m][r] = of_chunk.offsets[m][r].Of(group);
    }
  };

  PipelineState ring;
  if (chunks > 0) {
    WaitBarrier(barriers.Full(0), 0);
    load_panel(0, 0);
    load_x(0, 0);
  }
  for (int chunk = 0; chunk < chunks; ++chunk) {
    scales.Of(chunk, chunks, &of_chunk);
    set_offsets(0);
    const int stage = ring.stage;
    float sum[kTiles][kRowBlocks][4];
    convert(0, 0);
    const auto do_unit = [&](auto number) {
      constexpr int unit = decltype(number)::value;
      constexpr int step = unit / kUnits, group = step / 4, first_block = unit % kUnits * kUnitBlocks;
      constexpr bool first_of_step = unit % kUnits == 0, last_of_step = unit % kUnits == kUnits - 1;
      // ---- The next loads; after the last one those of the next chunk's first
      if (unit + 1 < kSteps * kUnits) {
        load_x(stage, unit + 1);
        if (first_of_step && step % 2 == 0 && step + 2 < kSteps) load_panel(stage, step / 2 + 1);
      } else {
        FenceProxyAsync();  // NOTE: the arrival would not wait for the data of loads in front of it
        __syncwarp();
        if (lane == 0) ArriveBarrier(barriers.Empty(stage));
        ring.Advance(args.stages);
        if (chunk + 1 < chunks) {
          WaitBarrier(barriers.Full(ring.stage), ring.phase);
          load_panel(ring.stage, 0);
          load_x(ring.stage, 0);
        }
      }
      if (first_of_step && step % 4 == 0) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
#pragma unroll
          for (auto& block : sum[m]) block[0] = block[1] = block[2] = block[3] = 0.0f;
        }
      }
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        if (m + 1 < kTiles) {
          if (first_of_step) convert(step, m + 1);
        } else if (last_of_step && step + 1 < kSteps) {
          if (step == 3) set_offsets(1);
          convert(step + 1, 0);
        }
        const uint32_t(&of_tile)[2][4] = a[(step * kTiles + m) % 2];
#pragma unroll
        for (int i = 0; i < kUnitBlocks; ++i) {
          Mma16x8x16<T>(sum[m][first_block + i], of_tile[0], b[unit % 2][i].x, b[unit % 2][i].y);
        }
#pragma unroll
        for (int i = 0; i < kUnitBlocks; ++i) {
          Mma16x8x16<T>(sum[m][first_block + i], of_tile[1], b[unit % 2][i].z, b[unit % 2][i].w);
        }
        if constexpr (step % 4 == 3) {
          float factor[2];
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float2 pair = Unpack<T>(of_chunk.scale[m][r]);
            factor[r] = group == 0 ? pair.x : pair.y;
          }
#pragma unroll
          for (int block = first_block; block < first_block + kUnitBlocks; ++block) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              total[m][block][i] = fmaf(factor[i / 2], sum[m][block][i], total[m][block][i]);
            }
          }
        }
      }
    };
    ForEach(do_unit, std::make_integer_sequence<int, kSteps * kUnits>());
  }
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_INT4_AHEAD_CUH_
