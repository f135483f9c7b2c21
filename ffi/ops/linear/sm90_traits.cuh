// What the kernels of sm_90a share: their arguments, and where the barriers of their rings are; and the sizes of the
// one for plain weights (sm90_kernel.cuh).
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
  int cluster;  // CTAs that divide k
  // Of plain weights: TMA boxes of a work tile's weight rows, 1 or 2; with an activation gates, and what they multiply.
  int boxes;
  int box_rows;        // a multiple of 8, at most kBoxRows
  int chunks;          // along k: of a weight stage's values
  int weight_stages;   // of the ring
  int x_stages;        // of the ring
  bool weights_first;  // nothing that may still run writes the weights: they are loaded before the wait for it
  // Of the CTAs of a cluster, and the end of the last one's: chunks of k, and columns of a work tile's results.
  // Divisions in the kernel would run before its first load.
  int chunk_begin[9];
  int column_begin[9];
  bool short_epilogue;  // a thread has one result at most
};

// Dynamic shared memory of two CTAs that, each with 1 KB besides, fill an SM: one of each size, or two of the first.
inline constexpr int kHalfOfSmBytes = 112 * 1024 + 512;
inline constexpr int kMoreThanHalfOfSmBytes = 113 * 1024 + 512;

// With it a number below 8 * 256 is divided by at most 256: multiplied by 2^kInverseShift / divisor, rounded up.
inline constexpr int kInverseShift = 20;

// From a row of partial sums to the next: with 4 modulo 32 a warp writes its accumulators without bank conflicts.
constexpr int SumPitch(int tile_features) { return tile_features + 4; }

// Of plain weights.
template <typename T_, int kRowTile_>
struct Sm90Traits {
  using T = T_;
  static constexpr int kRowTile = kRowTile_;
  // Weight rows of a TMA box and of a work tile, at most.
  static constexpr int kBoxRows = 128;
  static constexpr int kTileFeatures = 2 * kBoxRows;
  static constexpr int kConsumers = 256;            // two warpgroups that multiply, each 64 weight rows of a stage
  static constexpr int kThreads = kConsumers + 64;  // a warp loads weights, one x
  static constexpr int kStageRows = 128;
  static constexpr int kBlocks = kTileFeatures / kStageRows;  // weight stages of a chunk
  static constexpr int kBoxesOfStage = kStageRows / kBoxRows;
  static constexpr int kXStageBytes = kRowTile * 128;  // 64 values of each row
  static constexpr int kCtasOfSm = 2;
  static constexpr int kStageK = 64;
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

// The first weight row of a work tile's box. With an activation box 0 has gates, box 1 what they multiply.
__device__ inline int FirstWeightRow(const Sm90Args& args, int tile, int box) {
  if (args.linear.activation == Activation::kNone) return (tile * args.boxes + box) * args.box_rows;
  return tile * args.box_rows + box * (args.linear.n / 2);
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
