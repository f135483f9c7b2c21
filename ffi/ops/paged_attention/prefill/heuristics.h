// Which instance of a prefill kernel a call takes, and with how many CTAs. From shapes alone, and the GPU's number of
// SMs: the same call always makes the same launches.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_HEURISTICS_H_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_HEURISTICS_H_

#include <algorithm>
#include <cstdint>

#include "ffi/ops/paged_attention/decode/decode.h"
#include "ffi/ops/paged_attention/paged_attention.h"
#include "ffi/ops/paged_attention/prefill/split_kv.h"

namespace xla_gpu::prefill {

// CTAs of a single-tile kernel: one for each work tile that there can be, and one more for the padding rows. The grid
// is that large rather than as large as the GPU, since the hardware hands out CTAs as others end: the even load of a
// dynamic scheduler, without a counter in memory that must be reset.
inline int64_t SingleTileCtas(const PagedAttentionParams& shapes, int tile_rows) {
  const int64_t group = shapes.num_heads / shapes.num_kv_heads;
  const int64_t prompts = std::min(shapes.max_seqs, shapes.num_tokens / (shapes.max_decode_tokens + 1));
  // Only the last work tile of a prompt may be partly filled.
  const int64_t tiles = shapes.num_tokens * group / tile_rows + prompts;
  const int64_t ctas = tiles * shapes.num_kv_heads + 1;
  constexpr int64_t kManyCtas = 2048;
  return shapes.dtype == DType::kF32 && shapes.max_seqs > kManySequences ? std::min(ctas, kManyCtas) : ctas;
}

// CTAs of the persistent kernel in x: as many as the GPU has SMs, or as there can be work tiles. Cross-CTA KV splits
// are as many work tiles more.
inline int64_t PersistentCtas(const PagedAttentionParams& shapes, const SplitAccumulatorLayout& layout, int tile_rows,
                              int64_t sms) {
  const int64_t ctas = std::min(sms, SplitAccumulatorLayout::kMaxCtas);
  return layout.pool_rows > 0 ? ctas : std::min(SingleTileCtas(shapes, tile_rows), ctas);
}

// In y: each row of the grid plans some of the sequences.
inline int64_t PersistentGridRows(const PagedAttentionParams& shapes) {
  const int64_t sequences = SplitAccumulatorLayout::SequencesPerGridRow(shapes.head_dim);
  return std::max<int64_t>(1, (shapes.max_seqs + sequences - 1) / sequences);
}

// CTAs of the combine kernel, whose warps take one row after the other.
inline int64_t CombineCtas(const PagedAttentionParams& shapes, int cta_warps, int64_t ctas_per_sm, int64_t sms) {
  return std::min((shapes.num_tokens * shapes.num_heads + cta_warps - 1) / cta_warps,
                  ctas_per_sm * std::min(sms, SplitAccumulatorLayout::kMaxCtas));
}

// The sm_90a kernels for head_dim 64 and 128 with TMA: instances of PrefillTmaKernel, PrefillTmaOneWarpgroupKernel.
enum class TmaInstance { kRows192, kRows128, kRows128Alternating, kRows64, kRows64Alternating, kOneWarpgroup };

// CTAs of PrefillTmaOneWarpgroupKernel on an SM.
inline constexpr int kOneWarpgroupCtasPerSm = 3;

// The instance that the shapes suggest. All give the same bits, so the shapes of a batch may decide. `one_warpgroup`:
// whether that kernel takes such calls.
TmaInstance TmaInstanceDim128(const PagedAttentionParams& shapes, const SplitKvPolicy& policy, bool one_warpgroup,
                              int64_t sms);
// The same at head_dim 64: kRows192 or kRows64Alternating.
TmaInstance TmaInstanceDim64(const PagedAttentionParams& shapes, int64_t sms);

// Whether the prefill kernel of 64 rows should do the decode path's split-KV work too, with `ctas` CTAs: where these
// have no more than one work tile each. With more, the kernels side by side take no longer.
bool SuitsDecodeRows(const PagedAttentionParams& shapes, const SplitKvPolicy& policy, int64_t ctas);

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_HEURISTICS_H_
