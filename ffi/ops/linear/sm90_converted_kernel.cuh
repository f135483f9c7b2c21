// The kernel of sm_90a for up to 64 rows and weights that are converted: float8, int8 and int4. Two have kernels of
// their own besides: sm90_float8_kernel.cuh serves float8 beside bfloat16 but with scales of blocks,
// sm90_int4_kernel.cuh int4 at up to 16 rows, up to 32 where k is divided, with the same bits.
//
// As in sm90_kernel.cuh, weights are the M operand of wgmma and the rows of x its N operand, TMA brings both to shared
// memory, and the CTAs of a cluster divide k. What differs is what conversions need:
//  - Four warpgroups convert and multiply, each 64 of a work tile's 256 features. One CTA has an SM.
//  - A lane loads 16 neighbouring bytes of a weight row at a time (8 of int4) and converts them to A operands, whose
//    values of k are then not in wgmma's order. So two warps bring x into the order of the weights, in shared memory,
//    before it is multiplied. Of 64 values of k lane t of four has number 16 t + 4 s to 16 t + 4 s + 3 in step s.
//  - The weight rows of a warp's lanes are permuted so that those loads have no bank conflicts in TMA's 128-byte
//    swizzle.
//
// Sums of 128 products are multiplied by their scale and added to float32 totals; of int8, and of float8 whose scales
// are not of blocks, a CTA has one sum. The order of all sums depends on n, k and the format alone: a row has the same
// bits for any number of rows.
#ifndef XLA_GPU_OPS_LINEAR_SM90_CONVERTED_KERNEL_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_CONVERTED_KERNEL_CUH_

#include <cstdint>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/cluster.cuh"
#include "ffi/device/dependent_launch.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/tma_matrix.cuh"
#include "ffi/device/wgmma_narrow.cuh"
#include "ffi/ops/linear/sm90_converted_epilogue.cuh"
#include "ffi/ops/linear/sm90_converted_float8.cuh"
#include "ffi/ops/linear/sm90_converted_int4.cuh"
#include "ffi/ops/linear/sm90_converted_traits.cuh"
#include "ffi/ops/linear/sm90_converted_weights.cuh"
#include "ffi/ops/linear/sm90_converted_x.cuh"

namespace xla_gpu::linear {

// Loads a CTA's weights, by one thread.
template <typename Config>
__device__ inline void LoadConvertedWeights(const Sm90Args& args, int tile, int chunk_begin, int chunk_end,
                                            uint32_t weights, ConvertedBarriers<Config> barriers) {
  if (!args.weights_first) WaitForPreviousKernel();
  PipelineState ring;
  for (int chunk = chunk_begin; chunk < chunk_end; ++chunk) {
    const uint32_t full = barriers.WeightFull(ring.stage), to = weights + ring.stage * Config::kWeightStageBytes;
    WaitBarrier(barriers.WeightEmpty(ring.stage), ring.phase ^ 1);
    ArriveExpectTx(full, Config::kWeightStageBytes);
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      TmaLoadMatrixBox(to + box * (Config::kWeightStageBytes / 2), args.weight_map, full, chunk,
                       FirstRowOfQuarter<Config>(args.linear, tile, box * 2), kEvictFirst);
    }
    ring.Advance(Config::kWeightStages);
  }
  AllowDependentLaunch();  // now memory has time for the next kernel's first loads
}

// Loads x for a CTA's part of k, by one thread.
template <typename Config>
__device__ inline void LoadConvertedX(const Sm90Args& args, int stage_begin, int stage_end, uint32_t xs,
                                      ConvertedBarriers<Config> barriers) {
  WaitForPreviousKernel();
  PipelineState ring;
  for (int stage = stage_begin; stage < stage_end; ++stage) {
    WaitBarrier(barriers.XEmpty(ring.stage), ring.phase ^ 1);
    const uint32_t full = barriers.XFull(ring.stage), to = xs + ring.stage * Config::kXStageBytes;
    ArriveExpectTx(full, Config::kXStageBytes);
    TmaLoadMatrixBox(to, args.x_map, full, stage * 2, 0, kEvictNormal);
    TmaLoadMatrixBox(to + Config::kXStageBytes / 2, args.x_map, full, stage * 2 + 1, 0, kEvictNormal);
    ring.Advance(Config::kXStages);
  }
}

// The products of a CTA's work tile and part of k, of int8. `shared`: the weight stages.
template <typename Config>
__device__ __forceinline__ void MultiplyConverted(int chunk_begin, int chunk_end, const char* shared, uint32_t xs,
                                                  ConvertedBarriers<Config> barriers,
                                                  float (&result)[Config::kRowTile / 8][4]) {
  using T = typename Config::T;
  constexpr WeightFormat kFormat = Config::kFormat;
  constexpr int kSteps = Config::kStepsAtOnce;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int t = lane % 4, row = RowOfLanes(lane / 4);
  const char* const rows = shared + (warp * 16 + row) * 128;
  const uint32_t magic = ConversionMagic<T, kFormat>();
  PipelineState weight_ring, x_ring;
  for (int chunk = chunk_begin; chunk < chunk_end; ++chunk) {
    // ---- The chunk's weights, into registers
    WaitBarrier(barriers.WeightFull(weight_ring.stage), weight_ring.phase);
    const char* const from = rows + weight_ring.stage * Config::kWeightStageBytes;
    uint32_t raw[2][Config::kPanels][4];
    const auto load_panel = [&](int panel) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t(&to)[4] = raw[r][panel];
        const uint4 four = *reinterpret_cast<const uint4*>(from + r * 1024 + (((4 * panel + t) ^ row) << 4));
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
      }
    };
    const auto give_weights_back = [&] {
      __syncwarp();
      if (lane == 0) ArriveBarrier(barriers.WeightEmpty(weight_ring.stage));
      weight_ring.Advance(Config::kWeightStages);
    };
    if constexpr (Config::kLoadsStage) {
#pragma unroll
      for (int panel = 0; panel < Config::kPanels; ++panel) load_panel(panel);
    }

    // ---- Conversions while wgmma multiplies the values before
    WaitBarrier(barriers.XReady(x_ring.stage), x_ring.phase);
    __syncwarp();
    // The same in all lanes: the compiler then keeps descriptors in uniform registers.
    const uint32_t x = __shfl_sync(~0u, xs + x_ring.stage * Config::kXStageBytes, 0);
    uint32_t a[2][kSteps][4];
#pragma unroll
    for (int part = 0; part < 8 / kSteps; ++part) {
      const int first_step = part * kSteps, panel = first_step / 4;
      if (part >= 2) WgmmaWait<1>();  // the products before the last ones have read their operand
      if constexpr (!Config::kLoadsStage) {
        if (first_step % 4 == 0) load_panel(panel);
      }
      uint32_t(&to)[kSteps][4] = a[part % 2];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          ConvertWord<T, kFormat>(raw[r][panel][(first_step + i) % 4], magic, &to[i][r], &to[i][r + 2]);
        }
      }
      WgmmaFence();
      const uint64_t b = MakeSmemDescKMajor(x + first_step / 4 * (Config::kXStageBytes / 2));
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const bool first = first_step + i == 0 && chunk == chunk_begin;
        WgmmaNarrow<T>(result, to[i], AdvanceSmemDesc(b, (first_step + i) % 4 * 32), !first);
      }
      WgmmaCommit();
      if (first_step == 4) give_weights_back();
    }
    WgmmaWait<0>();
    WgmmaFenceOperand(result);
    if (lane == 0) ArriveBarrier(barriers.XEmpty(x_ring.stage));
    x_ring.Advance(Config::kXStages);
  }
}

template <typename Config>
__global__ void __launch_bounds__(XLA_GPU_HAS_WGMMA ? Config::kThreads : 32, 1)
    ConvertedSm90Kernel(const __grid_constant__ Sm90Args args) {
#if XLA_GPU_HAS_WGMMA
  using T = typename Config::T;
  extern __shared__ __align__(1024) char shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  // ---- Shared memory: weight stages, x stages, barriers
  constexpr int kXs = Config::kWeightStages * Config::kWeightStageBytes;
  const uint32_t weights = SharedAddress(shared), xs = weights + kXs;
  const ConvertedBarriers<Config> barriers = {{xs + Config::kXStages * Config::kXStageBytes}};
  constexpr int kConsumerWarps = Config::kConsumers / 32, kWeightWarp = kConsumerWarps, kXWarp = kWeightWarp + 1;
  // ---- This CTA's work tile and part of k
  const int tile = static_cast<int>(blockIdx.x) / args.cluster;
  const int rank = static_cast<int>(blockIdx.x) % args.cluster;
  const int chunk_begin = args.chunks * rank / args.cluster, chunk_end = args.chunks * (rank + 1) / args.cluster;

  if (warp >= kConsumerWarps) {
    if constexpr (Config::kMovesRegisters) DecreaseRegisters<32>();
    if (warp <= kXWarp) {
      // A loading warp makes its own barriers, and does not wait for the other.
      if (lane < Config::kMaxStages) {
        if (warp == kWeightWarp) {
          InitBarrier(barriers.WeightFull(lane), 1);
          InitBarrier(barriers.WeightEmpty(lane), kConsumerWarps);
        } else {
          InitBarrier(barriers.XFull(lane), 1);
          InitBarrier(barriers.XReady(lane), 2);
          InitBarrier(barriers.XEmpty(lane), kConsumerWarps);
        }
      }
      if (lane == 31) PrefetchTensorMap(warp == kXWarp ? args.x_map : args.weight_map);
      FenceProxyAsync();
      __syncwarp();
      NamedBarrierArrive(2, Config::kThreadsOfAll);
      if (warp == kXWarp) NamedBarrierArrive(3, Config::kThreadsOfX);
      if (ElectOne()) {
        if (warp == kWeightWarp) {
          LoadConvertedWeights<Config>(args, tile, chunk_begin, chunk_end, weights, barriers);
        } else {
          LoadConvertedX<Config>(args, chunk_begin * Config::kXStagesOfChunk, chunk_end * Config::kXStagesOfChunk, xs,
                                 barriers);
        }
      }
    } else {
      NamedBarrierSync(3, Config::kThreadsOfX);
      PermuteX<Config>(args, (chunk_end - chunk_begin) * Config::kXStagesOfChunk, shared + kXs, barriers,
                       warp - kXWarp - 1);
    }
    __syncwarp();  // the barrier of a cluster is for whole warps
    if (args.cluster > 1) {
      ClusterSyncOwnShared();
      ClusterSyncOfReaders();
    }
  } else {
    if constexpr (Config::kMovesRegisters) IncreaseRegisters<112>();
    NamedBarrierSync(2, Config::kThreadsOfAll);
    if (!args.weights_first) WaitForPreviousKernel();
    float sum[Config::kRowTile / 8][4];
    if constexpr (Config::kFormat == WeightFormat::kFloat8) {
      MultiplyFloat8<Config>(args, tile, chunk_begin, chunk_end, shared, xs, barriers, sum);
    } else if constexpr (Config::kInt4) {
      MultiplyConvertedInt4<Config>(args, tile, chunk_begin, chunk_end, shared, xs, barriers, sum);
    } else {
      MultiplyConverted<Config>(chunk_begin, chunk_end, shared, xs, barriers, sum);
    }
    WaitForPreviousKernel();
    // All loads have completed, and all warps have read them: the sums take the ring's place.
    NamedBarrierSync(1, Config::kConsumers);
    auto* const sums = reinterpret_cast<float*>(shared);
    const int column = warp * 16 + RowOfLanes(lane / 4);
#pragma unroll
    for (int r = 0; r < Config::kRowTile / 8; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[(r * 8 + lane % 4 * 2 + i % 2) * SumPitch(Config::kTileFeatures) + column + i / 2 * 8] = sum[r][i];
      }
    }
    FinishWorkTile<T, Config::kTileFeatures, Config::kConsumers>(args, tile, sums, rank);
    __syncwarp();
    if (args.cluster > 1) ClusterSyncOfReaders();  // others read this CTA's sums
  }
#endif
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_CONVERTED_KERNEL_CUH_
