// Lengths in the KV-block space (tile_scheduler.cuh).
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_TILE_LENGTHS_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_TILE_LENGTHS_CUH_

#include <cstdint>

#include "ffi/ops/paged_attention/decode/params.h"
#include "ffi/ops/paged_attention/decode/sequence_plan.cuh"

namespace xla_gpu::decode {

// Lengths of work tiles in the KV-block space, without the fixed overhead. The same in all lanes.
struct TileLengths {
  uint32_t longest = 0;
  uint32_t shortest = ~0u;

  __device__ TileLengths() {}

  // plan: a lane's.
  __device__ explicit TileLengths(const SequencePlan& plan)
      : longest(__reduce_max_sync(0xffffffffu, plan.length)),
        shortest(__reduce_min_sync(0xffffffffu, plan.splits > 0 ? plan.length : ~0u)) {}

  __device__ bool Uniform() const { return longest == shortest; }
  // Work tiles of one length cost the same, overhead included, and need none.
  __device__ uint32_t FixedOverhead() const { return Uniform() ? 0 : kFixedOverheadBlocks; }
};

// Where all work tiles have one length, a slightly longer interval may save much combining: whole work tiles, equal
// parts of one, or a multiple of a power of two, as lengths often are.
__device__ inline uint32_t RoundedUp(uint32_t interval, const TileLengths& lengths) {
  if (!lengths.Uniform()) return interval;
  const uint32_t length = lengths.longest;
  const uint32_t most = interval + interval / 16;
  if (most >= length && interval < 64 * length) {
    const uint32_t whole = static_cast<unsigned>(CeilDivSmall(interval, length)) * length;
    if (whole <= most) return whole;
  }
  if (interval < 16) return interval;
  // As many CTA groups for each work tile: all are cut at the same places, and few.
  if (interval < length && length < 64 * interval) {
    const uint32_t parts = static_cast<unsigned>(CeilDivSmall(length + 1, interval)) - 1;
    const uint32_t part = (length + parts - 1) / parts;
    if (part <= interval + interval / 8) return part;
  }
  const uint32_t step = 1u << (27 - __clz(static_cast<int>(interval)));
  return (interval + step - 1) & ~(step - 1);
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_TILE_LENGTHS_CUH_
