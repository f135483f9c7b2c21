// The decode path of paged_attention: sequences with few query rows, limited by the bytes of K and V.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_DECODE_H_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_DECODE_H_

#include <cstdint>

#include "ffi/base/status.h"
#include "ffi/device/stream.h"
#include "ffi/ops/paged_attention/paged_attention.h"

namespace xla_gpu {

// Sequences with 1 <= q_len <= kMaxDecodeRows belong to the decode path, longer ones to the prefill path.
inline constexpr int64_t kMaxDecodeRows = 8;
// Whether TMA can load pages of so many slots: they are whole 128-byte swizzle atoms.
constexpr bool SuitsTma(int64_t page_size) { return page_size % 8 == 0; }
// Query rows of a KV head that the decode path computes with one pass over K and V. More rows of several tokens (as in
// speculative decoding with grouped queries) belong to the prefill path, where that splits keys, whose work tiles
// have 64; not at head_dim 64 in pages that TMA does not load, where that takes longer.
inline constexpr int64_t kMaxPassRows = 16;
constexpr int64_t MaxDecodeTokens(const PagedAttentionParams& shapes, bool prefill_splits_keys) {
  const int64_t group = shapes.num_kv_heads > 0 ? shapes.num_heads / shapes.num_kv_heads : 1;
  const bool one_path = !prefill_splits_keys || (!SuitsTma(shapes.page_size) && shapes.head_dim == 64);
  if (one_path || group <= kMaxPassRows / kMaxDecodeRows) return kMaxDecodeRows;
  return group >= kMaxPassRows ? 1 : kMaxPassRows / group;
}

// Whether shapes and dtypes allow the prefill path to split keys, on a GPU that has the kernel for it.
constexpr bool MaySplitKeys(const PagedAttentionParams& shapes) {
  return shapes.dtype != DType::kF32 && !IsFloat8(shapes.cache_dtype) &&
         (shapes.head_dim == 64 || shapes.head_dim == 128 || shapes.head_dim == 256);
}

// The float32 kernels' CTAs read the metadata of all sequences. With more sequences than this there are fewer CTAs,
// each of which takes several work tiles: else the time would grow with the square of max_seqs.
inline constexpr int64_t kManySequences = 1024;

// Whether the shapes suggest few tokens for each sequence, but possibly several.
constexpr bool SuggestFewTokens(const PagedAttentionParams& shapes) {
  return shapes.num_tokens <= shapes.max_seqs * kMaxDecodeRows;
}
// Whether the shapes suggest sequences of the decode path. That is then launched first, and the prefill path's kernels
// find out while it runs whether they have anything to do. Otherwise the order is reversed: kernels that have nothing
// to do cost least behind those that have.
constexpr bool DecodeComesFirst(const PagedAttentionParams& shapes) {
  return shapes.num_tokens <= shapes.max_seqs * MaxDecodeTokens(shapes, MaySplitKeys(shapes));
}

// Scratch of a call for up to 64 sequences is at most 32 MiB. Where the decode path comes first, the prefill path waits
// for its end before it stores split accumulators, and both use all of it. Otherwise they may use it at the same time:
// the prefill path gets what its CTAs' accumulators take, or half where splits of few tokens are likely, and the decode
// path the rest.
inline constexpr int64_t kScratchLimit = int64_t{32} << 20;
// Whether the second path uses the scratch when the first one has ended, and both use all of it. Also where the prefill
// path's part is too little for the splits of few tokens, or of sequences of as many tokens each: then the decode path,
// which comes second, waits only where some sequence of the prefill path is split.
bool PathsShareScratch(const PagedAttentionCall& shapes);
// Whether the prefill path's combine kernel comes behind the decode path, which comes behind the other kernel. In front
// of it the combine kernel keeps the CTAs of the split-KV kernel from starting. Without decode rows it costs some 2 us,
// so only where the sequences are many.
bool PrefillCombineComesLast(const PagedAttentionCall& shapes);
// Whether one kernel merges the splits of both paths, behind both (prefill/combine_both.cuh). Where a few sequences
// probably have several tokens each, the decode path probably has nothing to do, and each kernel that finds this out
// costs some 1 to 2 us: the kernels of a stream end one after the other.
bool PathsShareCombine(const PagedAttentionCall& shapes);
// Bytes of scratch that each path may use.
int64_t PrefillScratchLimit(const PagedAttentionCall& shapes);
int64_t DecodeScratchLimit(const PagedAttentionCall& shapes);

// Of a cache: kernels count its slots in 32 bits, and bytes in 64.
Status CheckSlotCounts(const PagedAttentionParams& params);

// Bytes at the start of `scratch` that LaunchDecode may use. Depends on shapes and dtypes alone.
int64_t DecodeScratchBytes(const PagedAttentionCall& shapes);

// Computes the rows (out, and lse where wanted) of every sequence with 1 <= q_len <= kMaxDecodeRows that owns its query
// rows (sequence_metadata.cuh). Rows of such a sequence are NaN if its context_len, or a page number that its queries
// see, is invalid. With num_tokens <= kMaxDecodeRows it also writes the padding rows, so that the call needs no other
// launch. It writes nothing else. `params.scratch` holds at least DecodeScratchBytes with any contents. The launches
// depend on shapes, attributes and the device alone.
// NOTE: where the decode path does not come first, the kernel launched just before has to be the prefill path's, or one
// without programmatic dependent launch: the first kernel here may start as soon as that one allows it, and does not
// wait. The kernel after the last one here may start early too, and has to wait before it ends.
// With a tree_mask it computes every sequence of up to MaxTreeTokens() rows, makes the rows of longer ones NaN, and
// writes the padding rows: the call needs no other launch.
Status LaunchDecode(const PagedAttentionCall& params, Stream stream);

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_DECODE_H_
