// The size of paged_attention's scratch memory, and how its paths share it. Compiled in every build, so that a program
// exported on a machine without CUDA has the same result shapes.
#include <algorithm>
#include <cstdint>

#include "ffi/ops/paged_attention/decode/decode.h"
#include "ffi/ops/paged_attention/decode/params.h"
#include "ffi/ops/paged_attention/paged_attention.h"
#include "ffi/ops/paged_attention/prefill/prefill.h"
#include "ffi/ops/paged_attention/prefill/split_kv.h"

namespace xla_gpu {
namespace {

constexpr int64_t kFewTokensScratchLimit = kScratchLimit / 2;
// Where few tokens are likely: up to so many rows of `out` the prefill path gets all of the scratch, if half of it is
// too little for the accumulators of so many splits of them (split_kv.h).
constexpr int64_t kMaxSplitRows = 8192;
constexpr int64_t kLikelySplits = 9;

// The prefill path's part, where each path has one: a work tile for each CTA.
constexpr int64_t kPrefillScratch = int64_t{14} << 20, kLargePrefillScratch = int64_t{67} << 18;
// They also lie behind the decode path's part where prefill::SuitsLongestFirst, which has all of the scratch in one.
constexpr bool HasPlacesOfCtas(int64_t dim, int64_t prefill_bytes) {
  using Layout = prefill::SplitAccumulatorLayout;
  const int64_t decode_rows = (kScratchLimit - prefill_bytes + dim * 4 - 1) / (dim * 4);
  return kScratchLimit / (dim * 4 + 8) - decode_rows >= Layout::kMaxCtas * Layout::MaxTileRows(dim);
}
static_assert(HasPlacesOfCtas(64, kPrefillScratch) && HasPlacesOfCtas(128, kPrefillScratch) &&
              HasPlacesOfCtas(256, kLargePrefillScratch));

int64_t UnsharedPrefillScratch(const PagedAttentionParams& shapes) {
  // Of few sequences the prefill path keeps the accumulators of all splits, and the decode path has few rows.
  constexpr int64_t kFewSequences = 4;
  const bool few_sequences = shapes.max_seqs <= kFewSequences && !SuggestFewTokens(shapes);
  if (shapes.head_dim > 192 || few_sequences) return kLargePrefillScratch;
  return SuggestFewTokens(shapes) ? kFewTokensScratchLimit : kPrefillScratch;
}

// PathsShareCombine, where they do not share the scratch.
bool SuitsSharedCombine(const PagedAttentionCall& shapes) {
  constexpr int64_t kMaxSequences = 32, kMaxRows = 8192;
  return shapes.max_seqs > 0 && shapes.max_seqs <= kMaxSequences && SuggestFewTokens(shapes) &&
         shapes.num_tokens * shapes.num_heads <= kMaxRows && shapes.head_dim == 128 && MaySplitKeys(shapes) &&
         shapes.tree_words == 0 && !DecodeComesFirst(shapes);
}

}  // namespace

bool PathsShareScratch(const PagedAttentionCall& shapes) {
  if (DecodeComesFirst(shapes)) return true;
  const int64_t rows = shapes.num_tokens * shapes.num_heads;
  const int64_t row_bytes = prefill::SplitAccumulatorLayout::RowBytes(shapes.head_dim);
  if (SuggestFewTokens(shapes) && MaySplitKeys(shapes) && rows < kMaxSplitRows &&
      kLikelySplits * rows * row_bytes > kFewTokensScratchLimit) {
    return true;
  }
  // Sequences of as many tokens each, none of which belongs to the decode path.
  const int64_t alike_bytes = prefill::AlikeSplitRows(shapes) * row_bytes;
  return alike_bytes > UnsharedPrefillScratch(shapes) && !SuitsSharedCombine(shapes) &&
         prefill::WantsSplitAccumulators(shapes);
}
bool PrefillCombineComesLast(const PagedAttentionCall& shapes) {
  constexpr int64_t kManyDecodeRows = 32;
  return !DecodeComesFirst(shapes) && !PathsShareScratch(shapes) && shapes.max_seqs > kManyDecodeRows;
}
bool PathsShareCombine(const PagedAttentionCall& shapes) {
  return SuitsSharedCombine(shapes) && !PathsShareScratch(shapes);
}
int64_t PrefillScratchLimit(const PagedAttentionCall& shapes) {
  return PathsShareScratch(shapes) || shapes.tree_words > 0 ? kScratchLimit : UnsharedPrefillScratch(shapes);
}
int64_t DecodeScratchLimit(const PagedAttentionCall& shapes) {
  return PathsShareScratch(shapes) || shapes.tree_words > 0 ? kScratchLimit
                                                            : kScratchLimit - PrefillScratchLimit(shapes);
}

int64_t DecodeScratchBytes(const PagedAttentionCall& shapes) {
  // float32 needs none: a CTA sees all keys of a row.
  if (shapes.dtype == DType::kF32 || shapes.num_kv_heads == 0) return 0;
  if (shapes.tree_words > 0 && !decode::HasWideTiles(shapes)) return 0;
  const decode::KernelConfig config =
      shapes.tree_words > 0 ? decode::MakeWideKernelConfig(shapes) : decode::MakeKernelConfig(shapes);
  return config.accumulators * config.accum_rows * (shapes.head_dim + decode::kStateFloats) * int64_t{sizeof(float)};
}

int64_t PrefillScratchBegin(const PagedAttentionCall& shapes) {
  // Where they share it, the second path waits for the first one's end; with a tree_mask there is only one of them.
  return PathsShareScratch(shapes) || shapes.tree_words > 0 ? 0 : (DecodeScratchBytes(shapes) + 255) / 256 * 256;
}

int64_t PagedAttentionScratchBytes(const PagedAttentionCall& shapes) {
  // The larger of both cache formats, so that the size does not depend on cache_dtype.
  int64_t bytes = 0;
  for (const DType cache : {shapes.dtype, DType::kF8E4M3FN}) {
    PagedAttentionCall call = shapes;
    call.cache_dtype = cache;
    const auto layout = prefill::SplitAccumulatorLayout::Of(call);
    bytes = std::max({bytes, DecodeScratchBytes(call), layout.begin_bytes + layout.Bytes(call.head_dim)});
  }
  return bytes;
}

}  // namespace xla_gpu
