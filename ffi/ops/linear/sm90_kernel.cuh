// The kernel of sm_90a for up to 64 rows and plain weights: TMA brings weights and x to shared memory, wgmma
// multiplies. sm90_converted_kernel.cuh has the one for weights that are converted.
//
// The weights are the M operand of wgmma and the rows of x its N operand. A CTA computes a work tile of up to 256
// features, such that nearly every SM has one; with an activation the first half are gates, the second half what they
// multiply. A warp loads weights, one x, and two warpgroups multiply, each of them half of the up to 128 weight rows of
// a stage. Where the work tiles are many a CTA takes half an SM, so that one of the next kernel loads its weights while
// this one ends.
//
// The CTAs of a cluster divide k. They add their partial sums through distributed shared memory, in the order of k. The
// number of CTAs in a cluster depends on n, k and the weights' format alone: a row has the same bits for any number of
// rows.
#ifndef XLA_GPU_OPS_LINEAR_SM90_KERNEL_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_KERNEL_CUH_

#include <cstdint>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/cluster.cuh"
#include "ffi/device/dependent_launch.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/tma_matrix.cuh"
#include "ffi/ops/linear/sm90_epilogue.cuh"
#include "ffi/ops/linear/sm90_products.cuh"
#include "ffi/ops/linear/sm90_traits.cuh"

namespace xla_gpu::linear {

// Loads a CTA's weights, by one thread.
template <typename Config>
__device__ inline void LoadWeights(const Sm90Args& args, int tile, int chunk_begin, int chunk_end, uint32_t weights,
                                   RingBarriers<Config> barriers) {
  const int box_bytes = args.box_rows * 128, stage_bytes = Config::kBoxesOfStage * box_bytes;
  if (!args.weights_first) WaitForPreviousKernel();
  PipelineState ring;
  for (int chunk = chunk_begin; chunk < chunk_end; ++chunk) {
    for (int first_box = 0; first_box < args.boxes; first_box += Config::kBoxesOfStage) {
      const uint32_t full = barriers.WeightFull(ring.stage), to = weights + ring.stage * stage_bytes;
      WaitBarrier(barriers.WeightEmpty(ring.stage), ring.phase ^ 1);
      ArriveExpectTx(full, stage_bytes);
#pragma unroll
      for (int box = 0; box < Config::kBoxesOfStage; ++box) {
        TmaLoadMatrixBox(to + box * box_bytes, args.weight_map, full, chunk,
                         FirstWeightRow(args, tile, first_box + box), kEvictFirst);
      }
      ring.Advance(args.weight_stages);
    }
  }
  // Now, and not earlier, memory has time for the next kernel's first loads.
  AllowDependentLaunch();
}

// Loads x for a CTA's part of k, by one thread.
template <typename Config>
__device__ inline void LoadX(const Sm90Args& args, int chunk_begin, int chunk_end, uint32_t xs,
                             RingBarriers<Config> barriers) {
  WaitForPreviousKernel();
  PipelineState ring;
  for (int part = chunk_begin * Config::kXStagesOfChunk; part < chunk_end * Config::kXStagesOfChunk; ++part) {
    WaitBarrier(barriers.XEmpty(ring.stage), ring.phase ^ 1);
    const uint32_t full = barriers.XFull(ring.stage);
    ArriveExpectTx(full, Config::kXStageBytes);
    TmaLoadMatrixBox(xs + ring.stage * Config::kXStageBytes, args.x_map, full, part, 0, kEvictNormal);
    ring.Advance(args.x_stages);
  }
}

template <typename Config>
__global__ void __launch_bounds__(XLA_GPU_HAS_WGMMA ? Config::kThreads : 32, XLA_GPU_HAS_WGMMA ? Config::kCtasOfSm : 1)
    LinearSm90Kernel(const __grid_constant__ Sm90Args args) {
#if XLA_GPU_HAS_WGMMA
  using T = typename Config::T;
  constexpr int kRowBlocks = Config::kRowTile / 8;
  extern __shared__ __align__(1024) char shared[];
  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, lane = tid % 32;
  // ---- Shared memory: weight stages, x stages, barriers
  const uint32_t weights = SharedAddress(shared);
  const uint32_t xs = weights + args.weight_stages * Config::kBoxesOfStage * args.box_rows * 128;
  const RingBarriers<Config> barriers = {xs + args.x_stages * Config::kXStageBytes};
  constexpr int kWeightWarp = Config::kConsumers / 32, kXWarp = kWeightWarp + 1;
  // A loading warp makes its own barriers, and does not wait for the other.
  if (warp >= kWeightWarp) {
    const uint32_t full = warp == kXWarp ? barriers.XFull(lane) : barriers.WeightFull(lane);
    const uint32_t empty = warp == kXWarp ? barriers.XEmpty(lane) : barriers.WeightEmpty(lane);
    if (lane < Config::kMaxStages) {
      InitBarrier(full, 1);
      InitBarrier(empty, Config::kConsumers / 32);
    }
    if (lane == 31) PrefetchTensorMap(warp == kXWarp ? args.x_map : args.weight_map);
    FenceProxyAsync();
    __syncwarp();
  }

  // ---- This CTA's work tile and part of k
  const int tile = static_cast<int>(ClusterId()), rank = static_cast<int>(ClusterRank());
  const int chunk_begin = args.chunk_begin[rank], chunk_end = args.chunk_begin[rank + 1];

  if (warp >= kWeightWarp) {
    NamedBarrierArrive(2, Config::kThreads);
    if (ElectOne()) {
      if (warp == kWeightWarp) {
        LoadWeights<Config>(args, tile, chunk_begin, chunk_end, weights, barriers);
      } else {
        LoadX<Config>(args, chunk_begin, chunk_end, xs, barriers);
      }
    }
    __syncwarp();
  } else {
    NamedBarrierSync(2, Config::kThreads);
    // ---- Products
    WaitForPreviousKernel();
    float sum[Config::kBlocks][kRowBlocks][4];
    MultiplyPlain<Config>(args, chunk_begin, chunk_end, weights, xs, barriers, sum);
    // All loads have completed, and both warpgroups have read them: the sums take the ring's place.
    NamedBarrierSync(1, Config::kConsumers);
    auto* sums = reinterpret_cast<float*>(shared);
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = block * 128 + warp * 16 + i / 2 * 8 + g;
          sums[(r * 8 + 2 * t + i % 2) * Config::kSumPitch + column] = sum[block][r][i];
        }
      }
    }
  }
  FinishTileOfCluster<T, Config::kTileFeatures, Config::kThreads>(args, tile, reinterpret_cast<const float*>(shared),
                                                                  rank);
  __syncwarp();                                  // the barrier of a cluster is for whole warps
  if (args.cluster > 1) ClusterSyncOfReaders();  // others read this CTA's sums
#endif
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_KERNEL_CUH_
