// Sizes of the kernel of sm_90a for int4 weights, its arguments and its barriers.
#ifndef XLA_GPU_OPS_LINEAR_SM90_INT4_TRAITS_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_INT4_TRAITS_CUH_

#include <cstdint>

#include "ffi/ops/linear/sm90_traits.cuh"

namespace xla_gpu::linear {

// `cluster` CTAs and `parts` groups of warps of each divide k.
struct Sm90Int4Args : Sm90Args {
  int parts;
  int warps_of_part;
  int inverse_of_warps;     // with it a warp's number is divided by warps_of_part: 256 / warps_of_part + 1
  int stages;               // of each part's ring
  int launch_at;            // the load of each part behind which the next kernel may start
  int x_rows;               // of a TMA box of x: up to 8 rows no more than there are
  int part_begin[9];        // the first chunk of each part of k, and the end of the last one
  int inverse_of_features;  // up to 8 rows: 2^kInverseShift / the features of a work tile's results, rounded up
};

template <typename T_, int kRowTile_, int kTilesOfWarp_ = 1>
struct Int4Traits {
  using T = T_;
  static constexpr int kRowTile = kRowTile_;
  static constexpr int kRowBlocks = kRowTile / 8;
  static constexpr bool kSumsBesideRing = kRowTile == 8;         // otherwise they take its place
  static constexpr int kTilesOfWarp = kTilesOfWarp_;             // of 16 weight rows
  static constexpr int kMostWarps = kTilesOfWarp == 1 ? 14 : 8;  // that multiply
  static constexpr int kLoadingWarps = 2;                        // at most, one for a part
  // The next kernel's CTA fits an SM beside this one's, and loads while this one ends.
  static constexpr bool kFitsBesideNext = kRowTile == 8;
  // Then a CTA has no more warps than it needs.
  static constexpr bool kFixedWarps = !kFitsBesideNext;
  static constexpr int kThreads = (kMostWarps + kLoadingWarps) * 32;
  // Of a thread, at most. Up to 8 rows as many as the loop needs: a quarter of an SM has 512 of each lane, for four
  // warps of 16 features and two of gate_up's of 32.
  static constexpr int kRegisters = !kFitsBesideNext ? 128 : kTilesOfWarp == 1 ? 72 : 112;
  static constexpr int kChunkK = 256;          // 128 bytes of a weight row: a stage's
  static constexpr int kTileBytes = 16 * 128;  // of a stage
  static constexpr int kMaxStages = 8;
  static constexpr int kBarrierBytes = 2 * 8 * kMaxStages * 8;             // of up to 8 parts
  static constexpr int kRingBytes = (kFitsBesideNext ? 102 : 216) * 1024;  // at most
  static constexpr int kLeastBytes = kFitsBesideNext ? 0 : 116 * 1024;     // no two CTAs of a kernel on an SM
};

// Of a chunk's x.
constexpr int Int4XBytes(int x_rows) { return x_rows * 512; }

// Where the barriers of a part's ring are, as shared-memory addresses.
struct Int4Barriers {
  uint32_t start;

  __device__ uint32_t Full(int stage) const { return start + stage * 16; }
  __device__ uint32_t Empty(int stage) const { return start + stage * 16 + 8; }
};

// From a row of partial sums to the next.
constexpr int Int4SumPitch(int features) { return features + 4; }

// The weight row, of 8 that follow one another in shared memory, of the lanes whose number divided by 4 is `g`: such
// that 16 lanes that load 8 bytes meet in no bank.
__device__ inline int Int4RowOfLanes(int g) { return (g & 1) << 2 | (g & 2) | g >> 2; }

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_INT4_TRAITS_CUH_
