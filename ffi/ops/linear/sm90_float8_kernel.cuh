// The kernel of sm_90a for up to 64 rows of bfloat16 and float8 weights: float8 products, whose weights are not
// converted.
//
// As in sm90_kernel.cuh, weights are the M operand of wgmma and the rows of x its N operand, TMA brings both to shared
// memory, and the CTAs of a cluster divide k. What differs:
//  - Each value of x becomes the sum of two float8 numbers, times a power of two for 256 values of a row
//    (sm90_float8_x.cuh): exact but for values that are small beside the largest of them. Both are multiplied with the
//    same weights. Some warps do that in shared memory; for more than 32 rows a kernel in front does.
//  - Four warpgroups multiply, each 64 of a work tile's up to 256 features. One CTA has an SM. Up to 8 rows two
//    warpgroups do, so that a CTA of the next kernel has room beside this one.
//  - The tensor cores add float8 products with 14 bits. So the sums of 256 products, multiplied by their power of two,
//    are added in float32.
//
// The order of all sums depends on n, k and the format alone: a row has the same bits for any number of rows.
#ifndef XLA_GPU_OPS_LINEAR_SM90_FLOAT8_KERNEL_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_FLOAT8_KERNEL_CUH_

#include <cstdint>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/cluster.cuh"
#include "ffi/device/dependent_launch.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/mma.cuh"
#include "ffi/device/wgmma_float8.cuh"
#include "ffi/ops/linear/sm90_float8_epilogue.cuh"
#include "ffi/ops/linear/sm90_float8_traits.cuh"
#include "ffi/ops/linear/sm90_float8_x.cuh"
#include "ffi/ops/linear/sm90_kernel.cuh"

namespace xla_gpu::linear {

// Brings scales of channels, which the epilogue reads, to L2: it would wait for memory.
__device__ inline void PrefetchScales(const Sm90Args& args, int tile) {
  constexpr int kOfLine = 32;
  const int thread = static_cast<int>(threadIdx.x), box = thread / 8, line = thread % 8;
  if (args.linear.scale != WeightScale::kChannel || box >= 2 || line * kOfLine >= args.box_rows + kOfLine - 1) return;
  const int row = min(FirstWeightRow(args, tile, box) + line * kOfLine, args.linear.n - 1);
  PrefetchToL2(static_cast<const float*>(args.linear.weight_scale) + row);
}

// The same of this CTA's residuals, by `threads` threads of which this one has number `thread`.
template <typename T>
__device__ inline void PrefetchResidual(const Sm90Args& args, int tile, int rank, int thread, int threads) {
  if (args.linear.residual == nullptr) return;
  const bool gated = args.linear.activation != Activation::kNone;
  const int out_features = gated ? args.linear.n / 2 : args.linear.n;
  const int width = gated ? args.box_rows : 2 * args.box_rows;
  const int first = tile * width + width / 4 * rank / args.cluster * 4;
  const int last = tile * width + width / 4 * (rank + 1) / args.cluster * 4 - 1;
  for (int i = thread; i < 2 * args.linear.rows; i += threads) {
    const int column = min(i % 2 == 0 ? first : last, out_features - 1);
    PrefetchToL2(static_cast<const T*>(args.linear.residual) + static_cast<int64_t>(i / 2) * out_features + column);
  }
}

// Loads x for a CTA's part of k, by one thread: stages of two chunks. Terms that a kernel in front has made come with
// their powers of two.
template <typename Config>
__device__ inline void LoadXChunks(const Sm90Args& args, int chunk_begin, int chunk_end, uint32_t xs, uint32_t factors,
                                   ConvertedBarriers<Config> barriers) {
  WaitForPreviousKernel();
  PipelineState ring;
  for (int chunk = chunk_begin; chunk < chunk_end; chunk += Config::kXChunks) {
    WaitBarrier(barriers.XEmpty(ring.stage), ring.phase ^ 1);
    const uint32_t full = barriers.XFull(ring.stage), to = xs + ring.stage * Config::kXStageBytes;
    if constexpr (Config::kSplitBefore) {
      constexpr int kBytes = Config::kRowTile * 4;
      ArriveExpectTx(full, Config::kXStageBytes + kBytes);
#pragma unroll
      for (int panel = 0; panel < 4; ++panel) {
        TmaLoadMatrixBox(to + panel * Config::kXPanelBytes, args.x_map, full, chunk + panel % 2, panel / 2 * kSplitRows,
                         kEvictNormal);
      }
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                       factors + ring.stage * kBytes),
                   "l"(args.linear.partials + chunk / 2 * kSplitRows), "n"(kBytes), "r"(full)
                   : "memory");
    } else {
      ArriveExpectTx(full, Config::kXStageBytes);
#pragma unroll
      for (int panel = 0; panel < 4; ++panel) {
        TmaLoadMatrixBox(to + panel * Config::kXPanelBytes, args.x_map, full, chunk * 2 + panel, 0, kEvictNormal);
      }
    }
    ring.Advance(Config::kXStages);
  }
}

// The products of a CTA's work tile and part of k.
template <typename Config>
__device__ __forceinline__ void MultiplyTerms(const Sm90Args& args, int chunk_begin, int chunk_end, uint32_t weights,
                                              uint32_t xs, const float* factors, ConvertedBarriers<Config> barriers,
                                              float (&results)[Config::kBlocks][Config::kRowTile / 8][4]) {
  constexpr int kRowBlocks = Config::kRowTile / 8;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int stage_bytes = 2 * args.box_rows * 128, row = lane % 16;
  // Where the lane's 16 bytes for the first of four steps along k lie.
  const uint32_t rows = weights + (warp / 8 * args.box_rows + warp % 8 * 16 + row) * 128 + ((lane / 16 ^ row % 8) << 4);
#pragma unroll
  for (auto& result : results) {
#pragma unroll
    for (auto& block : result) block[0] = block[1] = block[2] = block[3] = 0.0f;
  }
  float sums[Config::kBlocks][kRowBlocks][4];
  const auto none = static_cast<uint32_t>(args.chunks >> 31);  // 0, which the compiler does not know
  PipelineState weight_ring, x_ring;
  for (int chunk = chunk_begin; chunk < chunk_end; chunk += Config::kXChunks) {
    WaitBarrier(Config::kSplitBefore ? barriers.XFull(x_ring.stage) : barriers.XReady(x_ring.stage), x_ring.phase);
    __syncwarp();
    // The same in all lanes: the compiler then keeps descriptors in uniform registers.
    const uint32_t x = __shfl_sync(~0u, xs + x_ring.stage * Config::kXStageBytes, 0);
#pragma unroll
    for (int half = 0; half < Config::kXChunks; ++half) {
      if (chunk + half >= chunk_end) break;
      WaitBarrier(barriers.WeightFull(weight_ring.stage), weight_ring.phase);
      const uint32_t from = rows + weight_ring.stage * stage_bytes;
      constexpr int kItems = 2 * Config::kBlocks;  // 64 values of k of one box each
      uint32_t a[2][2][4];
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        const int part = item / Config::kBlocks, block = item % Config::kBlocks;
        auto& sum = sums[block];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          LoadMatrix4(a[item % 2][i], (from + block * args.box_rows * 128) ^ (2 * part + i) << 5);
        }
        WgmmaFence();
#pragma unroll
        for (int term = 0; term < 2; ++term) {
          const uint64_t b = MakeSmemDescKMajor(x + (2 * term + half) * Config::kXPanelBytes);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            WgmmaFloat8(sum, a[item % 2][i], AdvanceSmemDesc(b, (2 * part + i) * 32), half + part + term + i > 0);
          }
        }
        WgmmaCommit();
        if (item == kItems - 1) {
          // Not right behind ldmatrix, whose reads may still be under way when TMA has written the stage again: an
          // arrival does not wait for them (ptxas keeps the order of instructions alone). These products have.
          __syncwarp();
          if (lane == 0) ArriveBarrier(barriers.WeightEmpty(weight_ring.stage));
          weight_ring.Advance(args.weight_stages);
        }
        WgmmaWait<1>();  // the products before these have ended: their operand's registers are free
      }
    }
    const float* const factors_of_stage = factors + x_ring.stage * Config::kRowTile + lane % 4 * 2;
    WgmmaWait<0>();
#pragma unroll
    for (auto& sum : sums) WgmmaFenceOperand(sum);
    uint32_t zero = 0;  // of all factors: the arrival below waits for their loads
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
      const float2 factor = *reinterpret_cast<const float2*>(factors_of_stage + r * 8);
      zero |= __float_as_uint(factor.x) & none;
#pragma unroll
      for (int block = 0; block < Config::kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          results[block][r][i] = fmaf(i % 2 == 0 ? factor.x : factor.y, sums[block][r][i], results[block][r][i]);
        }
      }
    }
    __syncwarp();
    if (lane == 0) ArriveBarrier(barriers.XEmpty(x_ring.stage) + zero);
    x_ring.Advance(Config::kXStages);
  }
}

template <typename Config>
__global__ void __launch_bounds__(XLA_GPU_HAS_WGMMA ? Config::kThreads : 32, XLA_GPU_HAS_WGMMA ? Config::kCtasOfSm : 1)
    Float8Sm90Kernel(const __grid_constant__ Sm90Args args) {
#if XLA_GPU_HAS_WGMMA
  using T = typename Config::T;
  extern __shared__ __align__(1024) char shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  // ---- Shared memory: weight stages, x stages, barriers, powers of two of rows of x
  const int weight_bytes = args.weight_stages * 2 * args.box_rows * 128;
  constexpr int kXBytes = Config::kXStages * Config::kXStageBytes;
  const uint32_t weights = SharedAddress(shared), xs = weights + weight_bytes;
  const ConvertedBarriers<Config> barriers = {{xs + kXBytes}};
  auto* const factors = reinterpret_cast<float*>(shared + weight_bytes + kXBytes + Config::kBarrierBytes);
  constexpr int kConsumerWarps = Config::kConsumers / 32, kWeightWarp = kConsumerWarps, kXWarp = kWeightWarp + 1;
  // ---- This CTA's work tile and part of k
  const int tile = static_cast<int>(ClusterId()), rank = static_cast<int>(ClusterRank());
  const int chunk_begin = args.chunk_begin[rank], chunk_end = args.chunk_begin[rank + 1];

  if (warp >= kConsumerWarps) {
    if constexpr (Config::kMovesRegisters) DecreaseRegisters<Config::kOtherRegisters>();
    if (warp <= kXWarp) {
      // A loading warp makes its own barriers, and does not wait for the other.
      if (lane < Config::kMaxStages) {
        if (warp == kWeightWarp) {
          InitBarrier(barriers.WeightFull(lane), 1);
          InitBarrier(barriers.WeightEmpty(lane), kConsumerWarps);
        } else {
          InitBarrier(barriers.XFull(lane), 1);
          InitBarrier(barriers.XReady(lane), Config::kSplitters);
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
          LoadWeights<Config>(args, tile, chunk_begin, chunk_end, weights, barriers);
        } else {
          LoadXChunks<Config>(args, chunk_begin, chunk_end, xs, SharedAddress(factors), barriers);
        }
      }
    } else {
      NamedBarrierSync(3, Config::kThreadsOfX);
      WaitForPreviousKernel();
      PrefetchResidual<T>(args, tile, rank, static_cast<int>(threadIdx.x) - (kXWarp + 1) * 32, Config::kSplitters * 32);
      const int stages = (chunk_end - chunk_begin + Config::kXChunks - 1) / Config::kXChunks;
      if constexpr (!Config::kSplitBefore)
        SplitX<Config>(args, stages, shared + weight_bytes, factors, barriers, warp - kXWarp - 1);
    }
    __syncwarp();  // the barrier of a cluster is for whole warps
    if (args.cluster > 1) {
      ClusterSyncOwnShared();
      ClusterSyncOfReaders();
    }
  } else {
    if constexpr (Config::kMovesRegisters) IncreaseRegisters<Config::kConsumerRegisters>();
    NamedBarrierSync(2, Config::kThreadsOfAll);
    if (!args.weights_first) WaitForPreviousKernel();
    PrefetchScales(args, tile);
    float sum[Config::kBlocks][Config::kRowTile / 8][4];
    MultiplyTerms<Config>(args, chunk_begin, chunk_end, weights, xs, factors, barriers, sum);
    WaitForPreviousKernel();
    // All loads have completed, and all warps have read them: the sums take the ring's place.
    NamedBarrierSync(1, Config::kConsumers);
    auto* const sums = reinterpret_cast<float*>(shared);
    const int column = warp * 16 + lane / 4;
#pragma unroll
    for (int r = 0; r < Config::kRowTile / 8; ++r) {
      float* const to = sums + (r * 8 + lane % 4 * 2) * SumPitch(Config::kTileFeatures) + column;
#pragma unroll
      for (int block = 0; block < Config::kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          to[i % 2 * SumPitch(Config::kTileFeatures) + i / 2 * 8 + block * Config::kBoxRows] = sum[block][r][i];
        }
      }
    }
    if (Config::kRowTile == 8 && args.short_epilogue) {
      FinishFewBoxes<T, Config::kTileFeatures, Config::kConsumers>(args, tile, sums, rank);
    } else {
      FinishBoxes<T, Config::kTileFeatures, Config::kConsumers>(args, tile, sums, rank);
    }
    __syncwarp();
    if (args.cluster > 1) ClusterSyncOfReaders();  // others read this CTA's sums
  }
#endif
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_FLOAT8_KERNEL_CUH_
