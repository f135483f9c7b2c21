// How a sequence of the decode path is cut into work tiles and KV splits: a function of the sequence alone.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_SEQUENCE_PLAN_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_SEQUENCE_PLAN_CUH_

#include <cstdint>

#include "ffi/ops/paged_attention/decode/params.h"
#include "ffi/ops/paged_attention/sequence_metadata.cuh"

namespace xla_gpu::decode {

// About 1 / x, for x > 0.
__device__ inline float Reciprocal(unsigned x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(static_cast<float>(x)));
  return reciprocal;
}
// ceil(x / divisor), where that is below 128.
__device__ inline int CeilDivSmall(unsigned x, unsigned divisor) {
  // Too small by less than 2.
  int quotient = static_cast<int>(static_cast<float>(x) * Reciprocal(divisor));
  if (static_cast<unsigned>(quotient) * divisor < x) ++quotient;
  if (static_cast<unsigned>(quotient) * divisor < x) ++quotient;
  return quotient;
}

// How a sequence is cut into work tiles and splits. One without splits does not belong to the decode path.
struct SequencePlan {
  uint32_t begin;   // of its first work tile, in the KV-block space
  uint32_t length;  // of a work tile in the KV-block space, with the fixed overhead behind it
  int32_t q_begin;
  int32_t first_key;  // earlier keys are hidden from all of the sequence's queries
  int32_t end_key;
  int32_t split_blocks;  // KV blocks of a split
  int32_t row_tiles;     // of a KV head
  uint8_t q_len;
  uint8_t splits;          // of a work tile
  uint8_t segment_splits;  // of a segment; the last segment may have fewer
  bool valid;              // context_len is; if not, there are no keys

  __device__ int WorkTiles(const DecodeArgs& args) const { return row_tiles * args.num_kv_head_groups; }
  __device__ uint32_t End(const DecodeArgs& args) const {
    return begin + length * static_cast<unsigned>(WorkTiles(args));
  }
  // Where a split begins in its work tile, in the KV-block space.
  __device__ uint32_t SplitOffset(const DecodeArgs& args, int split) const {
    return static_cast<unsigned>(split * split_blocks) >> args.block_shift;
  }
  __device__ int SegmentOf(int split) const {  // exact for numbers as small as these
    return static_cast<int>((static_cast<float>(split) + 0.5f) * Reciprocal(segment_splits));
  }
  __device__ int Segments() const { return SegmentOf(splits - 1) + 1; }
  // The first split that begins at `offset` in its work tile or later; `splits` if none does. Where CTA groups take
  // whole segments or work tiles, the first one that begins such.
  template <typename TileShape>
  __device__ int FirstSplitFrom(const DecodeArgs& args, uint32_t offset) const {
    if (offset >= length || (args.whole_tiles && offset > 0)) return splits;
    const int split = CeilDivSmall(offset << args.block_shift, static_cast<unsigned>(split_blocks));
    if (!TileShape::WholeSegments(args)) return min(split, int{splits});
    return min(SegmentOf(split + segment_splits - 1) * segment_splits, int{splits});
  }
};
static_assert(sizeof(SequencePlan) == 32 && kMaxSplits < 127 && kMaxDecodeRows < 256);

// What the metadata says of a sequence.
struct SequenceMetadata {
  int q_begin;
  int q_end;
  int context_len;

  __device__ static SequenceMetadata Load(const DecodeArgs& args, int sequence) {
    if (sequence >= args.max_seqs) return {0, 0, 0};
    const int32_t* const starts = args.params.query_start_loc + sequence;
    return {__ldg(starts), __ldg(starts + 1), __ldg(args.params.context_lens + sequence)};
  }
  __device__ bool InOrder(const DecodeArgs& args) const {
    return 0 <= q_begin && q_begin <= q_end && q_end <= args.num_tokens;
  }
};

// Keys of a KV block and query rows of a work tile, which the kernel is compiled for.
template <int kBlockKeysLog2, int kRowsLog2>
struct FixedTileShape {
  // Whether DecodeArgs::whole_tile_excess may be set, and whether the kernel combines what another one has split.
  static constexpr bool kMayTakeWholeTiles = true;
  static constexpr bool kCombines = false;
  __device__ static constexpr int BlockKeysLog2(const DecodeArgs&) { return kBlockKeysLog2; }
  __device__ static constexpr int RowsLog2(const DecodeArgs&) { return kRowsLog2; }
  __device__ static constexpr bool WholeSegments(const DecodeArgs&) { return false; }
};
template <int kBlockKeysLog2, int kRowsLog2>
struct WideTileShape : FixedTileShape<kBlockKeysLog2, kRowsLog2> {
  static constexpr bool kMayTakeWholeTiles = false;
  __device__ static bool WholeSegments(const DecodeArgs& args) { return args.whole_segments; }
};
// The same from the arguments, for kernels that serve every shape.
struct AnyTileShape {
  static constexpr bool kMayTakeWholeTiles = true;
  static constexpr bool kCombines = true;
  __device__ static int BlockKeysLog2(const DecodeArgs& args) { return args.block_keys_log2; }
  __device__ static int RowsLog2(const DecodeArgs& args) { return args.tile_rows_log2; }
  __device__ static bool WholeSegments(const DecodeArgs& args) { return args.whole_segments; }
};

// The plan of a sequence, with `begin` 0 and no fixed overhead. Without splits unless the sequence owns its rows and
// has at most max_tokens of them.
template <typename TileShape>
__device__ inline SequencePlan MakeSequencePlan(const DecodeArgs& args, bool owned, const SequenceMetadata& metadata) {
  SequencePlan plan = {};
  const unsigned q_len = static_cast<unsigned>(metadata.q_end) - static_cast<unsigned>(metadata.q_begin);
  if (!owned || q_len - 1 >= static_cast<unsigned>(args.max_tokens)) return plan;
  plan.valid = static_cast<unsigned>(metadata.context_len) <= args.max_context_len;
  plan.q_begin = metadata.q_begin;
  plan.q_len = static_cast<uint8_t>(q_len);
  plan.end_key = plan.valid ? metadata.context_len : 0;
  if (args.window > 0) {
    const int64_t hidden = int64_t{plan.end_key} - q_len - args.window + 1;
    plan.first_key = hidden > 0 ? static_cast<int>(hidden) : 0;
  }
  // A sequence without keys has one empty split: some CTA has to write its rows.
  const unsigned keys = static_cast<unsigned>(plan.end_key - plan.first_key);
  const unsigned block_keys = 1u << TileShape::BlockKeysLog2(args);
  const unsigned blocks = max((keys + block_keys - 1) >> TileShape::BlockKeysLog2(args), 1u);
  const unsigned split_blocks =
      max((blocks + kMaxSplits - 1) / kMaxSplits, blocks > 4095u >> TileShape::BlockKeysLog2(args) ? 2u : 1u);
  const int splits = CeilDivSmall(blocks, split_blocks);
  plan.split_blocks = static_cast<int>(split_blocks);
  plan.splits = static_cast<uint8_t>(splits);
  plan.segment_splits = static_cast<uint8_t>((splits + kMaxSegments - 1) / kMaxSegments);
  const unsigned tile_rows = 1u << TileShape::RowsLog2(args);
  plan.row_tiles = static_cast<int>((q_len * args.group_size + tile_rows - 1) >> TileShape::RowsLog2(args));
  plan.length = ((static_cast<unsigned>(splits) * split_blocks - 1) >> args.block_shift) + 1;
  return plan;
}

// A CTA's part of a work tile: one KV head.
struct WorkTile {
  int kv_head;
  int row_tile;
  uint32_t begin;  // in the KV-block space

  // Number `tile` of a sequence's work tiles, for CTA `cta` of the CTA group.
  __device__ static WorkTile Of(const DecodeArgs& args, const SequencePlan& plan, int tile, int cta) {
    // Row tiles vary fastest.
    const int kv_head_group = plan.row_tiles == 1 ? tile : tile / plan.row_tiles;
    return {kv_head_group * args.cta_group_size + cta, tile - kv_head_group * plan.row_tiles,
            plan.begin + static_cast<unsigned>(tile) * plan.length};
  }
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_SEQUENCE_PLAN_CUH_
