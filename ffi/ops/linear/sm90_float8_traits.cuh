// Sizes of the kernel of sm_90a for float8 weights and x in bfloat16.
#ifndef XLA_GPU_OPS_LINEAR_SM90_FLOAT8_TRAITS_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_FLOAT8_TRAITS_CUH_

#include <cuda_bf16.h>

#include <cstdint>

#include "ffi/ops/linear/sm90_converted_traits.cuh"
#include "ffi/ops/linear/sm90_traits.cuh"

namespace xla_gpu::linear {

template <int kRowTile_>
struct Float8Traits {
  using T = __nv_bfloat16;
  static constexpr int kRowTile = kRowTile_;
  static constexpr int kBoxRows = 128;                // of a TMA box of weights, at most
  static constexpr int kTileFeatures = 2 * kBoxRows;  // of a work tile, at most
  // Warpgroups that multiply: four, each 64 features, or two, each 64 features of either box, whose CTA of up to 8 rows
  // leaves an SM room for one of the next kernel.
  static constexpr int kCtasOfSm = kRowTile == 8 ? 2 : 1;
  static constexpr int kConsumers = kCtasOfSm == 2 ? 256 : 512;
  static constexpr int kBlocks = 512 / kConsumers;
  // x is split by a kernel in front, one of its own or the norm.
  static constexpr bool kSplitBefore = kRowTile > 32;
  static constexpr int kSplitters = kRowTile == 8 || kSplitBefore ? 2 : 6;  // warps that split x
  static constexpr int kThreads = kConsumers + 32 * (2 + kSplitters);       // a warp loads weights, one x
  // Of the CTA's barriers 2, before which all mbarriers are made, and 3, before which those of x are.
  static constexpr int kThreadsOfAll = kConsumers + 2 * 32, kThreadsOfX = (1 + kSplitters) * 32;
  static constexpr int kStageK = 128;  // values of k of a stage of weights: a chunk
  static constexpr int kBoxesOfStage = 2;
  static constexpr int kWeightBytes = (kRowTile > 32 ? 128 : 96) * 1024;  // of the ring
  static constexpr int kXChunks = 2;                   // of a stage of x: values of a row that have one scale
  static constexpr int kXPanelBytes = kRowTile * 128;  // 64 values of each row, or 128 of a float8 term
  static constexpr int kXStageBytes = 4 * kXPanelBytes;
  static constexpr int kXStages = kRowTile > 32 ? 3 : 4;
  static constexpr int kMaxStages = 8;  // of either ring
  static constexpr int kBarrierBytes = 5 * kMaxStages * 8;
  static constexpr int kFactorBytes = kXStages * kRowTile * 4;
  static constexpr int kSumBytes = kRowTile * SumPitch(kTileFeatures) * 4;
  // With many rows the sums need registers: those of the threads that do not multiply.
  static constexpr bool kMovesRegisters = kRowTile > 8;
  static constexpr int kConsumerRegisters = kSplitBefore ? 112 : 96;
  static constexpr int kOtherRegisters = kSplitBefore ? 32 : 48;
};

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_FLOAT8_TRAITS_CUH_
