// The kernel of sm_90a for int4 weights at up to 16 rows and, where k is divided, 32.
//
// TMA brings weights and x to shared memory, and warps convert weights in registers for mma.m16n8k16, whose M operand
// they are. With 8 columns it takes half of wgmma's time, and a warp waits for nobody else's products.
//  - A matrix product may take the values of k in any order, as long as both operands agree: of 64 values lane t of
//    four has number 16 t + 4 s to 16 t + 4 s + 3 in step s. So both operands are loaded in the order in which they lie
//    in memory.
//  - k is divided into parts, whose sums are added in their order. Up to 8 rows the warps of a CTA have one part each,
//    and a CTA few features: no CTA waits for another. With more rows two or more CTAs of a cluster divide the parts,
//    since each would need all of x otherwise.
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
#include "ffi/ops/linear/sm90_epilogue.cuh"
#include "ffi/ops/linear/sm90_int4_ahead.cuh"
#include "ffi/ops/linear/sm90_int4_range.cuh"
#include "ffi/ops/linear/sm90_int4_traits.cuh"
#include "ffi/ops/linear/sm90_int4_weights.cuh"

namespace xla_gpu::linear {

// Loads weights and x, by one thread of each of kLoadingWarps warps, which take the CTA's parts in turn. x goes ahead
// of weights, behind which it would wait; but if weights may be loaded before the previous kernel has ended, as many as
// the ring has room for go first.
template <typename Config>
__device__ inline void LoadInt4(const Sm90Int4Args& args, int tile, int rank, int first_part, uint32_t start,
                                Int4Stages stages, uint32_t barriers) {
  const int loaded_bytes = stages.weight_bytes + args.x_rows * Config::kChunkK * 2;
  const auto load_weights = [&](int part, int chunk, int stage, uint32_t full) {
    ArriveExpectTx(full, loaded_bytes);
    for (int box = 0; box < args.boxes; ++box) {
      TmaLoadMatrixBox(start + stages.Weights(part, stage) + box * args.box_rows * 128, args.weight_map, full, chunk,
                       FirstWeightRow(args, tile, box), kEvictFirst);
    }
  };
  const int ahead = args.weights_first ? args.stages : 0;
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
      TmaLoadMatrixColumns(start + stages.X(part, ring.stage), args.x_map, full, chunk * 4, 0, kEvictNormal);
      if (i >= ahead) load_weights(part, chunk, ring.stage, full);
    }
    if (!any) break;
    ring.Advance(args.stages);
  }
  AllowDependentLaunch();  // now memory has time for the next kernel's first loads
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
  uint32_t magic = kInt4Magic<T>;
  asm volatile("" : "+r"(magic));
  // ---- Scales and zero points: of 8 groups at a time, two of them by each lane of four, loaded ahead
  constexpr int kChunksOfLoad = 4;
  RowGroups<T, WeightFormat::kInt4> groups[kTiles], next_groups[kTiles];
  int first_row[kTiles];
  const int tiles_of_box = args.box_rows / 16;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
    const int tile = first_tile + m, box = tile / tiles_of_box;
    first_row[m] = FirstWeightRow(args, work_tile, box) + tile % tiles_of_box * 16 + row;
  }
  const auto load_groups = [&](int chunk) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      const GroupLoader<T, WeightFormat::kInt4> loader(args.linear, first_row[m]);
      loader.Load(args.linear, chunk * 2 + 2 * t, &next_groups[m]);
    }
  };
  load_groups(range.begin);
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (auto& block : total[m]) block[0] = block[1] = block[2] = block[3] = 0.0f;
  }
  // What is read as a row past those of the box is anything, and so is what becomes of it.
  int x_of_lane[4];
#pragma unroll
  for (int panel = 0; panel < 4; ++panel) {
    const int x_row = panel * args.x_rows + g;
    x_of_lane[panel] = x_row * 128 + ((2 * t ^ x_row % 8) << 4);
  }
  PipelineState ring;
  const int weights_of_lane = first_tile * Config::kTileBytes + row * 128 + t % 2 * 8;
  for (int chunk = range.begin; chunk < range.end; ++chunk) {
    const int chunk_of_load = (chunk - range.begin) % kChunksOfLoad;
    if (chunk_of_load == 0) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        groups[m] = next_groups[m];
        groups[m].zero_points[0] |= groups[m].zero_points[1] << 16;
      }
      if (chunk + kChunksOfLoad < range.end) load_groups(chunk + kChunksOfLoad);
    }
    uint32_t scale[kTiles][2], zero_points[kTiles];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      scale[m][0] = __shfl_sync(~0u, groups[m].scale[0], chunk_of_load, 4);
      scale[m][1] = __shfl_sync(~0u, groups[m].scale[1], chunk_of_load, 4);
      zero_points[m] = __shfl_sync(~0u, groups[m].zero_points[0], chunk_of_load, 4);
    }
    WaitBarrier(barriers.Full(ring.stage), ring.phase);
    const char* const weights = shared + stages.Weights(part, ring.stage) + weights_of_lane;
    const char* const x = shared + stages.X(part, ring.stage);
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      Int4Offsets offsets[kTiles][2];
      float factor[kTiles][2];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          offsets[m][r] = OffsetsOf<T>(zero_points[m], 2 * r + group);
          const float2 pair = Unpack<T>(scale[m][r]);
          factor[m][r] = (group == 0 ? pair.x : pair.y) * kInt4Unit<T>;
        }
      }
      float sum[kTiles][kRowBlocks][4] = {};
#pragma unroll
      for (int panel = 2 * group; panel < 2 * group + 2; ++panel) {
        uint2 raw[kTiles][2];
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int at = m * Config::kTileBytes + r * 1024 + (((2 * panel + t / 2) ^ row) << 4);
            raw[m][r] = *reinterpret_cast<const uint2*>(weights + at);
          }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // two steps
          uint4 b[kRowBlocks];
#pragma unroll
          for (int block = 0; block < kRowBlocks; ++block) {
            b[block] = *reinterpret_cast<const uint4*>(x + (x_of_lane[panel] ^ half << 4) + block * 1024);
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
      if (group == 1) {
        __syncwarp();
        if (lane == 0) ArriveBarrier(barriers.Empty(ring.stage));
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
    ring.Advance(args.stages);
  }
}

// Four neighbouring columns of a row, added over all parts in the order of k: those of a CTA, `part_floats` after one
// another, and the CTAs of the cluster.
template <bool kClusters>
__device__ inline void AddInt4Parts(const Sm90Int4Args& args, const float* sums, int part_floats, float (&total)[4]) {
  if (args.parts == 1) {
    AddPartials(sums, args.cluster, total);
    return;
  }
  float4 values[8] = {};
  if constexpr (kClusters) {
    int part = 0, rank = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (rank >= args.cluster) continue;
      const float* const from = sums + part * part_floats;
      values[i] = *reinterpret_cast<const float4*>(args.cluster == 1 ? from : SharedOf(from, rank));
      if (++part == args.parts) part = 0, ++rank;
    }
  } else {
#pragma unroll
    for (int part = 0; part < 8; ++part) {
      if (part < args.parts) values[part] = *reinterpret_cast<const float4*>(sums + part * part_floats);
    }
  }
  total[0] = values[0].x, total[1] = values[0].y, total[2] = values[0].z, total[3] = values[0].w;
#pragma unroll
  for (int i = 1; i < 8; ++i) {
    if (i >= (kClusters ? args.parts * args.cluster : args.parts)) continue;
    total[0] += values[i].x;
    total[1] += values[i].y;
    total[2] += values[i].z;
    total[3] += values[i].w;
  }
}

// Finishes this CTA's share of a work tile, by the `threads` threads that have written `sums`, [parts][rows][pitch]. A
// thread keeps its four columns, and reads before the barrier what depends on no other thread.
template <typename T, bool kClusters>
__device__ __forceinline__ void FinishInt4Tile(const Sm90Int4Args& sm90, int tile, const float* sums, int part_floats,
                                               int pitch, int rank, int threads) {
  using Four = AlignedVector<T, 4>;
  const LinearArgs& args = sm90.linear;
  const bool gated = args.activation != Activation::kNone;
  const int out_features = gated ? args.n / 2 : args.n;
  const int tile_features = gated ? sm90.box_rows : sm90.boxes * sm90.box_rows;
  const int first_four = tile_features / 4 * rank / sm90.cluster;
  const int fours = tile_features / 4 * (rank + 1) / sm90.cluster - first_four;  // of a row
  const int rows_at_once = threads / fours;
  const int column = (first_four + static_cast<int>(threadIdx.x) % fours) * 4, feature = tile * tile_features + column;
  int row = static_cast<int>(threadIdx.x) / fours;
  if (row >= rows_at_once || feature >= out_features) row = args.rows;
  const int read = feature < out_features ? feature : 0;
  const FourFeatures<T> first(args, read), second(args, gated ? out_features + read : read);
  if (sm90.cluster > 1) {
    ClusterSync();
  } else {
    NamedBarrierSync(1, threads);
  }
  // With few rows little code: most of it runs once, and is not in the instruction cache.
  constexpr int kRowsOfPass = kClusters ? 2 : 1;
#pragma unroll kRowsOfPass
  for (; row < args.rows; row += rows_at_once) {
    const int64_t at = static_cast<int64_t>(row) * out_features + feature;
    Four residual = {};
    if (args.residual != nullptr) residual = *reinterpret_cast<const Four*>(static_cast<const T*>(args.residual) + at);
    const float* const from = sums + row * pitch + column;
    float values[4], factors[4];
    AddInt4Parts<kClusters>(sm90, from, part_floats, values);
    first.Finish(values);
    if (gated) {
      AddInt4Parts<kClusters>(sm90, from + tile_features, part_floats, factors);
      second.Finish(factors);
    }
    Four out;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float value = values[j];
      if (gated) value = Round<T>(ActivationOf<T>(args.activation, value) * factors[j]);
      if (args.residual != nullptr) value += static_cast<float>(residual.values[j]);
      out.values[j] = static_cast<T>(value);
    }
    *reinterpret_cast<Four*>(static_cast<T*>(args.out) + at) = out;
  }
}

template <typename Config>
__global__ void __launch_bounds__(XLA_GPU_HAS_WGMMA ? Config::kThreads : 32, Config::kCtasOfSm)
    Int4Sm90Kernel(const __grid_constant__ Sm90Int4Args args) {
#if XLA_GPU_HAS_WGMMA
  using T = typename Config::T;
  extern __shared__ __align__(1024) char shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  // ---- Shared memory: the rings of all parts, barriers, sums (above 8 rows in the ring's place)
  const int features = args.boxes * args.box_rows, pitch = Int4SumPitch(features);
  const Int4Stages stages = {features * 128, Int4StageBytes<Config>(features, args.x_rows), args.stages};
  const int ring_bytes = stages.Weights(args.parts, 0);
  const uint32_t start = SharedAddress(shared), barriers = start + ring_bytes;
  // ---- This CTA's work tile and part of k
  const int tile = static_cast<int>(blockIdx.x) / args.cluster;
  const int rank = static_cast<int>(blockIdx.x) % args.cluster;
  const int consumers = args.parts * args.warps_of_part;

  constexpr int kFirstLoading = Config::kMostWarps;

  if (warp == kFirstLoading) {
    for (int i = lane; i < args.parts * args.stages; i += 32) {
      InitBarrier(barriers + i * 16, 1);
      InitBarrier(barriers + i * 16 + 8, args.warps_of_part);
    }
    if (lane < 2) PrefetchTensorMap(lane == 0 ? args.weight_map : args.x_map);
    FenceProxyAsync();
  }
  __syncthreads();
  if (warp >= kFirstLoading) {
    if constexpr (Config::kMovesRegisters) DecreaseRegisters<40>();
    const int first_part = warp - kFirstLoading;
    if (first_part >= min(Config::kLoadingWarps, args.parts)) return;
    if (ElectOne()) LoadInt4<Config>(args, tile, rank, first_part, start, stages, barriers);
    __syncwarp();  // the barrier of a cluster is for whole warps
    if (args.cluster > 1) {
      ClusterSync();
      ClusterSync();
    }
    return;
  }
  if constexpr (Config::kMovesRegisters) IncreaseRegisters<232>();
  if (warp >= consumers) return;
  if (!args.weights_first) WaitForPreviousKernel();
  const int part = warp / args.warps_of_part;
  const int first_tile = warp % args.warps_of_part * Config::kTilesOfWarp;
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
  const int part_floats = Config::kRowTile * pitch;
  float* const to = sums + part * part_floats + first_tile * 16 + Int4RowOfLanes(lane / 4);
#pragma unroll
  for (int block = 0; block < Config::kRowBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = block * 8 + lane % 4 * 2 + i;
      if (row >= args.linear.rows) continue;
#pragma unroll
      for (int m = 0; m < Config::kTilesOfWarp; ++m) {
        to[row * pitch + m * 16] = total[m][block][i];
        to[row * pitch + m * 16 + 8] = total[m][block][i + 2];
      }
    }
  }
  __syncwarp();
  FinishInt4Tile<T, Config::kRowTile != 8>(args, tile, sums, part_floats, pitch, rank, consumers * 32);
  __syncwarp();
  if (args.cluster > 1) ClusterSync();  // others read this CTA's sums
#endif
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_INT4_KERNEL_CUH_
