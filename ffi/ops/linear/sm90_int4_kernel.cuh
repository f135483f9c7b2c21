// The kernel of sm_90a for int4 weights at up to 16 rows and, where k is divided, 32.
//
// TMA brings weights and x to shared memory, and warps convert weights in registers for mma.m16n8k16, whose M operand
// they are. With 8 columns it takes half of wgmma's time, and a warp waits for nobody else's products.
//  - A matrix product may take the values of k in any order, as long as both operands agree: of 64 values lane t of
//    four has number 16 t + 4 s to 16 t + 4 s + 3 in step s. So both operands are loaded in the order in which they lie
//    in memory.
//  - k is divided into parts, whose sums are added in their order. Up to 8 rows the warps of a CTA have one part each,
//    and a CTA few features: no CTA waits for another. With more rows the CTAs of a cluster divide the parts, since
//    each would need all of x otherwise.
//
// Sums of 128 products are multiplied by their scale and added to float32 totals. The parts, and the order of all sums,
// depend on n and k alone and are those of sm90_converted_kernel.cuh: a row has the same bits for any number of rows.
#ifndef XLA_GPU_OPS_LINEAR_SM90_INT4_KERNEL_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_INT4_KERNEL_CUH_

#include <cstdint>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/cluster.cuh"
#include "ffi/device/dependent_launch.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/mma.cuh"
#include "ffi/device/tma_matrix.cuh"
#include "ffi/device/wgmma.cuh"
#include "ffi/ops/linear/sm90_int4_ahead.cuh"
#include "ffi/ops/linear/sm90_int4_epilogue.cuh"
#include "ffi/ops/linear/sm90_int4_range.cuh"
#include "ffi/ops/linear/sm90_int4_scales.cuh"
#include "ffi/ops/linear/sm90_int4_traits.cuh"
#include "ffi/ops/linear/sm90_int4_weights.cuh"

namespace xla_gpu::linear {

// Loads weights and x, by one thread of each of kLoadingWarps warps, which take the CTA's parts in turn. x goes ahead
// of weights, behind which it would wait; but if weights may be loaded before the previous kernel has ended, those of
// one stage go first.
template <typename Config>
__device__ inline void LoadInt4(const Sm90Int4Args& args, int tile, int rank, int first_part, uint32_t start,
                                Int4Stages stages, uint32_t barriers) {
  const int loaded_bytes = stages.weight_bytes + stages.x_bytes;
  const auto load_weights = [&](int part, int chunk, int stage, uint32_t full) {
    ArriveExpectTx(full, loaded_bytes);
    for (int box = 0; box < args.boxes; ++box) {
      TmaLoadMatrixBox(start + stages.Weights(part, stage) + box * args.box_rows * 128, args.weight_map, full, chunk,
                       FirstWeightRow(args, tile, box), kEvictFirst);
    }
  };
  const int ahead = args.weights_first ? 1 : 0;
  for (int i = 0; i < ahead; ++i) {
    for (int part = first_part; part < args.parts; part += Config::kLoadingWarps) {
      const ChunkRange range(args, rank, part);
      if (range.begin + i >= range.end) continue;
      load_weights(part, range.begin + i, i, Int4Barriers{barriers + part * args.stages * 16}.Full(i));
    }
  }
  WaitForPreviousKernel();
  PipelineState ring;
  for (int i = 0;; ++i) {
    bool any = false;
    for (int part = first_part; part < args.parts; part += Config::kLoadingWarps) {
      const ChunkRange range(args, rank, part);
      const int chunk = range.begin + i;
      if (chunk >= range.end) continue;
      any = true;
      const Int4Barriers of_part = {barriers + part * args.stages * 16};
      const uint32_t full = of_part.Full(ring.stage);
      if (i >= args.stages) WaitBarrier(of_part.Empty(ring.stage), ring.phase ^ 1);
      const uint32_t x = start + stages.X(part, ring.stage);
      if constexpr (Config::kRowTile == 8) {
        TmaLoadMatrixBox(x, args.x_map, full, chunk * 4, 0, kEvictNormal);
      } else {
        TmaLoadMatrixColumns(x, args.x_map, full, chunk * 4, 0, kEvictNormal);
      }
      if (i >= ahead) load_weights(part, chunk, ring.stage, full);
    }
    if (i == args.launch_at) AllowDependentLaunch();
    if (!any) break;
    ring.Advance(args.stages);
  }
}

// Up to so many rows, columns 2 i and 2 i + 1 of the products both are row i: 8 lanes that load 16 bytes of x at once
// then have one row. The bytes of two rows are in the same banks.
inline constexpr int kRowsInPairs = 4;

// The row of x that lanes load whose number divided by 4 is `column`. Columns past the last row have it, which costs
// least, and nothing reads what becomes of them.
__device__ inline int FewXRow(int x_rows, int column) {
  return min(x_rows <= kRowsInPairs ? column / 2 : column, x_rows - 1);
}

// The products of a warp: kTilesOfWarp times 16 weight rows, the first of which is number `first_tile` of the CTA's.
template <typename Config>
__device__ __forceinline__ void MultiplyInt4(const Sm90Int4Args& args, int work_tile, int part, int first_tile,
                                             ChunkRange range, const char* shared, Int4Stages stages,
                                             Int4Barriers barriers,
                                             float (&total)[Config::kTilesOfWarp][Config::kRowBlocks][4]) {
  using T = typename Config::T;
  constexpr int kTiles = Config::kTilesOfWarp, kRowBlocks = Config::kRowBlocks;
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4, row = Int4RowOfLanes(g);
  const uint32_t none = ZeroUnknown(args);
  uint32_t magic = kInt4Magic<T>;
  asm volatile("" : "+r"(magic));
  Int4Scales<Config> scales(args, work_tile, first_tile, row, t, range, none | kPairOfOnes<T>);
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (auto& block : total[m]) block[0] = block[1] = block[2] = block[3] = 0.0f;
  }
  int weights_of_lane =
      stages.Weights(part, 0) + first_tile * Config::kTileBytes + row * 128 + ((t / 2 ^ row) << 4) + t % 2 * 8;
  int x_of_lane = stages.X(part, 0) + FewXRow(args.x_rows, g) * 512 + t * 32;
  uint32_t first_barrier = barriers.start;
  asm volatile("" : "+r"(first_barrier), "+r"(weights_of_lane), "+r"(x_of_lane));
  PipelineState ring;
  const int chunks = range.end - range.begin;
  for (int i = 0; i < chunks; ++i) {
    Int4ChunkScales<kTiles> of_chunk;
    scales.Of(i, chunks, &of_chunk);
    const Int4Barriers of_stage = {first_barrier + ring.stage * 16};
    WaitBarrier(of_stage.Full(0), ring.phase);
    const int weights = weights_of_lane + ring.stage * stages.weight_bytes;
    const char* const x = shared + (x_of_lane + ring.stage * stages.x_bytes);
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      Int4Offsets offsets[kTiles][2];
      float factor[kTiles][2];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          offsets[m][r] = of_chunk.offsets[m][r].Of(group);
          const float2 pair = Unpack<T>(of_chunk.scale[m][r]);
          factor[m][r] = group == 0 ? pair.x : pair.y;
        }
      }
      float sum[kTiles][kRowBlocks][4] = {};
#pragma unroll
      for (int panel = 2 * group; panel < 2 * group + 2; ++panel) {
        const char* const of_panel = shared + (weights ^ panel << 5);
        uint2 raw[kTiles][2];
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            raw[m][r] = *reinterpret_cast<const uint2*>(of_panel + m * Config::kTileBytes + r * 1024);
          }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // two steps
          uint4 b[kRowBlocks];
#pragma unroll
          for (int block = 0; block < kRowBlocks; ++block) {
            b[block] = *reinterpret_cast<const uint4*>(x + panel * 128 + half * 16 + block * 4096);
          }
          uint32_t a[kTiles][2][4];
#pragma unroll
          for (int m = 0; m < kTiles; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              uint32_t values[4];
              ConvertInt4Word<T>(half == 0 ? raw[m][r].x : raw[m][r].y, offsets[m][r], magic, values);
              a[m][0][r] = values[0], a[m][0][r + 2] = values[1];
              a[m][1][r] = values[2], a[m][1][r + 2] = values[3];
            }
          }
#pragma unroll
          for (int m = 0; m < kTiles; ++m) {
#pragma unroll
            for (int block = 0; block < kRowBlocks; ++block) {
              Mma16x8x16<T>(sum[m][block], a[m][0], b[block].x, b[block].y);
            }
          }
#pragma unroll
          for (int m = 0; m < kTiles; ++m) {
#pragma unroll
            for (int block = 0; block < kRowBlocks; ++block) {
              Mma16x8x16<T>(sum[m][block], a[m][1], b[block].z, b[block].w);
            }
          }
        }
      }
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int block = 0; block < kRowBlocks; ++block) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            total[m][block][i] = fmaf(factor[m][i / 2], sum[m][block][i], total[m][block][i]);
          }
        }
      }
    }
    // An arrival does not wait for loads in front of it: this one needs what became of them all.
    uint32_t read = __float_as_uint(total[0][0][0]);
#pragma unroll
    for (int m = 1; m < kTiles; ++m) read |= __float_as_uint(total[m][0][0]);
    __syncwarp();
    read = of_stage.Empty(0) | (read & none);
    if (lane == 0) ArriveBarrier(read);
    ring.Advance(args.stages);
  }
}

// NOTE: launch bounds, which may not stand beside a number of registers, would not allow between 96 and 128 of them. In
// code for other targets they say that the kernel is empty (RunsSm90a).
#if XLA_GPU_HAS_WGMMA
#define XLA_GPU_INT4_REGISTERS __maxnreg__(Config::kRegisters)
#else
#define XLA_GPU_INT4_REGISTERS __launch_bounds__(32)
#endif

template <typename Config>
__global__ void XLA_GPU_INT4_REGISTERS Int4Sm90Kernel(const __grid_constant__ Sm90Int4Args args) {
#if XLA_GPU_HAS_WGMMA
  using T = typename Config::T;
  extern __shared__ __align__(1024) char shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  // ---- Shared memory: the rings of all parts, barriers, sums (above 8 rows in the ring's place)
  const int features = args.boxes * args.box_rows, pitch = Int4SumPitch(features);
  const Int4Stages stages(args, features);
  const int ring_bytes = stages.bytes;
  const uint32_t start = SharedAddress(shared), barriers = start + ring_bytes;
  // ---- This CTA's work tile and part of k
  // NOTE: the compiler knows that a block's index is the same for all threads. Up to 8 rows there are no clusters.
  const int tile = static_cast<int>(Config::kRowTile == 8 ? blockIdx.x : ClusterId());
  const int rank = static_cast<int>(Config::kRowTile == 8 ? 0 : ClusterRank());
  const int consumers = args.parts * args.warps_of_part;

  const int first_loading = Config::kFixedWarps ? Config::kMostWarps : consumers;

  if (warp == first_loading) {
    for (int i = lane; i < args.parts * args.stages; i += 32) {
      InitBarrier(barriers + i * 16, 1);
      InitBarrier(barriers + i * 16 + 8, args.warps_of_part);
    }
    if (lane < 2) PrefetchTensorMap(lane == 0 ? args.weight_map : args.x_map);
    FenceProxyAsync();
  }
  __syncthreads();
  if (warp >= first_loading) {
    const int first_part = warp - first_loading;
    if (first_part >= min(Config::kLoadingWarps, args.parts)) return;
    if (ElectOne()) LoadInt4<Config>(args, tile, rank, first_part, start, stages, barriers);
    __syncwarp();  // the barrier of a cluster is for whole warps
    if (Config::kRowTile != 8 && args.cluster > 1) {
      ClusterSyncOwnShared();
      ClusterSyncOfReaders();
    }
    return;
  }
  if (warp >= consumers) return;
  if (!args.weights_first) WaitForPreviousKernel();
  const int part = warp * args.inverse_of_warps >> 8;
  const int first_tile = (warp - part * args.warps_of_part) * Config::kTilesOfWarp;
  float total[Config::kTilesOfWarp][Config::kRowBlocks][4];
  const Int4Barriers of_part = {barriers + part * args.stages * 16};
  if constexpr (Config::kRowTile == 8) {
    MultiplyInt4<Config>(args, tile, part, first_tile, ChunkRange(args, rank, part), shared, stages, of_part, total);
  } else {
    MultiplyInt4Ahead<Config>(args, tile, part, first_tile, ChunkRange(args, rank, part), shared, stages, of_part,
                              total);
  }
  WaitForPreviousKernel();
  auto* const sums =
      reinterpret_cast<float*>(Config::kSumsBesideRing ? shared + ring_bytes + Config::kBarrierBytes : shared);
  // All loads have completed; when all warps have read them, the sums take the ring's place.
  if (!Config::kSumsBesideRing) NamedBarrierSync(1, consumers * 32);
  const int part_floats = (Config::kRowTile == 8 ? args.linear.rows : Config::kRowTile) * pitch;
  float* const to = sums + part * part_floats + first_tile * 16 + Int4RowOfLanes(lane / 4);
  const bool in_pairs = Config::kRowTile == 8 && args.linear.rows <= kRowsInPairs;
#pragma unroll
  for (int block = 0; block < Config::kRowBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = in_pairs ? lane % 4 : block * 8 + lane % 4 * 2 + i;
      if (row >= args.linear.rows) continue;
#pragma unroll
      for (int m = 0; m < Config::kTilesOfWarp; ++m) {
        to[row * pitch + m * 16] = total[m][block][i];
        to[row * pitch + m * 16 + 8] = total[m][block][i + 2];
      }
    }
  }
  __syncwarp();
  if constexpr (Config::kRowTile == 8) {
    FinishFewRows<T>(args, tile, sums, part_floats, pitch, consumers * 32);
  } else {
    FinishInt4Tile<T>(args, tile, sums, part_floats, pitch, rank, consumers * 32);
    __syncwarp();
    if (args.cluster > 1) ClusterSyncOfReaders();  // others read this CTA's sums
  }
#endif
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_INT4_KERNEL_CUH_
