// x for the kernel of sm_90a that converts weights: brought into their order, in shared memory.
#ifndef XLA_GPU_OPS_LINEAR_SM90_CONVERTED_X_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_CONVERTED_X_CUH_

#include <cstdint>

#include "ffi/device/mbarrier.cuh"
#include "ffi/ops/linear/sm90_converted_traits.cuh"
#include "ffi/ops/linear/sm90_converted_weights.cuh"

namespace xla_gpu::linear {

// Brings the values of each row of x into the order of the weights, in place: warp 0 of two those of the first panel of
// each stage, warp 1 of the second. Rows that x does not have are zeros.
template <typename Config>
__device__ inline void PermuteX(const Sm90Args& args, int stages, char* xs, ConvertedBarriers<Config> barriers,
                                int warp) {
  constexpr int kBlocks = Config::kRowTile / 8, kAtOnce = kBlocks % 2 == 0 ? 2 : 1;  // of 8 rows
  const int lane = static_cast<int>(threadIdx.x) % 32, step = lane % 4;
  // Of 8, for each four lanes: no bank conflicts, neither of the loads of 8 bytes nor of the stores of 16.
  const int row = 0x65217430 >> (lane / 4 * 4) & 7;
  const int blocks = (args.linear.rows + 7) / 8;
  char* const rows = xs + warp * (Config::kXStageBytes / 2) + row * 128;
  const int from = ((step / 2 ^ row) << 4) + step % 2 * 8, to = (2 * step ^ row) << 4;
  PipelineState ring;
  for (int i = 0; i < stages; ++i) {
    char* const stage = rows + ring.stage * Config::kXStageBytes;
    WaitBarrier(barriers.XFull(ring.stage), ring.phase);
#pragma unroll
    for (int block = 0; block < kBlocks; block += kAtOnce) {
      if (block >= blocks) break;
      uint2 fours[kAtOnce][4];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          fours[j][t] = *reinterpret_cast<const uint2*>(stage + (from ^ t << 5) + (block + j) * 1024);
        }
      }
      __syncwarp();  // the lanes of a row have read it
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        uint32_t low[4], high[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          const uint2 four = fours[j][t];
          low[t] = kSplitsPairs<Config::kFormat> ? __byte_perm(four.x, four.y, 0x5410) : four.x;
          high[t] = kSplitsPairs<Config::kFormat> ? __byte_perm(four.x, four.y, 0x7632) : four.y;
        }
        char* const at = stage + (block + j) * 1024;
        *reinterpret_cast<uint4*>(at + to) = make_uint4(low[0], low[1], low[2], low[3]);
        *reinterpret_cast<uint4*>(at + (to ^ 16)) = make_uint4(high[0], high[1], high[2], high[3]);
      }
    }
    FenceProxyAsync();
    __syncwarp();
    if (lane == 0) ArriveBarrier(barriers.XReady(ring.stage));
    ring.Advance(Config::kXStages);
  }
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_CONVERTED_X_CUH_
