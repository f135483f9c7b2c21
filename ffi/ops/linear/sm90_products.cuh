// The products of the kernel of sm_90a, by two warpgroups: with weights that wgmma reads from shared memory, and with
// weights that are converted in registers.
#ifndef XLA_GPU_OPS_LINEAR_SM90_PRODUCTS_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_PRODUCTS_CUH_

#include <cstdint>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/wgmma_narrow.cuh"
#include "ffi/ops/linear/sm90_traits.cuh"
#include "ffi/ops/linear/weight_formats.cuh"

namespace xla_gpu::linear {

// Two values of float8 or int8, in the lower half of `bytes`, as two T.
template <typename T, WeightFormat kFormat>
__device__ inline uint32_t ConvertBytePair(uint32_t bytes) {
  if constexpr (kFormat == WeightFormat::kFloat8) return ConvertFloat8Pair<T, true>(bytes);
  return ConvertInt8Pair<T>(bytes ^ 0x8080u, 0);
}

// 64 values of k of the weight rows g (r = 0) and g + 8 (r = 1) of a warp, as the A operands of four steps. `row`: row
// g in the stage; its 16-byte vectors are permuted by XOR with g.
template <typename T, WeightFormat kFormat>
__device__ inline void ConvertPart(const char* row, int part, int g, int t, const uint32_t (&offsets)[2],
                                   uint32_t (&a)[4][4]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if constexpr (kFormat == WeightFormat::kInt4) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const uint4 raw = *reinterpret_cast<const uint4*>(row + r * 1024 + (((part * 2 + pair) ^ g) << 4));
        a[2 * pair][r] = ConvertInt4Pair<T>(raw.x, t, offsets[r]);
        a[2 * pair][r + 2] = ConvertInt4Pair<T>(raw.y, t, offsets[r]);
        a[2 * pair + 1][r] = ConvertInt4Pair<T>(raw.z, t, offsets[r]);
        a[2 * pair + 1][r + 2] = ConvertInt4Pair<T>(raw.w, t, offsets[r]);
      }
    } else {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const char* const vector = row + r * 1024 + (((part * 4 + step) ^ g) << 4) + 2 * t;
        a[step][r] = ConvertBytePair<T, kFormat>(*reinterpret_cast<const uint16_t*>(vector));
        a[step][r + 2] = ConvertBytePair<T, kFormat>(*reinterpret_cast<const uint16_t*>(vector + 8));
      }
    }
  }
}

// The products of weights that wgmma reads as they are.
template <typename Config>
__device__ __forceinline__ void MultiplyPlain(const Sm90Args& args, int chunk_begin, int chunk_end, uint32_t weights,
                                              uint32_t xs, RingBarriers<Config> barriers,
                                              float (&sum)[Config::kBlocks][Config::kRowTile / 8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warpgroup = static_cast<int>(threadIdx.x) / 128;
  PipelineState weight_ring, x_ring;
  // The stages whose products are still under way: they are given back when the next ones have been started.
  uint32_t last_weight = 0, last_x = 0;
  for (int chunk = chunk_begin; chunk < chunk_end; ++chunk) {
    WaitBarrier(barriers.XFull(x_ring.stage), x_ring.phase);
    const uint64_t b = MakeSmemDescKMajor(xs + x_ring.stage * Config::kXStageBytes);
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {
      WaitBarrier(barriers.WeightFull(weight_ring.stage), weight_ring.phase);
      const uint64_t a = MakeSmemDescKMajor(weights + weight_ring.stage * Config::kWeightStageBytes +
                                            warpgroup * (Config::kWeightStageBytes / 2));
      WgmmaFence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        WgmmaNarrow<typename Config::T>(sum[block], AdvanceSmemDesc(a, step * 32), AdvanceSmemDesc(b, step * 32),
                                        chunk > chunk_begin || step > 0);
      }
      WgmmaCommit();
      WgmmaWait<1>();
      if (lane == 0) {
        if (last_weight != 0) ArriveBarrier(last_weight);
        if (block == 0 && last_x != 0) ArriveBarrier(last_x);
      }
      last_weight = barriers.WeightEmpty(weight_ring.stage);
      weight_ring.Advance(args.weight_stages);
    }
    last_x = barriers.XEmpty(x_ring.stage);
    x_ring.Advance(args.x_stages);
  }
  WgmmaWait<0>();
#pragma unroll
  for (int block = 0; block < Config::kBlocks; ++block) WgmmaFenceOperand(sum[block]);
}

// The scales and offsets of groups, of a lane's two weight rows.
template <typename Config>
struct GroupScales {
  static constexpr int kGroups = Config::kStageK / static_cast<int>(kQuantGroup);
  float scale[kGroups][2];
  uint32_t offset[kGroups][2];

  // Of chunk `chunk`; what is finite where there is no group or row.
  __device__ void Load(const LinearArgs& args, int first_row, int chunk) {
    using T = typename Config::T;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int group = chunk * kGroups + i;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = first_row + 8 * r;
        const bool read = row < args.n && group < args.groups;
        if constexpr (Config::kFormat == WeightFormat::kInt4) {
          const int64_t at = read ? static_cast<int64_t>(row) * args.groups + group : 0;
          scale[i][r] = read ? static_cast<float>(static_cast<const T*>(args.weight_scale)[at]) : 0.0f;
          offset[i][r] = Int4Offset<T>(read && args.zero_point != nullptr ? args.zero_point[at] : 8);
        } else {
          const int64_t at = read ? static_cast<int64_t>(row / static_cast<int>(kQuantGroup)) * args.groups + group : 0;
          const bool block = args.scale == WeightScale::kBlock;
          scale[i][r] = read && block ? static_cast<const float*>(args.weight_scale)[at] : 1.0f;
        }
      }
    }
  }
};

// The products of weights that are converted in registers. `shared`: the weight stages.
template <typename Config>
__device__ __forceinline__ void MultiplyConverted(const Sm90Args& args, int tile, int chunk_begin, int chunk_end,
                                                  const char* shared, uint32_t xs, RingBarriers<Config> barriers,
                                                  float (&sum)[Config::kBlocks][Config::kRowTile / 8][4]) {
  using T = typename Config::T;
  constexpr int kRowBlocks = Config::kRowTile / 8, kParts = Config::kXStagesOfChunk;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int g = lane / 4, t = lane % 4;
  const char* const row = shared + (warp * 16 + g) * 128;
  const int first_row = FirstWeightRow<Config>(args.linear, tile, warp / 4) + warp % 4 * 16 + g;
  GroupScales<Config> scales, next_scales;
  float total[Config::kGrouped ? kRowBlocks : 1][4] = {};
  if constexpr (Config::kGrouped) next_scales.Load(args.linear, first_row, chunk_begin);
  PipelineState weight_ring, x_ring;
  for (int chunk = chunk_begin; chunk < chunk_end; ++chunk) {
    if constexpr (Config::kGrouped) {
      scales = next_scales;
      if (chunk + 1 < chunk_end) next_scales.Load(args.linear, first_row, chunk + 1);
    }
    const PipelineState first_x = x_ring;
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {
      WaitBarrier(barriers.WeightFull(weight_ring.stage), weight_ring.phase);
      const char* const from = row + weight_ring.stage * Config::kWeightStageBytes;
      x_ring = first_x;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        uint32_t a[4][4];
        const uint32_t no_offset[2] = {0, 0};
        if constexpr (Config::kFormat == WeightFormat::kInt4) {
          ConvertPart<T, Config::kFormat>(from, part, g, t, scales.offset[part / 2], a);
        } else {
          ConvertPart<T, Config::kFormat>(from, part, g, t, no_offset, a);
        }
        if (block == 0) WaitBarrier(barriers.XFull(x_ring.stage), x_ring.phase);
        const uint64_t b = MakeSmemDescKMajor(xs + x_ring.stage * Config::kXStageBytes);
        __syncwarp();
        WgmmaFence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          const bool add = Config::kGrouped ? part % 2 > 0 || step > 0 : chunk > chunk_begin || part > 0 || step > 0;
          WgmmaNarrow<T>(sum[block], a[step], AdvanceSmemDesc(b, step * 32), add);
        }
        WgmmaCommit();
        WgmmaWait<0>();
        WgmmaFenceOperand(sum[block]);
        if constexpr (Config::kGrouped) {
          if (part % 2 == 1) {
#pragma unroll
            for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                total[r][i] = fmaf(scales.scale[part / 2][i / 2], sum[0][r][i], total[r][i]);
              }
            }
          }
        }
        if (block == Config::kBlocks - 1 && lane == 0) ArriveBarrier(barriers.XEmpty(x_ring.stage));
        x_ring.Advance(args.x_stages);
      }
      __syncwarp();
      if (lane == 0) ArriveBarrier(barriers.WeightEmpty(weight_ring.stage));
      weight_ring.Advance(args.weight_stages);
    }
  }
  if constexpr (Config::kGrouped) {
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[0][r][i] = total[r][i];
    }
  }
}

// Starts to bring the scales and zero points of a CTA's part of its weight rows into L2, a row a thread.
template <typename Config>
__device__ inline void PrefetchGroups(const LinearArgs& args, int tile, int chunk_begin, int chunk_end) {
  constexpr int kGroups = Config::kStageK / static_cast<int>(kQuantGroup), kLine = 128;
  const int quarter = static_cast<int>(threadIdx.x) / 64;
  if (quarter >= 2 * Config::kBlocks) return;
  const int row = FirstWeightRow<Config>(args, tile, quarter) + static_cast<int>(threadIdx.x) % 64;
  if (row >= args.n) return;
  const int64_t begin = static_cast<int64_t>(row) * args.groups + chunk_begin * kGroups;
  const int groups = min(chunk_end * kGroups, args.groups) - chunk_begin * kGroups;
  const char* const scales = static_cast<const char*>(args.weight_scale) + begin * 2;
  for (int byte = 0; byte < groups * 2; byte += kLine) PrefetchToL2(scales + byte);
  if (args.zero_point == nullptr) return;
  for (int byte = 0; byte < groups; byte += kLine) PrefetchToL2(args.zero_point + begin + byte);
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_PRODUCTS_CUH_
