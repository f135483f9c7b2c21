// The kernel for few rows: a stream over the weights at the bandwidth of device memory.
//
// The weights are the M operand of mma.m16n8k16 and the rows of x its N operand, so that 1 to 8 rows cost one
// instruction for 16 features. A CTA computes work tiles of 128 features: four warps along the features, two along k. A
// stage of its ring of cp.async copies holds a chunk of k. Weights need no swizzle, since each lane reads the 16 bytes
// that it copied itself.
//
// The space of (work tile, chunk) is divided among kLinearCtas CTAs in equal, contiguous ranges (stream-K). A CTA that
// has only a part of a work tile stores its sums; the last of those that share the tile adds them, in the order of k.
#ifndef XLA_GPU_OPS_LINEAR_KERNEL_CUH_
#define XLA_GPU_OPS_LINEAR_KERNEL_CUH_

#include <cstdint>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/dependent_launch.cuh"
#include "ffi/device/mma.cuh"
#include "ffi/device/wgmma.cuh"
#include "ffi/ops/linear/args.h"
#include "ffi/ops/linear/epilogue.cuh"
#include "ffi/ops/linear/weight_formats.cuh"
#include "ffi/ops/linear/work_range.cuh"

namespace xla_gpu::linear {

template <typename T_, WeightFormat kFormat_, int kRowTile_>
struct Traits {
  using T = T_;
  static constexpr WeightFormat kFormat = kFormat_;
  static constexpr int kRowTile = kRowTile_;
  static constexpr int kRowBlocks = kRowTile / 8;
  // Two warps along k. Along the features eight of 16 each, or four of 32 each: every warp reads all of x from shared
  // memory, so that many rows want few warps.
  static constexpr int kWarpsN = kRowTile == 8 ? 8 : 4;
  static constexpr int kFeatureBlocks = 8 / kWarpsN;    // of 16, of a warp
  static constexpr int kWarpRows = 2 * kFeatureBlocks;  // weight rows of a lane: g, g + 8, …
  static constexpr int kThreads = kWarpsN * 2 * 32;
  static constexpr int kElements = ElementsIn16Bytes(kFormat);
  static constexpr int kWarpK = kFormat == WeightFormat::kPlain ? 64 : 128;  // of a stage, for one of the warps along k
  static constexpr int kChunkK = 2 * kWarpK;
  static constexpr int kBlocks = kWarpK / (4 * kElements);  // a block: 16 bytes for each of four lanes
  static constexpr int kCopies = kWarpRows * kBlocks;       // of 16 bytes, a lane and stage
  static constexpr int kWeightBytes = kCopies * kThreads * 16;
  static constexpr int kXPieces = kChunkK / 8;  // of 16 bytes, of a row and stage
  static constexpr int kXBytes = kRowTile * kXPieces * 16;
  static constexpr int kStageBytes = kWeightBytes + kXBytes;
  static constexpr int kSumBytes = kRowTile * kSumPitch * 4;

  static constexpr int SharedBytes(int stages) { return stages * kStageBytes + kSumBytes; }

  // Where piece `piece` of a row of x stands in its row: the eight lanes that shared memory serves at a time, rows g
  // and g + 1 of four lanes each, reach all banks.
  static __device__ int Swizzle(int row, int piece) {
    if constexpr (kFormat == WeightFormat::kPlain) return piece ^ ((row & 1) << 2);
    if constexpr (kFormat == WeightFormat::kInt4) return piece ^ ((piece >> 3 & 1) << 1) ^ (row & 1);
    return piece ^ (row & 1);
  }
};

// Waits for all but the last `pending` groups of copies.
__device__ inline void WaitForStage(int pending) {
  switch (pending) {
    case 0:
      return WaitAsync<0>();
    case 1:
      return WaitAsync<1>();
    case 2:
      return WaitAsync<2>();
    case 3:
      return WaitAsync<3>();
    case 4:
      return WaitAsync<4>();
    default:
      return WaitAsync<5>();
  }
}
inline constexpr int kMaxStages = 7;

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1) LinearKernel(const __grid_constant__ LinearArgs args) {
#if !XLA_GPU_HAS_WGMMA  // sm90_kernel.cuh is used there
  using T = typename Config::T;
  constexpr WeightFormat kFormat = Config::kFormat;
  constexpr int kRowBlocks = Config::kRowBlocks, kFeatureBlocks = Config::kFeatureBlocks;
  constexpr int kWarpRows = Config::kWarpRows, kThreads = Config::kThreads;
  constexpr bool kMayHaveGroups = kFormat == WeightFormat::kFloat8 || kFormat == WeightFormat::kInt4;
  extern __shared__ __align__(128) char shared[];
  __shared__ bool is_last[2];  // of the CTAs that share its first, its last work tile
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32, g = lane / 4, t = lane % 4;
  const int warp_n = tid / 32 % Config::kWarpsN, warp_k = tid / 32 / Config::kWarpsN;
  const int warp_feature = warp_n * (kFeatureBlocks * 16);
  const uint32_t ring = SharedAddress(shared);
  float* sums = reinterpret_cast<float*>(shared + args.stages * Config::kStageBytes);  // [kRowTile][kSumPitch]
  const bool grouped = kFormat == WeightFormat::kInt4 || args.scale == WeightScale::kBlock;

  const int cta = static_cast<int>(blockIdx.x);
  const int begin = RangeBegin(args, cta), end = RangeBegin(args, cta + 1);

  // ---- Copies: the next unit whose stage is filled
  int load_unit = begin, load_tile = begin / args.chunks, load_chunk = begin % args.chunks;
  int load_stage = 0;
  const char* load_row[kWarpRows];  // 16 bytes of chunk 0 of rows g, g + 8, … of the warp's; null past the end
  const auto find_rows = [&] {
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const int row = WeightRow(args, load_tile, warp_feature + r * 8 + g);
      load_row[r] = row < 0 ? nullptr : args.weight + row * args.weight_row_bytes + 16 * t;
    }
  };
  find_rows();
  const auto load = [&] {
    if (load_unit < end) {
      const uint32_t stage = ring + load_stage * Config::kStageBytes;
      // ---- weights
      constexpr int kBlockBytes = 64;
      const int at = (load_chunk * 2 + warp_k) * Config::kBlocks * kBlockBytes;
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
#pragma unroll
        for (int j = 0; j < Config::kBlocks; ++j) {
          const int byte = at + j * kBlockBytes;
          const bool read = load_row[r] != nullptr && byte + 16 * t < args.weight_row_bytes;
          CopyAsync16(stage + ((r * Config::kBlocks + j) * kThreads + tid) * 16,
                      read ? load_row[r] + byte : args.weight, read, kEvictFirst);
        }
      }
      // ---- x
      constexpr int kPieces = Config::kRowTile * Config::kXPieces;
#pragma unroll
      for (int i = 0; i < (kPieces + kThreads - 1) / kThreads; ++i) {
        const int index = i * kThreads + tid;
        if (kPieces % kThreads != 0 && index >= kPieces) break;
        const int row = index / Config::kXPieces, piece = index % Config::kXPieces;
        const int at_k = load_chunk * Config::kChunkK + piece * 8;
        const bool read = row < args.rows && at_k < args.k;
        const T* from = static_cast<const T*>(args.x) + (read ? static_cast<int64_t>(row) * args.k + at_k : 0);
        CopyAsync16(stage + Config::kWeightBytes + (row * Config::kXPieces + Config::Swizzle(row, piece)) * 16, from,
                    read);
      }
      ++load_unit;
      if (++load_chunk == args.chunks) {
        load_chunk = 0;
        ++load_tile;
        find_rows();
      }
      load_stage = load_stage + 1 == args.stages ? 0 : load_stage + 1;
    }
    CommitAsync();
  };

  // ---- Scales of groups: loaded into registers one unit ahead
  float next_scale[kWarpRows] = {};  // of the lane's rows
  uint32_t next_offset[kWarpRows] = {};
  const auto load_scales = [&](int tile, int chunk) {
    if constexpr (kMayHaveGroups) {
      if (!grouped) return;
      const int group = chunk * 2 + warp_k;
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
        const int row = WeightRow(args, tile, warp_feature + r * 8 + g);
        const bool read = row >= 0 && group < args.groups;
        if constexpr (kFormat == WeightFormat::kInt4) {
          const int64_t at = read ? static_cast<int64_t>(row) * args.groups + group : 0;
          next_scale[r] = read ? static_cast<float>(static_cast<const T*>(args.weight_scale)[at]) : 0.0f;
          next_offset[r] = Int4Offset<T>(read && args.zero_point != nullptr ? args.zero_point[at] : 8);
        } else {
          const int64_t at = read ? static_cast<int64_t>(row / kTileN) * args.groups + group : 0;
          next_scale[r] = read ? static_cast<const float*>(args.weight_scale)[at] : 0.0f;
        }
      }
    }
  };

  AllowDependentLaunch();
  WaitForPreviousKernel();
  for (int i = 0; i + 1 < args.stages; ++i) load();
  const int first_tile = begin / args.chunks;
  int tile = first_tile, chunk = begin % args.chunks, stage_index = 0;
  load_scales(tile, chunk);

  float total[kMayHaveGroups ? kFeatureBlocks : 1][kRowBlocks][4];  // of all groups so far
  float sum[kFeatureBlocks][kRowBlocks][4] = {};
#pragma unroll
  for (auto& block : total) {
#pragma unroll
    for (auto& c : block) c[0] = c[1] = c[2] = c[3] = 0.0f;
  }
  for (int unit = begin; unit < end; ++unit) {
    WaitForStage(args.stages - 2);
    __syncthreads();  // all copies of the stage are visible, and the stage before is free
    load();
    float scale[kWarpRows];
    uint32_t offset[kWarpRows];
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      scale[r] = next_scale[r];
      offset[r] = next_offset[r];
    }
    const bool tile_ends = chunk + 1 == args.chunks || unit + 1 == end;
    if (unit + 1 < end) load_scales(tile_ends ? tile + 1 : tile, tile_ends ? 0 : chunk + 1);

    const char* stage = shared + stage_index * Config::kStageBytes;
    const uint4* weights = reinterpret_cast<const uint4*>(stage) + tid;
    const uint4* x = reinterpret_cast<const uint4*>(stage + Config::kWeightBytes) + g * Config::kXPieces;
#pragma unroll
    for (int j = 0; j < Config::kBlocks; ++j) {
      uint4 raw[kWarpRows];
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) raw[r] = weights[(r * Config::kBlocks + j) * kThreads];
#pragma unroll
      for (int h = 0; h < Config::kElements / 8; ++h) {
        uint32_t a[2][kFeatureBlocks][4];  // [step][16 rows]
#pragma unroll
        for (int step = 0; step < 2; ++step) {
#pragma unroll
          for (int r = 0; r < kWarpRows; ++r) {
            uint32_t(&to)[4] = a[step][r / 2];
            ConvertStep<T, kFormat>(raw[r], 2 * h + step, offset[r], &to[r % 2], &to[r % 2 + 2]);
          }
        }
        const int piece = warp_k * (Config::kWarpK / 8) + (j * 4 + t) * (Config::kElements / 8) + h;
        const uint4* from = x + Config::Swizzle(g, piece);
#pragma unroll
        for (int b = 0; b < kRowBlocks; ++b) {
          const uint4 values = from[b * 8 * Config::kXPieces];
#pragma unroll
          for (int m = 0; m < kFeatureBlocks; ++m) Mma16x8x16<T>(sum[m][b], a[0][m], values.x, values.y);
#pragma unroll
          for (int m = 0; m < kFeatureBlocks; ++m) Mma16x8x16<T>(sum[m][b], a[1][m], values.z, values.w);
        }
      }
    }
    if constexpr (kMayHaveGroups) {
      if (grouped) {
#pragma unroll
        for (int m = 0; m < kFeatureBlocks; ++m) {
#pragma unroll
          for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              total[m][b][i] = fmaf(scale[2 * m + i / 2], sum[m][b][i], total[m][b][i]);
              sum[m][b][i] = 0.0f;
            }
          }
        }
      }
    }
    stage_index = stage_index + 1 == args.stages ? 0 : stage_index + 1;
    if (!tile_ends) {
      ++chunk;
      continue;
    }

    // ---- The end of the CTA's part of a work tile: the warps along k, then the CTAs
    if constexpr (kMayHaveGroups) {
      if (grouped) {
#pragma unroll
        for (int m = 0; m < kFeatureBlocks; ++m) {
#pragma unroll
          for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              sum[m][b][i] = total[m][b][i];
              total[m][b][i] = 0.0f;
            }
          }
        }
      }
    }
#pragma unroll
    for (int turn = 1; turn >= 0; --turn) {
      if (warp_k == turn) {
#pragma unroll
        for (int m = 0; m < kFeatureBlocks; ++m) {
#pragma unroll
          for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              float& at = sums[(b * 8 + 2 * t + i % 2) * kSumPitch + warp_feature + m * 16 + i / 2 * 8 + g];
              at = turn == 1 ? sum[m][b][i] : sum[m][b][i] + at;
            }
          }
        }
      }
      __syncthreads();
    }
    const Sharers sharers = SharersOf(args, tile);
    // The next unit begins with a barrier: the sums are read before they are written again.
    if (sharers.first == sharers.last) {
      FinishTile<T, kThreads>(args, sums, tile);
    } else {
      StorePartial<Config::kRowTile, kThreads>(args, sums, tile);
    }
#pragma unroll
    for (int m = 0; m < kFeatureBlocks; ++m) {
#pragma unroll
      for (int b = 0; b < kRowBlocks; ++b) sum[m][b][0] = sum[m][b][1] = sum[m][b][2] = sum[m][b][3] = 0.0f;
    }
    ++tile;
    chunk = 0;
  }

  // ---- Work tiles that CTAs share, at the end: both of them wait for memory together
  __threadfence();
  __syncthreads();
  if (tid == 0 || tid == 32) {
    const int which = tid / 32;
    const int shared_tile = which == 0 ? first_tile : tile - 1;
    const Sharers sharers = SharersOf(args, shared_tile);
    const bool counts = sharers.first != sharers.last && (which == 0 || shared_tile != first_tile);
    is_last[which] = counts && CountIn(args.counters + shared_tile, args.token, sharers.last - sharers.first + 1);
    __threadfence();
  }
  __syncthreads();
#pragma unroll 1
  for (int which = 0; which < 2; ++which) {
    if (!is_last[which]) continue;
    const int shared_tile = which == 0 ? first_tile : tile - 1;
    __syncthreads();
    CombinePartials<Config::kRowTile, kThreads>(args, sums, shared_tile, SharersOf(args, shared_tile));
    __syncthreads();
    FinishTile<T, kThreads>(args, sums, shared_tile);
  }
#endif
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_KERNEL_CUH_
