// The products of float8 weights, for the kernel of sm_90a that converts weights: conversions beside wgmma, and one sum
// of all products where the scales are not of blocks.
#ifndef XLA_GPU_OPS_LINEAR_SM90_CONVERTED_FLOAT8_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_CONVERTED_FLOAT8_CUH_

#include <cstdint>

#include "ffi/device/mbarrier.cuh"
#include "ffi/device/wgmma_narrow.cuh"
#include "ffi/ops/linear/sm90_converted_traits.cuh"
#include "ffi/ops/linear/sm90_converted_weights.cuh"

namespace xla_gpu::linear {

// The products of a CTA's work tile and part of k. `shared`: the weight stages. Weights are loaded when the products of
// those before have been started: from registers the compiler would convert 128 values of k first, and multiply then.
template <typename Config>
__device__ __forceinline__ void MultiplyFloat8(const Sm90Args& args, int tile, int chunk_begin, int chunk_end,
                                               const char* shared, uint32_t xs, ConvertedBarriers<Config> barriers,
                                               float (&result)[Config::kRowTile / 8][4]) {
  using T = typename Config::T;
  constexpr WeightFormat kFormat = Config::kFormat;
  constexpr int kRowBlocks = Config::kRowTile / 8, kSteps = Config::kStepsAtOnce, kGroups = Config::kXStagesOfChunk;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int t = lane % 4, row = RowOfLanes(lane / 4);
  const char* const rows = shared + (warp * 16 + row) * 128;
  const int first_row = FirstRowOfQuarter<Config>(args.linear, tile, warp / 4) + warp % 4 * 16 + row;
  const uint32_t magic = ConversionMagic<T, kFormat>();

  // ---- Scales of blocks, loaded ahead
  const bool loads = args.linear.scale == WeightScale::kBlock;
  RowGroups<T, kFormat> groups, next_groups;
  const GroupLoader<T, kFormat> loader(args.linear, first_row);
  const auto load_groups = [&](int chunk) { loader.Load(args.linear, chunk * kGroups, &next_groups); };
  float sums[1][kRowBlocks][4];
  // Else wgmma's accumulators have the sums of all products.
  const bool adds_groups = args.linear.scale == WeightScale::kBlock;
  float last_factor[2] = {1.0f, 1.0f};
  uint32_t last_x = 0;  // the barrier of an x stage whose products may be under way
  const auto give_x_back = [&] {
    if (lane == 0 && last_x != 0) ArriveBarrier(last_x);
  };
  const auto add_group = [&](float(&sum)[kRowBlocks][4], const float(&scale)[2]) {
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) result[r][i] = fmaf(scale[i / 2], sum[r][i], result[r][i]);
    }
  };
  next_groups.scale[0] = next_groups.scale[1] = 0x3f800000;  // 1
  if (loads) load_groups(chunk_begin);
#pragma unroll
  for (auto& block : result) block[0] = block[1] = block[2] = block[3] = 0.0f;
  PipelineState weight_ring, x_ring;
  for (int chunk = chunk_begin; chunk < chunk_end; ++chunk) {
    groups = next_groups;
    if (loads && chunk + 1 < chunk_end) load_groups(chunk + 1);

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
    // ---- 128 values of k at a time: conversions while wgmma multiplies the values before
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      WaitBarrier(barriers.XReady(x_ring.stage), x_ring.phase);
      __syncwarp();
      // The same in all lanes: the compiler then keeps descriptors in uniform registers.
      const uint32_t x = __shfl_sync(~0u, xs + x_ring.stage * Config::kXStageBytes, 0);
      float(&accumulators)[kRowBlocks][4] = sums[0];
      uint32_t a[2][kSteps][4];
#pragma unroll
      for (int part = 0; part < 8 / kSteps; ++part) {
        const int first_step = part * kSteps, panel = group * 2 + first_step / 4;
        // From shared memory not before the products of the part before have been started: the compiler would convert
        // first and multiply then, and the tensor cores wait meanwhile.
        if (first_step % 4 == 0) load_panel(panel);
        uint32_t(&to)[kSteps][4] = a[part % 2];
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          const int step = (first_step + i) % 4;
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            ConvertWord<T, kFormat>(raw[r][panel][step], magic, &to[i][r], &to[i][r + 2]);
          }
        }
        WgmmaFence();
        const uint64_t b = MakeSmemDescKMajor(x + first_step / 4 * (Config::kXStageBytes / 2));
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          const bool first = first_step + i == 0 && (adds_groups || (group == 0 && chunk == chunk_begin));
          WgmmaNarrow<T>(accumulators, to[i], AdvanceSmemDesc(b, (first_step + i) % 4 * 32), !first);
        }
        WgmmaCommit();
        if (group == kGroups - 1 && first_step == 4) give_weights_back();
        WgmmaWait<1>();  // the products before these have ended: their operand's registers are free
        if (part == 0) give_x_back();
      }
      last_x = barriers.XEmpty(x_ring.stage);
      x_ring.Advance(Config::kXStages);
#pragma unroll
      for (int r = 0; r < 2; ++r) last_factor[r] = __uint_as_float(groups.scale[r]);
      if (adds_groups) {
        WgmmaWait<0>();
        WgmmaFenceOperand(sums[0]);
        give_x_back();
        last_x = 0;
        add_group(sums[0], last_factor);
      }
    }
  }
  WgmmaWait<0>();
  if (!adds_groups) {
    WgmmaFenceOperand(sums[0]);
    add_group(sums[0], last_factor);
  }
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_CONVERTED_FLOAT8_CUH_
