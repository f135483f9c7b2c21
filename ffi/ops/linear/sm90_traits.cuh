// What the parts of the kernel of sm_90a (sm90_kernel.cuh) share: its arguments, the sizes of its rings, and where they
// are.
#ifndef XLA_GPU_OPS_LINEAR_SM90_TRAITS_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_TRAITS_CUH_

#include <cuda.h>

#include <cstdint>

#include "ffi/ops/linear/args.h"

namespace xla_gpu::linear {

struct Sm90Args {
  CUtensorMap weight_map;
  CUtensorMap x_map;  // boxes of a row tile
  LinearArgs linear;
  int cluster;        // CTAs that divide k
  int chunks;         // along k: of a weight stage's values
  int weight_stages;  // of the ring
  int x_stages;
  bool weights_first;  // nothing that may still run writes the weights: they are loaded before the wait for it
};

inline constexpr int kSm90Threads =
    256 + 64;  // two warpgroups that multiply, a warp that loads weights, one that loads x

// From a row of partial sums to the next: with 4 modulo 32 a warp writes its accumulators without bank conflicts.
constexpr int SumPitch(int tile_features) { return tile_features + 4; }

template <typename T_, WeightFormat kFormat_, int kRowTile_>
struct Sm90Traits {
  using T = T_;
  static constexpr WeightFormat kFormat = kFormat_;
  // The sums of 128 products may have scales of their own. Float8 with other scales has 1 there.
  static constexpr bool kGrouped = kFormat == WeightFormat::kFloat8 || kFormat == WeightFormat::kInt4;
  static constexpr int kRowTile = kRowTile_;
  // Weight stages of a chunk: each has 128 weight rows, 64 of each warpgroup. Conversions need the registers of a
  // second.
  static constexpr int kBlocks = kFormat == WeightFormat::kPlain ? 2 : 1;
  static constexpr int kTileFeatures = kBlocks * 128;
  static constexpr int kThreads = kSm90Threads;
  static constexpr int kConsumers = kThreads - 64;
  static constexpr int kWeightStageBytes = 128 * 128;
  // Of a TMA box of weights. The halves of a stage are gates and what they multiply where a work tile has one.
  static constexpr int kBoxRows = kBlocks == 1 ? 64 : 128;
  static constexpr int kXStageBytes = kRowTile * 128;  // 64 values of each row
  static constexpr int kCtasOfSm = kFormat == WeightFormat::kInt4 && kRowTile == 64 ? 1 : 2;
  static constexpr int kStageK = kFormat == WeightFormat::kPlain ? 64 : kFormat == WeightFormat::kInt4 ? 256 : 128;
  static constexpr int kXStagesOfChunk = kStageK / 64;
  static constexpr int kMaxStages = 16;  // of either ring
  static constexpr int kBarrierBytes = 4 * kMaxStages * 8;
  static constexpr int kSumPitch = SumPitch(kTileFeatures);
  static constexpr int kSumBytes = kRowTile * kSumPitch * 4;
};

// A ring's position: stage and phase of its next item.
struct PipelineState {
  int stage = 0;
  uint32_t phase = 0;

  __device__ void Advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// The first of the 64 weight rows that number `quarter` of a work tile has: with an activation the first half of a work
// tile's rows are gates, and the others what they multiply.
template <typename Config>
__device__ inline int FirstWeightRow(const LinearArgs& args, int tile, int quarter) {
  if (args.activation == Activation::kNone) return tile * Config::kTileFeatures + quarter * 64;
  constexpr int kGates = Config::kTileFeatures / 2;
  return tile * kGates + quarter * 64 + (quarter < kGates / 64 ? 0 : args.n / 2 - kGates);
}

// Where the barriers of the rings lie, as shared-memory addresses: weights full, weights empty, x full, x empty.
template <typename Config>
struct RingBarriers {
  uint32_t start;

  __device__ uint32_t WeightFull(int stage) const { return start + stage * 8; }
  __device__ uint32_t WeightEmpty(int stage) const { return start + (Config::kMaxStages + stage) * 8; }
  __device__ uint32_t XFull(int stage) const { return start + (2 * Config::kMaxStages + stage) * 8; }
  __device__ uint32_t XEmpty(int stage) const { return start + (3 * Config::kMaxStages + stage) * 8; }
};

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_TRAITS_CUH_
