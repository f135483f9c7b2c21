// What the sm_90a kernel of mla_attention keeps in scratch memory between the CTAs that share a row's keys and the
// kernel that merges their parts. No CUDA: the size is computed in every build.
#ifndef XLA_GPU_OPS_MLA_ATTENTION_SPLIT_LAYOUT_H_
#define XLA_GPU_OPS_MLA_ATTENTION_SPLIT_LAYOUT_H_

#include <algorithm>
#include <cstdint>

#include "ffi/ops/mla_attention/mla_attention.h"

namespace xla_gpu::mla {

// The shapes that the sm_90a kernel is for: those of DeepSeek V2, V3 and R1, and of Kimi K2.
inline constexpr int kLatentDim = 512;                   // value_dim
inline constexpr int kRopeDim = 64;                      // of a key, behind the latent
inline constexpr int kSlotDim = kLatentDim + kRopeDim;   // head_dim
inline constexpr int kTileRows = 64;                     // query rows, (token, head), of a CTA's work tile, at most
inline constexpr int kFewRows = 16;                      // the same where sequences have few
inline constexpr int kMaxCtas = 132;                     // of a launch
inline constexpr int kMinBoxRows = 8, kMaxBoxRows = 64;  // slots of a page that are loaded together

// The largest power of two that divides page_size, up to kMaxBoxRows.
constexpr int64_t BoxRows(int64_t page_size) { return std::min<int64_t>(page_size & -page_size, kMaxBoxRows); }

constexpr bool HasSm90Shape(const MlaAttentionParams& shapes) {
  return shapes.dtype != DType::kF32 && shapes.head_dim == kSlotDim && shapes.value_dim == kLatentDim &&
         shapes.page_size > 0 && BoxRows(shapes.page_size) >= kMinBoxRows;
}

// The rows of a work tile. Fewer than kTileRows where sequences have so few of them on average: 16 heads and a new
// token each, for example. Longer sequences are several work tiles then, which together are no more than max_seqs.
constexpr int TileRows(const MlaAttentionParams& shapes) {
  return shapes.num_tokens * shapes.num_heads <= kFewRows * shapes.max_seqs ? kFewRows : kTileRows;
}

// A work tile whose keys several CTAs share, as the first of them has written it down.
struct SplitTile {
  int32_t first_row;  // of out, [num_tokens * num_heads, value_dim]
  int32_t rows;       // 0: the CTA is no first one of a work tile
  int32_t parts;
  int32_t cta_step;  // part i > 0 is that of CTA `first + i * cta_step`
};

// [slots][rows][kLatentDim] float32 accumulators, [slots][rows] AttentionState, [kMaxCtas] SplitTile. Each CTA has two
// slots: one for a work tile that an earlier CTA has begun, then one for a work tile that it leaves to a later one.
struct SplitLayout {
  static constexpr int64_t kSlots = int64_t{2} * kMaxCtas;
  int64_t rows;  // of a slot

  static constexpr SplitLayout Of(const MlaAttentionParams& shapes) {
    return {std::min<int64_t>(shapes.num_tokens * shapes.num_heads, kTileRows)};
  }
  constexpr int64_t StatesBegin() const { return kSlots * rows * kLatentDim * 4; }
  constexpr int64_t TilesBegin() const { return StatesBegin() + kSlots * rows * 8; }
  constexpr int64_t Bytes() const { return TilesBegin() + kMaxCtas * static_cast<int64_t>(sizeof(SplitTile)); }
};

}  // namespace xla_gpu::mla

#endif  // XLA_GPU_OPS_MLA_ATTENTION_SPLIT_LAYOUT_H_
