// The units of a sequence: the row tiles that a CTA group of the sm_90a kernels takes at a time (sm90_schedule.cuh).
#ifndef XLA_GPU_OPS_MLA_ATTENTION_SM90_UNITS_CUH_
#define XLA_GPU_OPS_MLA_ATTENTION_SM90_UNITS_CUH_

#include <cstdint>

#include "ffi/ops/mla_attention/sm90_traits.cuh"
#include "ffi/ops/paged_attention/sequence_metadata.cuh"

namespace xla_gpu::mla {

// How a unit's length follows from its key tiles.
struct UnitLength {
  int per_key_tile;  // 0 or 1; 0: the unit is `constant` equal parts, or whole
  int constant;

  __device__ int Of(int key_tiles) const { return per_key_tile * key_tiles + constant; }
};

__device__ inline int KeyTilesOf(int keys) {
  return static_cast<int>((static_cast<unsigned>(keys) + kTileKeys - 1) / kTileKeys);
}

// The units of a sequence. Unit u has the rows [u * rows, (u + 1) * rows) of `rows` = tile_rows * group_ctas rows, and
// key tiles up to the one with the key that its last row sees. For all but the last unit these are
// ⌊(u + base) / units_per_tile⌋, units_per_tile = num_heads * kTileKeys / rows, but no less than 0.
class SequenceUnits {
 public:
  int count;
  int last_key_tiles;  // of the last unit, which has the most

  __device__ SequenceUnits(const Sm90Params& params, const SequenceInfo& sequence) {
    const int unit_rows = params.tile_rows * params.group_ctas;
    const int64_t num_heads = params.attention.num_heads;
    // There are fewer than 2^31 rows.
    count = static_cast<int>((static_cast<unsigned>(sequence.q_len * num_heads) + unit_rows - 1) /
                             static_cast<unsigned>(unit_rows));
    last_key_tiles = KeyTilesOf(sequence.context_len);
    units_per_tile_ = 1;
    base_ = 0;
    if (count <= 1) return;  // the rest takes many slow divisions
    units_per_tile_ = static_cast<int>(num_heads * kTileKeys / unit_rows);
    const int64_t ahead = unit_rows - 1 + num_heads * (int64_t{sequence.context_len} - sequence.q_len + kTileKeys);
    base_ = ahead >= 0 ? ahead / unit_rows : -((unit_rows - 1 - ahead) / unit_rows);
    if (!sequence.valid) base_ = -int64_t{count};  // no key tiles at all
  }

  __device__ int KeyTiles(int unit) const {
    if (unit == count - 1) return last_key_tiles;
    return unit + base_ > 0 ? static_cast<int>((unit + base_) / units_per_tile_) : 0;
  }
  // Of all units before `unit`.
  __device__ int64_t LengthBefore(int unit, UnitLength length) const {
    const int64_t constant = int64_t{unit} * length.constant;
    return unit == 0 || length.per_key_tile == 0 ? constant : constant + SumBelow(unit + base_) - SumBelow(base_);
  }
  __device__ int64_t Length(UnitLength length) const {
    return count == 0 ? 0 : LengthBefore(count - 1, length) + length.Of(last_key_tiles);
  }
  // The unit in which `position` lies, counted from the first unit's begin.
  __device__ int Find(int64_t position, UnitLength length) const {
    int low = 0, high = count - 1;
    while (low < high) {
      const int middle = low + (high - low + 1) / 2;
      if (LengthBefore(middle, length) <= position) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

 private:
  // The sum of ⌊i / units_per_tile⌋ over 0 <= i < n.
  __device__ int64_t SumBelow(int64_t n) const {
    if (n <= 0) return 0;
    const int64_t quotient = n / units_per_tile_;
    return units_per_tile_ * (quotient * (quotient - 1) / 2) + quotient * (n - quotient * units_per_tile_);
  }

  int units_per_tile_;  // units after which there is a key tile more
  int64_t base_;
};

// As LoadSequence, but inlined where metadata is wrong, too: behind setmaxnreg there is no calling of functions.
__device__ inline SequenceInfo LoadSequenceInline(const PagedAttentionParams& params, int s, bool in_order) {
  SequenceInfo info = LoadSequence(params, s, /*in_order=*/true);
  if (in_order) return info;
#pragma unroll 1
  for (int i = 0; i < s; ++i) {
    const int earlier = __ldg(params.query_start_loc + i);
    if (earlier > info.q_begin && earlier <= params.num_tokens) {
      info.q_len = 0;
      info.owned = false;
    }
  }
  return info;
}

}  // namespace xla_gpu::mla

#endif  // XLA_GPU_OPS_MLA_ATTENTION_SM90_UNITS_CUH_
