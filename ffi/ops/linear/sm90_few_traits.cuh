// Sizes of the kernel of sm_90a for few rows and plain weights, its arguments and its barriers.
#ifndef XLA_GPU_OPS_LINEAR_SM90_FEW_TRAITS_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_FEW_TRAITS_CUH_

#include <cstdint>

#include "ffi/ops/linear/sm90_traits.cuh"

namespace xla_gpu::linear {

// A work tile is divided into units: along k into parts, or if there is but one part, into halves of its features. Each
// unit has warps of its own, one for each 16 weight rows. A stage of the ring is one or two chunks of a unit: of the
// first chunks of all units, then of their next ones. A stage may belong to one unit after another. Its barriers do
// not: a parity says whether one phase has passed, but not how many. So each unit has barriers of its own, of which its
// stages take one after the other.
struct Sm90FewArgs : Sm90Args {
  int units;             // of a work tile
  int parts;             // of k: as many as units, or 1
  int unit_rows;         // weight rows of a unit: 16 for each of its warps
  int warps;             // of all units
  int inverse_of_warps;  // with it a warp's number is divided by those of a unit: 256 / (unit_rows / 16) + 1
  int columns;           // chunks of a stage: one or two, whose 128 bytes of each row follow one another in memory
  int column_bytes;      // of weights in a stage: from a chunk to the next
  int half_bytes;        // of weights in a stage: from the first half of a unit's rows to the second
  int x_rows;            // of x in a stage
  int rounds;            // stages of the longest part
  int slots;             // of a unit: its barriers, for at least as many stages as the ring has
  int launch_at;         // the round of loads behind which the next kernel may start
  int inverse_of_width;  // 2^kInverseShift / the threads that share a row of results, rounded up
};

template <typename T_, int kRowTile_>
struct FewTraits {
  using T = T_;
  static constexpr int kRowTile = kRowTile_;
  static constexpr int kMostWarps = kRowTile > 32 ? 14 : 16;  // that multiply: as many as registers suffice for
  static constexpr int kThreads = (kMostWarps + 2) * 32;      // a warp loads weights, one x
  static constexpr int kCtasOfSm = kRowTile == 8 ? 2 : 1;     // this kernel's and the next one's
  static constexpr int kChunkK = 64;                          // 128 bytes of a weight row
  static constexpr int kMaxStages = 56;                       // of the ring
  static constexpr int kBarrierBytes = 2 * (kMaxStages + 8) * 8;
};

// From a row of sums to the next.
constexpr int FewSumPitch(int features) { return features + 4; }

// Where the barriers of the ring are, as shared-memory addresses.
struct FewBarriers {
  uint32_t start;
  int slots;

  __device__ uint32_t Full(int unit, int slot) const { return start + (unit * slots + slot) * 16; }
  __device__ uint32_t Empty(int unit, int slot) const { return Full(unit, slot) + 8; }
};

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_FEW_TRAITS_CUH_
