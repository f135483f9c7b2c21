// The split accumulators in the scratch, through which the split-KV kernel hands partial results to the combine kernel:
// o_accum float[accumulators, accum_rows, head_dim] and lse_accum AttentionState[accumulators, accum_rows], interleaved
// so that each row's state stands behind its columns.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_SPLIT_ACCUMULATORS_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_SPLIT_ACCUMULATORS_CUH_

#include <cstdint>

#include "ffi/device/attention_state.cuh"
#include "ffi/ops/paged_attention/decode/params.h"
#include "ffi/ops/paged_attention/decode/tile_scheduler.cuh"

namespace xla_gpu::decode {

struct SplitAccumulators {
  // The offset of a row of accumulator `index`, in float4. Below 2^32: see MakeKernelConfig.
  __device__ static uint32_t RowOffset(const DecodeArgs& args, unsigned index, int row) {
    return (index * static_cast<unsigned>(args.accum_rows) + static_cast<unsigned>(row)) * args.accum_row_stride;
  }
  __device__ static float* O(const DecodeArgs& args, uint32_t row_offset) {  // [head_dim]
    return reinterpret_cast<float*>(static_cast<float4*>(args.params.scratch) + row_offset);
  }
  __device__ static AttentionState* State(const DecodeArgs& args, uint32_t row_offset) {
    return reinterpret_cast<AttentionState*>(static_cast<float4*>(args.params.scratch) + row_offset +
                                             (args.accum_row_stride - 1));
  }

  // The accumulator that CTA `cta` stores for a work tile. It holds one of three things: the work tile's segments from
  // its beginning on that the CTA has whole, merged (from_tile_begin); the splits of `segment` from the segment's
  // beginning on; or the single split `split_in_segment` of a segment that another CTA began. has_tile_begin,
  // has_segment_begin: the CTA computes the first split of the work tile, of the segment. A CTA stores at most one work
  // tile that it began, one segment of that, and one work tile that another CTA began.
  // next_cta: the CTA of the next CTA group for the same KV head.
  __device__ static unsigned IndexOf(unsigned cta, unsigned next_cta, bool from_tile_begin, bool has_tile_begin,
                                     bool has_segment_begin, int segment, int split_in_segment) {
    // The first segment of a work tile, and the first split of a segment, are never those that another CTA began. What
    // a CTA has of a later segment stands where the next CTA, which goes on with it, would store the work tile's
    // second segment: that lies behind it.
    const int segment_index = kSegmentSplits - 1 + (has_tile_begin ? 1 : segment);
    const int index = from_tile_begin ? 0 : has_segment_begin ? segment_index : split_in_segment;
    return (has_tile_begin && !from_tile_begin ? next_cta : cta) * kCtaAccumulators + index;
  }
  // As IndexOf where CTAs take whole segments of a work tile (DecodeArgs::whole_segments). A CTA stores the segments of
  // one work tile that another CTA began, and thus not its first segment, and what it has of one that it began.
  __device__ static unsigned IndexOfSegment(unsigned cta, bool has_tile_begin, int segment) {
    return cta * kMaxSegments + (has_tile_begin ? 0 : segment);
  }
  // The accumulator for what begins with split `split`. work_tile: see WorkTileIndex and SequenceTileIndex.
  __device__ static unsigned IndexOfSplit(unsigned work_tile, int split) { return work_tile * kMaxSplits + split; }
};

// The number of a work tile and KV head among all that the call may have. Sequences share no tokens, and in a token's
// rows at most row_tiles_per_token row tiles begin.
__device__ inline unsigned WorkTileIndex(const DecodeArgs& args, int q_begin, const WorkTile& work_tile) {
  const unsigned row_tile = static_cast<unsigned>(q_begin) * args.row_tiles_per_token + work_tile.row_tile;
  return row_tile * static_cast<unsigned>(args.params.num_kv_heads) + work_tile.kv_head;
}

// The same for wide work tiles, by the sequence.
__device__ inline unsigned SequenceTileIndex(const DecodeArgs& args, int sequence, const WorkTile& work_tile) {
  const unsigned row_tile = static_cast<unsigned>(sequence) * args.row_tiles_per_token + work_tile.row_tile;
  return row_tile * static_cast<unsigned>(args.params.num_kv_heads) + work_tile.kv_head;
}

// Loads that bypass L1, which may hold what the scratch held before. Without `read` the instructions are fetched but
// nothing is read: see the combine kernel's instruction-cache warm-up.
__device__ inline AttentionState LoadState(const AttentionState* from, bool read) {
  AttentionState state = {-INFINITY, 0.0f};
  asm volatile(
      "{\n"
      ".reg .pred read;\n"
      "setp.ne.u32 read, %3, 0;\n"
      "@read ld.global.cg.v2.f32 {%0, %1}, [%2];\n"
      "}"
      : "+f"(state.max), "+f"(state.sum)
      : "l"(from), "r"(static_cast<uint32_t>(read))
      : "memory");
  return state;
}
__device__ inline float4 LoadColumns(const float* from, bool read) {
  float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
  asm volatile(
      "{\n"
      ".reg .pred read;\n"
      "setp.ne.u32 read, %5, 0;\n"
      "@read ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "+f"(o.x), "+f"(o.y), "+f"(o.z), "+f"(o.w)
      : "l"(from), "r"(static_cast<uint32_t>(read))
      : "memory");
  return o;
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_SPLIT_ACCUMULATORS_CUH_
