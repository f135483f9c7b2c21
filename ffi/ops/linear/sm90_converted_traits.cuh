// Sizes of the kernel of sm_90a that converts weights, and its barriers.
#ifndef XLA_GPU_OPS_LINEAR_SM90_CONVERTED_TRAITS_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_CONVERTED_TRAITS_CUH_

#include <cstdint>

#include "ffi/ops/linear/linear.h"
#include "ffi/ops/linear/sm90_traits.cuh"

namespace xla_gpu::linear {

template <typename T_, WeightFormat kFormat_, int kRowTile_>
struct ConvertedTraits {
  using T = T_;
  static constexpr WeightFormat kFormat = kFormat_;
  static constexpr bool kInt4 = kFormat == WeightFormat::kInt4;
  static constexpr int kRowTile = kRowTile_;
  static constexpr int kTileFeatures = 256;
  static constexpr int kConsumers = 512;
  static constexpr int kThreads = kConsumers + 128;  // a warp loads weights, one x, and two permute x
  // Of the CTA's barriers 2, before which all mbarriers are made, and 3, before which those of x are.
  static constexpr int kThreadsOfAll = kConsumers + 2 * 32, kThreadsOfX = 3 * 32;
  static constexpr int kPanels = kInt4 ? 4 : 2;  // of 64 values of k, in a weight stage
  static constexpr int kStageK = 64 * kPanels;
  static constexpr int kBoxRows = 128;  // of a TMA box of weights: with an activation gates or what they multiply
  static constexpr int kWeightStageBytes = kTileFeatures * 128;
  static constexpr int kXStageBytes = kRowTile * 256;  // 128 values of each row, in two panels
  static constexpr int kXStagesOfChunk = kPanels / 2;  // a chunk of k is a weight stage's
  // More weights in flight are no faster: x, which is loaded last, would have to wait for them at the start.
  static constexpr int kWeightStages = kRowTile > 32 ? 4 : 3;
  static constexpr int kXStages = kRowTile > 32 ? 4 : kRowTile > 8 ? 6 : 8;
  static constexpr int kMaxStages = 8;  // of either ring
  static constexpr int kBarrierBytes = 5 * kMaxStages * 8;
  static constexpr int kSharedBytes = kWeightStages * kWeightStageBytes + kXStages * kXStageBytes + kBarrierBytes;
  // With many rows the sums need registers: those of the threads that do not multiply, and of weights that are loaded
  // and converted fewer at a time.
  static constexpr bool kMovesRegisters = kRowTile > 32 || (kRowTile > 8 && kInt4);
  static constexpr bool kLoadsStage = kRowTile <= 32;  // all of a stage's weights at once; not float8
  static constexpr int kStepsAtOnce = kRowTile > 32 || (kRowTile > 8 && kFormat == WeightFormat::kFloat8) ? 2 : 4;
  static_assert(kRowTile * SumPitch(kTileFeatures) * 4 <= kSharedBytes);
};

// The barriers of the rings of weights and x, as shared-memory addresses. x is full when TMA has loaded it, and ready
// when it has the order of the weights.
template <typename Config>
struct ConvertedBarriers : RingBarriers<Config> {
  __device__ uint32_t XReady(int stage) const { return this->start + (4 * Config::kMaxStages + stage) * 8; }
};

// The first of the 64 weight rows that number `quarter` of a work tile has: with an activation the first half of a work
// tile's rows are gates, and the others what they multiply.
template <typename Config>
__device__ inline int FirstRowOfQuarter(const LinearArgs& args, int tile, int quarter) {
  if (args.activation == Activation::kNone) return tile * Config::kTileFeatures + quarter * 64;
  constexpr int kGates = Config::kTileFeatures / 2;
  return tile * kGates + quarter * 64 + (quarter < kGates / 64 ? 0 : args.n / 2 - kGates);
}

// The weight row, of 8 that follow one another in shared memory, of the lanes whose number divided by 4 is `g`: such
// that neither 8 lanes that load 16 bytes, nor 16 that load 8 bytes, meet in a bank.
__device__ inline int RowOfLanes(int g) { return (g & 1) << 2 | (g & 2) | g >> 2; }

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_CONVERTED_TRAITS_CUH_
