// The products of the kernel of sm_90a for plain weights, by two warpgroups.
#ifndef XLA_GPU_OPS_LINEAR_SM90_PRODUCTS_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_PRODUCTS_CUH_

#include <cstdint>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/wgmma_narrow.cuh"
#include "ffi/ops/linear/sm90_traits.cuh"

namespace xla_gpu::linear {

// The products of weights that wgmma reads as they are.
template <typename Config>
__device__ __forceinline__ void MultiplyPlain(const Sm90Args& args, int chunk_begin, int chunk_end, uint32_t weights,
                                              uint32_t xs, RingBarriers<Config> barriers,
                                              float (&sum)[Config::kBlocks][Config::kRowTile / 8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warpgroup = static_cast<int>(threadIdx.x) / 128;
  const int stage_bytes = args.box_rows * 128;
  PipelineState weight_ring, x_ring;
  // The stages whose products are still under way: they are given back when the next ones have been started.
  uint32_t last_weight = 0, last_x = 0;
  for (int chunk = chunk_begin; chunk < chunk_end; ++chunk) {
    WaitBarrier(barriers.XFull(x_ring.stage), x_ring.phase);
    const uint64_t b = MakeSmemDescKMajor(xs + x_ring.stage * Config::kXStageBytes);
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {
      if (block >= args.boxes) break;
      WaitBarrier(barriers.WeightFull(weight_ring.stage), weight_ring.phase);
      // Of 64 rows. Those past the stage's are anything, and so are their sums.
      const uint64_t a = MakeSmemDescKMajor(weights + weight_ring.stage * stage_bytes + warpgroup * 64 * 128);
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

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_PRODUCTS_CUH_
